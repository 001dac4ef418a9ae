"""Find the state of models that must be equal on all ranks where each holds a replica; see docs/consistency.md."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from evenload.training.compute import batchnorm

_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
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


class ReplicatedState:
    """`replicated_state` of the same models, searched anew only where a module or tensor was added, replaced or removed.

    With 800 small parameters the search takes 3 ms, the look for a change 0.1 ms.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = list(models)
        self._dicts: list[dict[str, Any]] = []
        self._held: list[Any] = []
        self._found: dict[str, torch.Tensor] | None = None

    def read(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name; nobody changes the dict."""
        if self._found is None or not self._is_unchanged():
            modules = [module for model in self._models for module in model.modules()]
            members = [held for m in modules for held in (m._parameters, m._buffers, m._modules)]
            self._dicts = [
                held for held in members if isinstance(held, dict)
            ]  # those of a ScriptModule can't be followed
            self._held = self._list()
            found = replicated_state(self._models)
            self._found = found if len(self._dicts) == len(members) else None
            return found
        return self._found

    def _is_unchanged(self) -> bool:
        now = self._list()
        return len(now) == len(self._held) and all(map(operator.is_, now, self._held))

    def _list(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))


def _comparable(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    # The usual types first: the last question takes ten times as long as all others.
    return type(tensor) in _PLAIN_TYPES or not (nn.parameter.is_lazy(tensor) or is_traceable_wrapper_subclass(tensor))
