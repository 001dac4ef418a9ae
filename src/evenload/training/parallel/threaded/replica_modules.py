"""Replicas of a user's modules, one set for each lane, and the user's own objects that lead each lane to its own.

Note [Twins]
  A twin is a module of the same class with the same attributes, whose submodules, parameters and buffers are the lane's. On
  the device of the user's parameters a lane's parameter shares their memory (its gradient is its own); on another device it
  is a copy that is renewed before each attempt. Buffers are copied, except for one lane that has samples in every micro-batch:
  what its forward does to buffers is done to the user's.

Note [Attributes]
  What the user's frame sets on a module reaches all twins before the next attempt. What a forward sets on its twin stays
  there, as on a rank of ddp; what the first twin's forward sets is seen on the user's module too. A list or a dict that
  forward fills in place is one for all lanes.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_OWN = frozenset(("_parameters", "_buffers", "_modules"))
_MISSING = object()

ParameterOf = Callable[[nn.Parameter], torch.Tensor]


def all_modules(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Each module of the models once, in order."""
    return list({id(module): module for model in models for module in model.modules()}.values())


def all_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Each parameter of the models once, in order."""
    return list({id(param): param for model in models for param in model.parameters()}.values())


class Origins:
    """The user's modules, and the attributes as they were when the twins saw them last."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.modules = all_modules(models)
        self.parameters = all_parameters(models)
        self._seen: list[dict[str, Any]] = [dict(module.__dict__) for module in self.modules]
        self._signature = self._sign()

    @property
    def changed(self) -> bool:
        """Whether modules or parameters were added, replaced, frozen or thawed since: the twins must be made anew."""
        return self._sign() != self._signature

    def news(self) -> Iterator[tuple[int, dict[str, Any], list[str]]]:
        """For each module with changed attributes: its index, the changed ones, and the names of those that are gone."""
        for index, (module, seen) in enumerate(zip(self.modules, self._seen, strict=True)):
            now = module.__dict__
            if (
                len(now) == len(seen)
                and all(map(operator.is_, now.values(), seen.values()))
                and all(map(operator.eq, now, seen))
            ):
                continue
            changed = {
                name: value for name, value in now.items() if name not in _OWN and seen.get(name, _MISSING) is not value
            }
            gone = [name for name in seen if name not in now]
            self._seen[index] = dict(now)
            yield index, changed, gone

    def saw(self, index: int) -> None:
        """The module's attributes as they are now are no news."""
        self._seen[index] = dict(self.modules[index].__dict__)

    def _sign(self) -> list[tuple[Any, ...]]:
        # A module that was added somewhere shows at its parent.
        return [
            (
                id(module),
                type(module),
                *map(id, module._modules.values()),
                *module._parameters,
                *map(_mark, module._parameters.values()),
            )
            for module in self.modules
        ]


class Replica:
    """One lane's twins."""

    def __init__(self, origins: Origins, device: torch.device, parameter_of: ParameterOf) -> None:
        """Args:
        origins: the user's modules.
        device: the lane's.
        parameter_of: makes the lane's parameter of one of the user's.
        """
        self.device = device
        self.modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, torch.Tensor] = {id(p): parameter_of(p) for p in origins.parameters}
        self._origins = origins
        self._buffers: dict[tuple[int, str], _Copied] = {}
        self._set: list[dict[str, Any]] = []
        for module in origins.modules:
            # No constructor, and no `__new__` of the class (torch.fx has one that makes classes).
            self.modules[id(module)] = object.__new__(type(module))
        for module in origins.modules:
            twin = self.modules[id(module)]
            own = twin.__dict__
            own.update((name, self._mine(value)) for name, value in module.__dict__.items() if name not in _OWN)
            own["_modules"] = {
                k: None if child is None else self.modules[id(child)] for k, child in module._modules.items()
            }
            own["_parameters"] = {
                k: None if p is None else self.parameters[id(p)] for k, p in module._parameters.items()
            }
            own["_buffers"] = {}
            _mend(twin)
            self._set.append(dict(own))

    @property
    def all_modules(self) -> list[nn.Module]:
        """The twins, in the order of the user's modules."""
        return list(self.modules.values())

    def take(self, index: int, changed: Mapping[str, Any], gone: Sequence[str]) -> None:
        """What the user's frame has changed on a module."""
        twin = self.modules[id(self._origins.modules[index])]
        for name, value in changed.items():
            twin.__dict__[name] = self._mine(value)
        for name in gone:
            twin.__dict__.pop(name, None)
        _mend(twin)
        self._set[index] = dict(twin.__dict__)

    @torch.no_grad()
    def refresh_buffers(self, *, keeps: bool) -> None:
        """Buffers as the user's modules have them; copied only where either side has changed.

        One replica `keeps` them: where they lie on its device it works on the user's own. `bring_home` belongs to it.
        """
        copies: dict[int, torch.Tensor] = {}
        for module in self._origins.modules:
            if not module._buffers and not self.modules[id(module)]._buffers:
                continue
            twin = self.modules[id(module)]
            fresh: dict[str, torch.Tensor | None] = {}
            for name, buffer in module._buffers.items():
                if buffer is None or (keeps and buffer.device == self.device):
                    fresh[name] = buffer
                    continue
                held, own = self._buffers.get((id(module), name)), twin._buffers.get(name)
                if held is None or not held.is_valid(buffer, own):
                    if id(buffer) not in copies:
                        copies[id(buffer)] = _copied(buffer, held.copy if held is not None else None, self.device)
                    own = copies[id(buffer)]
                    self._buffers[id(module), name] = _Copied(buffer, _version(buffer), own, _version(own))
                fresh[name] = own
            _put_buffers(twin, fresh)

    @torch.no_grad()
    def bring_home(self) -> None:
        """What a forward has done to these buffers is done to the user's."""
        for module in self._origins.modules:
            for name, own in self.modules[id(module)]._buffers.items():
                buffer = module._buffers.get(name)
                if own is buffer:
                    continue
                held = self._buffers.get((id(module), name))
                if own is None or buffer is None or held is None or own is not held.copy:
                    module._buffers[name] = own if own is None or buffer is None else own.to(buffer.device)
                elif held.copy_version is None or _version(own) != held.copy_version:
                    buffer.copy_(own)

    def give_back(self) -> None:
        """What a forward has set on these twins is seen on the user's modules; for the first lane."""
        for index, module in enumerate(self._origins.modules):
            twin = self.modules[id(module)]
            now, before = twin.__dict__, self._set[index]
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            for name, value in now.items():
                if name not in _OWN and before.get(name, _MISSING) is not value:
                    module.__dict__[name] = self._yours(value)
            self._set[index] = dict(now)
            self._origins.saw(index)

    def _mine(self, value: Any) -> Any:
        """An attribute of the user's module as the twin's: modules and parameters in it are this lane's."""
        if isinstance(value, nn.Module):
            return self.modules.get(id(value), value)
        if isinstance(value, nn.Parameter):
            return self.parameters.get(id(value), value)
        if type(value) in (list, tuple) and any(
            id(part) in self.parameters or id(part) in self.modules for part in value
        ):
            return type(value)(self._mine(part) for part in value)
        return value

    def _yours(self, value: Any) -> Any:
        if isinstance(value, nn.Module | nn.Parameter):
            for known in (self.modules, self.parameters):
                for key, own in known.items():
                    if own is value:
                        return next(
                            (
                                one
                                for one in itertools.chain(self._origins.modules, self._origins.parameters)
                                if id(one) == key
                            ),
                            value,
                        )
        return value


class _Copied:
    """A buffer of the user's and a lane's copy of it, both as they were when it was made."""

    __slots__ = ("buffer", "copy", "copy_version", "version")

    def __init__(self, buffer: torch.Tensor, version: int | None, copy: torch.Tensor, copy_version: int | None) -> None:
        self.buffer, self.version, self.copy, self.copy_version = buffer, version, copy, copy_version

    def is_valid(self, buffer: torch.Tensor, own: torch.Tensor | None) -> bool:
        if own is None or buffer is not self.buffer or own is not self.copy:
            return False
        versions = (self.version, self.copy_version)
        return None not in versions and (_version(buffer), _version(own)) == versions


def alias_of(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A lane's parameter: on the same device the same memory, elsewhere room for a copy."""
    data = param.detach() if param.device == device else torch.empty_like(param, device=device).detach()
    own: nn.Parameter = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    own.__dict__.update(param.__dict__)  # marks that a user or a library put on it
    for hook in (param._backward_hooks or {}).values():
        own.register_hook(hook)  # type: ignore[no-untyped-call]
    return own


@torch.no_grad()
def renew(params: Sequence[nn.Parameter], copies: Sequence[torch.Tensor]) -> None:
    """Makes a lane's parameters those of the user's again, whatever was done to them, `.data` included."""
    apart: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for param, own in zip(params, copies, strict=True):
        if own.device != param.device:
            apart[0].append(own)
            apart[1].append(param)
        elif own.data_ptr() != param.data_ptr() or own.shape != param.shape:
            own.data = param.data
    if apart[0]:
        # Asynchronous from pinned memory only; a copy to the CPU is waited for.
        torch._foreach_copy_(apart[0], apart[1], non_blocking=apart[0][0].is_cuda)


def _copied(buffer: torch.Tensor, room: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    source = buffer.detach()
    if room is not None and room.shape == source.shape and room.dtype == source.dtype and room.device == device:
        return room.detach().copy_(source)
    return source.to(device, copy=True)


def _version(tensor: torch.Tensor) -> int | None:
    """Grows with each change in place; None where torch doesn't count (in inference mode)."""
    return None if tensor.is_inference() else tensor._version


def _put_buffers(twin: nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    # In place: another dict would look like an attribute that forward has set.
    held = twin.__dict__["_buffers"]
    held.clear()
    held.update(buffers)


def _mark(param: nn.Parameter | None) -> Any:
    if param is None:
        return None
    return id(param), param.requires_grad, param.dtype, param.device, *(param._backward_hooks or ())


def _mend(twin: nn.Module) -> None:
    """Recurrent modules keep their weights in a list besides."""
    if isinstance(twin, nn.RNNBase) and "_flat_weights_names" in twin.__dict__:
        weights = [twin._parameters.get(name) for name in twin._flat_weights_names]
        twin.__dict__["_flat_weights"] = weights
        twin.__dict__["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]
