"""Replicas of a user's modules, one set for each replica thread.

Note [Replica modules]
  A replica module has the class and attributes of the user's, but submodules, parameters and buffers of its own. On the
  device of the user's parameters a replica's parameter shares their memory (its gradient is its own); on another device it is
  a copy that is refreshed before each attempt. Buffers are copied, except for one replica that has samples in every
  micro-batch: what its forward does to buffers is done to the user's.

Note [Attributes]
  Attributes that the user sets on a module reach all replicas before the next attempt. Attributes that a forward sets on its
  replica stay there, as on a rank of ddp; those of the first replica are set on the user's module too. All replicas share a
  list or dict that forward fills in place.
"""

from __future__ import annotations

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
    return list({id(module): module for model in models for module in model.modules()}.values())


def all_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list({id(param): param for model in models for param in model.parameters()}.values())


class UserModules:
    """The user's modules, and the attributes that the replicas have."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.modules = all_modules(models)
        self.parameters = all_parameters(models)
        self._seen: list[dict[str, Any]] = [dict(module.__dict__) for module in self.modules]
        self._signature = self._structure()

    @property
    def changed(self) -> bool:
        """True once modules or parameters were added, replaced, frozen or unfrozen: replicas must be built again."""
        return self._structure() != self._signature

    def changes(self) -> Iterator[tuple[int, dict[str, Any], list[str]]]:
        """Yield the index, changed attributes and removed names of each changed module."""
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

    def mark_seen(self, index: int) -> None:
        self._seen[index] = dict(self.modules[index].__dict__)

    def _structure(self) -> list[tuple[Any, ...]]:
        # An added module shows at its parent.
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
    """One thread's replica of the user's modules; `parameter_of` makes its parameter from the user's."""

    def __init__(self, user_modules: UserModules, device: torch.device, parameter_of: ParameterOf) -> None:
        self.device = device
        self.modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, torch.Tensor] = {id(p): parameter_of(p) for p in user_modules.parameters}
        self._user_modules = user_modules
        self._buffers: dict[tuple[int, str], _BufferCopy] = {}
        self._set: list[dict[str, Any]] = []
        self._originals: dict[int, nn.Module | nn.Parameter] = {}
        for module in user_modules.modules:
            # No constructor, and no `__new__` of the class (torch.fx has one that makes classes).
            self.modules[id(module)] = object.__new__(type(module))
        for module in user_modules.modules:
            replica_module = self.modules[id(module)]
            own = replica_module.__dict__
            own.update((name, self._to_replica(value)) for name, value in module.__dict__.items() if name not in _OWN)
            own["_modules"] = {
                k: None if child is None else self.modules[id(child)] for k, child in module._modules.items()
            }
            own["_parameters"] = {
                k: None if p is None else self.parameters[id(p)] for k, p in module._parameters.items()
            }
            own["_buffers"] = {}
            _rebuild_flat_weights(replica_module)
            self._set.append(dict(own))
            self._originals[id(replica_module)] = module
        self._originals.update((id(self.parameters[id(p)]), p) for p in user_modules.parameters)

    @property
    def all_modules(self) -> list[nn.Module]:
        return list(self.modules.values())

    def apply_changes(self, index: int, changed: Mapping[str, Any], gone: Sequence[str]) -> None:
        replica_module = self.modules[id(self._user_modules.modules[index])]
        for name, value in changed.items():
            replica_module.__dict__[name] = self._to_replica(value)
        for name in gone:
            replica_module.__dict__.pop(name, None)
        _rebuild_flat_weights(replica_module)
        self._set[index] = dict(replica_module.__dict__)

    @torch.no_grad()
    def refresh_buffers(self, *, owns_buffers: bool) -> None:
        """Take over the user's buffers, copying only where either side has changed.

        The one replica that `owns_buffers` uses the user's own where they are on its device; `write_back_buffers` is for it.
        """
        copies: dict[int, torch.Tensor] = {}
        for module in self._user_modules.modules:
            if not module._buffers and not self.modules[id(module)]._buffers:
                continue
            replica_module = self.modules[id(module)]
            fresh: dict[str, torch.Tensor | None] = {}
            for name, buffer in module._buffers.items():
                if buffer is None or (owns_buffers and buffer.device == self.device):
                    fresh[name] = buffer
                    continue
                held, own = self._buffers.get((id(module), name)), replica_module._buffers.get(name)
                if held is None or not held.is_valid(buffer, own):
                    if id(buffer) not in copies:
                        copies[id(buffer)] = _copied(buffer, held.copy if held is not None else None, self.device)
                    own = copies[id(buffer)]
                    self._buffers[id(module), name] = _BufferCopy(buffer, _version(buffer), own, _version(own))
                fresh[name] = own
            _put_buffers(replica_module, fresh)

    @torch.no_grad()
    def write_back_buffers(self) -> None:
        """Write what a forward has done to these buffers to the user's."""
        for module in self._user_modules.modules:
            for name, own in self.modules[id(module)]._buffers.items():
                buffer = module._buffers.get(name)
                if own is buffer:
                    continue
                held = self._buffers.get((id(module), name))
                if own is None or buffer is None or held is None or own is not held.copy:
                    module._buffers[name] = own if own is None or buffer is None else own.to(buffer.device)
                elif held.copy_version is None or _version(own) != held.copy_version:
                    buffer.copy_(own)

    def write_back_attributes(self) -> None:
        """Set attributes that a forward has set here on the user's modules; for the first replica."""
        for index, module in enumerate(self._user_modules.modules):
            replica_module = self.modules[id(module)]
            now, before = replica_module.__dict__, self._set[index]
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            for name, value in now.items():
                if name not in _OWN and before.get(name, _MISSING) is not value:
                    module.__dict__[name] = self._originals.get(id(value), value)
            self._set[index] = dict(now)
            self._user_modules.mark_seen(index)

    def _to_replica(self, value: Any) -> Any:
        """Exchange the user's modules and parameters in an attribute for the replica's."""
        if isinstance(value, nn.Module):
            return self.modules.get(id(value), value)
        if isinstance(value, nn.Parameter):
            return self.parameters.get(id(value), value)
        if type(value) in (list, tuple) and any(
            id(part) in self.parameters or id(part) in self.modules for part in value
        ):
            return type(value)(self._to_replica(part) for part in value)
        return value


class _BufferCopy:
    """A user's buffer and a replica's copy of it, with the version of each when it was copied."""

    __slots__ = ("buffer", "copy", "copy_version", "version")

    def __init__(self, buffer: torch.Tensor, version: int | None, copy: torch.Tensor, copy_version: int | None) -> None:
        self.buffer, self.version, self.copy, self.copy_version = buffer, version, copy, copy_version

    def is_valid(self, buffer: torch.Tensor, own: torch.Tensor | None) -> bool:
        if own is None or buffer is not self.buffer or own is not self.copy:
            return False
        versions = (self.version, self.copy_version)
        return None not in versions and (_version(buffer), _version(own)) == versions


def make_parameter(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Make a replica's parameter: on the same device in the same memory, elsewhere uninitialised."""
    data = param.detach() if param.device == device else torch.empty_like(param, device=device).detach()
    own: nn.Parameter = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    own.__dict__.update(param.__dict__)  # attributes that a user or a library set
    for hook in (param._backward_hooks or {}).values():
        own.register_hook(hook)  # type: ignore[no-untyped-call]
    return own


@torch.no_grad()
def refresh_parameters(params: Sequence[nn.Parameter], copies: Sequence[torch.Tensor]) -> None:
    """Set a replica's parameters to the user's values, also after changes of `.data`."""
    apart: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for param, own in zip(params, copies, strict=True):
        if own.device != param.device:
            apart[0].append(own)
            apart[1].append(param)
        elif own.data_ptr() != param.data_ptr() or own.shape != param.shape:
            own.data = param.data
    if apart[0]:
        # Asynchronous from pinned memory only; a copy to the CPU is synchronous.
        torch._foreach_copy_(apart[0], apart[1], non_blocking=apart[0][0].is_cuda)


def _copied(buffer: torch.Tensor, target: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    source = buffer.detach()
    if target is not None and target.shape == source.shape and target.dtype == source.dtype and target.device == device:
        return target.detach().copy_(source)
    return source.to(device, copy=True)


def _version(tensor: torch.Tensor) -> int | None:
    """Return a number that grows with each in-place change; None in inference mode, where torch doesn't count."""
    return None if tensor.is_inference() else tensor._version


def _put_buffers(replica_module: nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    # In place: a new dict would look like an attribute that forward has set.
    held = replica_module.__dict__["_buffers"]
    held.clear()
    held.update(buffers)


def _mark(param: nn.Parameter | None) -> Any:
    if param is None:
        return None
    return id(param), param.requires_grad, param.dtype, param.device, *(param._backward_hooks or ())


def _rebuild_flat_weights(replica_module: nn.Module) -> None:
    """Update the second list of weights that recurrent modules keep."""
    if isinstance(replica_module, nn.RNNBase) and "_flat_weights_names" in replica_module.__dict__:
        weights = [replica_module._parameters.get(name) for name in replica_module._flat_weights_names]
        replica_module.__dict__["_flat_weights"] = weights
        replica_module.__dict__["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]
