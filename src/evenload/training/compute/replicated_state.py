"""Find the state of models that must be equal on all ranks where each holds a replica; see docs/consistency.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from evenload.training.compute import batchnorm

_BATCH_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def replicated_state(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for index, model in enumerate(models):
        first = f"{index}." if len(models) > 1 else ""
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        for path, module in model.named_modules():
            own = isinstance(module, nn.modules.batchnorm._BatchNorm) and not batchnorm.has_global_statistics(module)
            left_out = getattr(module, "_non_persistent_buffers_set", set()) | set(_BATCH_NORM_BUFFERS if own else ())
            buffers = ((key, value) for key, value in module._buffers.items() if key not in left_out)
            for key, tensor in (*module._parameters.items(), *buffers):
                name = f"{path}.{key}" if path else key
                if tensor is None or id(tensor) in seen or name in ignored or not _comparable(tensor):
                    continue
                seen.add(id(tensor))
                found[first + name] = tensor
    return found


def _comparable(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and not nn.parameter.is_lazy(tensor)
        and not is_traceable_wrapper_subclass(tensor)
    )
