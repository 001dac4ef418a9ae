"""The parameters of models, compared from step to step: users add, replace and convert them between steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import nn

_GRAD = operator.attrgetter("grad")
_IS_SET = operator.is_not


class ModelParameters:
    """Knows the parameters of models; a comparison runs no Python per parameter, unlike `named_parameters`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = list(models)
        self.read()

    @property
    def has_changed(self) -> bool:
        """True if parameters were added or replaced since they were read."""
        found = list(chain.from_iterable(map(dict.values, self._dicts)))
        if any(self._empty) or len(found) != len(self._known):
            return True
        # By identity: tensors compare by value, and a list of ids takes twice as long.
        return not all(map(operator.is_, found, self._known))

    def read(self) -> None:
        # Kept alive, so that no new module has the id of one of these.
        modules = self._modules = list(dict.fromkeys(module for model in self._models for module in model.modules()))
        dicts: list[dict[str, Any]] = [
            members
            for module in modules
            for members in (module._parameters, module._modules)
            if isinstance(members, dict)  # those of a ScriptModule never change
        ]
        self._dicts = [members for members in dicts if members]
        self._empty = [members for members in dicts if not members]
        self._known: list[Any] = list(chain.from_iterable(map(dict.values, self._dicts)))
        """All parameters and modules that the models hold directly."""
        self._with_gradients: tuple[int, list[nn.Parameter]] | None = None
        """The newest result of `with_gradients`: these have gradients in most steps."""
        self.named: dict[str, nn.Parameter] = {}
        """By name; a shared parameter has the first of its names."""
        self.by_model: list[list[nn.Parameter]] = []
        for index, model in enumerate(self._models):
            prefix = f"{index}." if len(self._models) > 1 else ""
            known = set(map(id, self.named.values()))
            named = {prefix + name: param for name, param in model.named_parameters() if id(param) not in known}
            self.named |= named
            self.by_model.append(list(named.values()))

    def with_gradients(self, most: int) -> list[nn.Parameter]:
        """Return up to `most` parameters of each model that have a gradient."""
        if (
            (usual := self._with_gradients)
            and usual[0] == most
            and all(map(_IS_SET, map(_GRAD, usual[1]), repeat(None)))
        ):
            return usual[1]
        found = [p for params in self.by_model for p in islice((p for p in params if p.grad is not None), most)]
        if len(self.by_model) == 1 and len(found) == min(most, len(self.by_model[0])):
            self._with_gradients = most, found
        if not found and self.has_changed:
            self.read()
            return self.with_gradients(most)
        return found

    @property
    def have_gradients(self) -> bool:
        """True if some parameter holds a gradient."""
        return not all(map(operator.is_, map(_GRAD, self.named.values()), repeat(None)))

    def nonzero_gradients(self) -> list[str]:
        """Return the names of trainable parameters that hold a nonzero gradient."""
        if not self.have_gradients or not any_nonzero(list(map(_GRAD, self.named.values()))):
            return []
        if self.has_changed:
            self.read()
            return self.nonzero_gradients()
        named = [(name, param.grad) for name, param in self.named.items() if param.requires_grad]
        return [name for name, grad in named if grad is not None and bool(grad.count_nonzero())]


def any_nonzero(grads: Sequence[torch.Tensor | None]) -> bool:
    """Return whether some gradient holds a value other than 0; a GPU is waited for once."""
    present = [grad for grad in grads if grad is not None and grad.numel()]
    if present and all(grad.device.type == "cpu" and not grad.is_sparse for grad in present):
        # An eighth of the time of the norm.
        values = (torch.view_as_real(grad) if grad.is_complex() else grad for grad in present)
        return any(bool(bound) for value in values for bound in torch.aminmax(value))
    return bool(magnitude(grads))


def magnitude(grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return a scalar that is 0 only if all values of the gradients are; sparse gradients count as not 0."""
    present = [grad for grad in grads if grad is not None and grad.numel()]
    if not present or any(grad.is_sparse for grad in present):
        return torch.tensor(float(bool(present)))
    values = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in present]
    # The sum of magnitudes is 0 only where all are: squares may vanish, and the largest magnitude takes five times as long.
    return sum_scalars(torch._foreach_norm(values, 1))


def sum_scalars(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of scalar tensors, on the device of the first."""
    first = values[0]
    if any(value.dtype != first.dtype or value.device != first.device for value in values):
        values = [value.to(first.device, torch.float64) for value in values]
    return torch.stack(list(values)).sum()
