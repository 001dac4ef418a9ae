"""Save and restore what a verification changes: parameters, buffers, gradients, modes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd


@dataclass(frozen=True)
class Tracked:
    """One trainable parameter whose gradient is compared."""

    name: str
    param: nn.Parameter
    prepared: bool
    """True if a model given to `run.prepare` holds it; otherwise only an optimizer of the script does."""


def tracked_parameters(models: Sequence[nn.Module]) -> list[Tracked]:
    """Return the trainable parameters of the prepared models, then those that only an optimizer of the script holds."""
    found: list[Tracked] = []
    seen: set[int] = set()
    for index, model in enumerate(models):
        prefix = f"{type(model).__name__}[{index}]." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            if param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                found.append(Tracked(prefix + name, param, prepared=True))
    unprepared: list[nn.Parameter] = []
    for value in _living(torch.optim.Optimizer):
        for group in value.param_groups:
            for param in group["params"]:
                if param.requires_grad and param.is_leaf and id(param) not in seen:
                    seen.add(id(param))
                    unprepared.append(param)
    names = _names_of(unprepared) if unprepared else {}
    found += [Tracked(names.get(id(p), f"a tensor of shape {tuple(p.shape)}"), p, prepared=False) for p in unprepared]
    return found


def _living(kind: type[torch.optim.Optimizer]) -> Iterator[torch.optim.Optimizer]:
    # type(), not isinstance: reading __class__ of some objects runs their code.
    for value in gc.get_objects():
        if issubclass(type(value), kind) and hasattr(value, "param_groups"):
            yield value


def _names_of(params: Sequence[nn.Parameter]) -> dict[int, str]:
    # ``Linear.weight``: by the outermost module that holds the parameter.
    wanted = {id(param) for param in params}
    names: dict[int, str] = {}
    for value in gc.get_objects():
        if not issubclass(type(value), nn.Module) or "_parameters" not in vars(value):
            continue
        for name, param in value.named_parameters():
            full = f"{type(value).__name__}.{name}"
            if id(param) in wanted and len(full) > len(names.get(id(param), "")):
                names[id(param)] = full
    return names


@contextmanager
def put_back(models: Sequence[nn.Module], tracked: Sequence[Tracked]) -> Iterator[None]:
    """Restore parameters, buffers, gradients and modes after the body, as the same objects.

    Inside, no gradient is present. The body must not change the parameters' values in place.
    """
    params = {id(p): p for model in models for p in model.parameters()} | {id(t.param): t.param for t in tracked}
    held = [(param, param.data, param.grad) for param in params.values()]
    modules = [module for model in models for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    modes = [(module, module.training) for module in modules]
    for param in params.values():
        param.grad = None
    try:
        yield
    finally:
        for param, data, grad in held:
            param.grad = None
            param.data = data
            param.grad = grad
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer
        for module, training in modes:
            module.training = training


@contextmanager
def switched_off(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put these modules in evaluation mode while the body runs."""
    before = [(module, module.training) for module in modules]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def no_dropout(models: Sequence[nn.Module]) -> Iterator[None]:
    """Disable dropout modules, and dropout in recurrent modules, while the body runs."""
    modules = [module for model in models for module in model.modules()]
    recurrent = [(module, module.dropout) for module in modules if isinstance(module, nn.RNNBase)]
    for module, _ in recurrent:
        module.dropout = 0.0
    try:
        with switched_off([module for module in modules if isinstance(module, _DropoutNd)]):
            yield
    finally:
        for module, dropout in recurrent:
            module.dropout = dropout


def batch_norms(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the BatchNorm modules, subclasses too, that take statistics of the batch now, with their names."""
    return [
        (name, module)
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
    ]


def params_key(models: Sequence[nn.Module]) -> list[float]:
    """Return a checksum of the parameters' bits, equal for equal values on any device."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for model in models:
        for index, param in enumerate(model.parameters()):
            data = param.detach()
            if data.is_complex():
                data = torch.view_as_real(data)
            if not data.is_sparse:
                bits = data.contiguous().view(widths[data.element_size()])
                total += (index + 1) * int(bits.sum(dtype=torch.int64))
    return [float(total % (1 << 52))]
