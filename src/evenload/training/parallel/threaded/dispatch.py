"""The user's own modules and parameters, while lanes compute: each leads the calling thread to its lane's replica.

Note [Dispatch]
  While lanes compute, the class of each of the user's modules is one that looks up every attribute at the twin of the
  calling thread. So `model(x)`, `model.encoder.weight`, `model.parameters()`, bound methods and lists of modules kept
  elsewhere lead to the lane's own; type, isinstance and identity stay. Parameters that loss_fn kept itself are
  exchanged where a torch function receives them. Twins are of the plain classes: inside them nothing is slower.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from evenload.errors import ConfigError
from evenload.training.parallel.threaded.replica_modules import Origins, Replica, all_modules
from evenload.training.parallel.threaded.replica_threads import Lane, here


def check_replicable(models: Sequence[nn.Module], what: str) -> None:
    """Raises ConfigError where a module can't have a twin.

    Args:
        models: the models.
        what: who wants it, for the message.
    """
    for module in all_modules(models):
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{what} can't replicate {kind}, which is TorchScript; give it the Python module")
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"{what} can't replicate a model that torch.compile has compiled ({kind}): a compiled graph holds the "
                "parameters of one replica; leave torch.compile out, or use strategy='ddp'"
            )
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and nn.parameter.is_lazy(tensor) for tensor in tensors):
            raise ConfigError(
                f"{what} can't replicate {kind} with uninitialised lazy parameters; run a batch through it first"
            )
        original = type(module)
        try:
            object.__setattr__(module, "__class__", _dispatching(original))
            object.__setattr__(module, "__class__", original)
        except TypeError as error:
            raise ConfigError(f"{what} can't replicate {kind}: {error}; use strategy='ddp'") from error


class _Dispatch:
    """Mixed in front of a module's class: every attribute is that of the twin of the calling thread.

    It has a dict and weak references as Module has, so that the class of a living module can be exchanged.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not the user's: its class is not being derived from, it only looks so for a moment."""

    def __getattribute__(self, name: str) -> Any:
        twin = _twin(self)
        return getattr(twin, name) if twin is not None else super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        twin = _twin(self)
        if twin is not None:
            setattr(twin, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        twin = _twin(self)
        if twin is not None:
            delattr(twin, name)
        else:
            super().__delattr__(name)


def _twin(module: Any) -> nn.Module | None:
    lane = here()
    return lane.twins.modules.get(id(module)) if lane is not None and lane.twins is not None else None


_classes: dict[type, type] = {}


def _dispatching(original: type) -> type:
    """The dispatching class of a module's class."""
    found = _classes.get(original)
    if found is None:
        space = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        found = types.new_class(original.__name__, (_Dispatch, original), {}, lambda body: body.update(space))
        _classes[original] = found
    return found


class _Kept(nn.Parameter):
    """A parameter of the user's while lanes compute: torch functions get the lane's in its place."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        lane = here()
        given = (args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if lane is not None and lane.twins is not None:
                known = lane.twins.parameters
                given = tree_map_only(_Kept, lambda param: known.get(id(param), param), given)
            return func(*given[0], **given[1])


@contextlib.contextmanager
def dispatched(origins: Origins, replicas: Mapping[int, Replica], lanes: Sequence[Lane]) -> Iterator[None]:
    """While the body runs, the user's modules and parameters lead each lane to its own."""
    for index, replica in replicas.items():
        lanes[index].twins = replica
    classes = [(module, type(module), _dispatching(type(module))) for module in origins.modules]
    used = {id(own) for replica in replicas.values() for own in replica.parameters.values()}
    plain = [param for param in origins.parameters if type(param) is nn.Parameter and id(param) not in used]
    try:
        for module, _, dispatching in classes:
            object.__setattr__(module, "__class__", dispatching)
        for param in plain:
            param.__class__ = _Kept
        yield
    finally:
        for param in plain:
            param.__class__ = nn.Parameter
        for module, original, _ in classes:
            object.__setattr__(module, "__class__", original)
        for index in replicas:
            lanes[index].twins = None
