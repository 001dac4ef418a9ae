"""The parameters of models, compared from step to step: users add, replace and convert them between steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

_GRAD = operator.attrgetter("grad")


class ModelParameters:
    """Knows the parameters of models; a comparison runs no Python per parameter, unlike `named_parameters`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = list(models)
        self.read()

    @property
    def has_changed(self) -> bool:
        """True if parameters were added or replaced since they were read."""
        return self._ids() != self._known_ids

    def read(self) -> None:
        # Kept alive, so that no new module has the id of one of these.
        modules = self._modules = list(dict.fromkeys(module for model in self._models for module in model.modules()))
        self._dicts: list[dict[str, Any]] = [
            members
            for module in modules
            for members in (module._parameters, module._modules)
            if isinstance(members, dict)  # those of a ScriptModule never change
        ]
        self._known_ids = self._ids()
        prefixes = [f"{index}." if len(self._models) > 1 else "" for index in range(len(self._models))]
        self.named: dict[str, nn.Parameter] = {}
        """By name; a shared parameter has the first of its names."""
        for prefix, model in zip(prefixes, self._models, strict=True):
            known = set(map(id, self.named.values()))
            named = model.named_parameters()
            self.named |= {prefix + name: param for name, param in named if id(param) not in known}

    def _ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))

    def nonzero_gradients(self) -> list[str]:
        """Return the names of trainable parameters that hold a nonzero gradient."""
        grads = list(map(_GRAD, self.named.values()))
        if all(map(operator.is_, grads, repeat(None))) or not any_nonzero(grads):
            return []
        if self.has_changed:
            self.read()
            return self.nonzero_gradients()
        named = [(name, param.grad) for name, param in self.named.items() if param.requires_grad]
        return [name for name, grad in named if grad is not None and bool(grad.count_nonzero())]


def any_nonzero(grads: Sequence[torch.Tensor | None]) -> bool:
    """Return whether some gradient holds a value other than 0; a GPU is waited for once."""
    present = [grad for grad in grads if grad is not None and grad.numel()]
    if not present or any(grad.is_sparse for grad in present):
        return bool(present)
    norms = torch._foreach_norm([torch.view_as_real(grad) if grad.is_complex() else grad for grad in present], math.inf)
    return bool(torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).any())
