"""Dispatch the user's own modules and parameters to the replica of the calling thread.

Note [Dispatch]
  While replicas compute, each of the user's modules has a class that looks up every attribute in the calling thread's
  replica. So `model(x)`, `model.encoder.weight`, `model.parameters()`, bound methods and lists of modules held elsewhere lead
  to the replica; type, isinstance and identity stay. Parameters that loss_fn holds itself are exchanged where a torch function
  receives them. Replica modules have the plain classes, so nothing is slower inside them.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from evenload.errors import ConfigError
from evenload.training.parallel.threaded.replica_modules import Replica, UserModules, all_modules
from evenload.training.parallel.threaded.replica_threads import ReplicaThread, current_replica


def check_replicable(models: Sequence[nn.Module], what: str) -> None:
    """Raise ConfigError for a module that can't be replicated; `what` names the feature in the message."""
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
        original: Any = type(module)
        try:
            object.__setattr__(module, "__class__", _dispatching(original))
            object.__setattr__(module, "__class__", original)
        except TypeError as error:
            raise ConfigError(f"{what} can't replicate {kind}: {error}; use strategy='ddp'") from error


class _DispatchingModule:
    """Mixin in front of a module's class: every attribute is that of the calling thread's replica.

    It has a dict and weak references as Module has, so that the class of an existing module can be exchanged.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the user's own hook: this is no subclass in their sense."""

    def __getattribute__(self, name: str) -> Any:
        replica_module = _replica_module(self)
        return getattr(replica_module, name) if replica_module is not None else super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        replica_module = _replica_module(self)
        if replica_module is not None:
            setattr(replica_module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        replica_module = _replica_module(self)
        if replica_module is not None:
            delattr(replica_module, name)
        else:
            super().__delattr__(name)


def _replica_module(module: Any) -> nn.Module | None:
    thread = current_replica()
    return thread.replica.modules.get(id(module)) if thread is not None and thread.replica is not None else None


@functools.cache
def _dispatching(original: Any) -> type:
    space = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return types.new_class(original.__name__, (_DispatchingModule, original), {}, lambda body: body.update(space))


class _UserParameter(nn.Parameter):
    """A user's parameter while replicas compute: torch functions receive the replica's in its place."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        thread = current_replica()
        given = (args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if thread is not None and thread.replica is not None:
                known = thread.replica.parameters
                given = tree_map_only(_UserParameter, lambda param: known.get(id(param), param), given)
            return func(*given[0], **given[1])


@contextlib.contextmanager
def dispatched(
    user_modules: UserModules, replicas: Mapping[int, Replica], threads: Sequence[ReplicaThread]
) -> Iterator[None]:
    """Dispatch the user's modules and parameters to each thread's replica in the body."""
    for index, replica in replicas.items():
        threads[index].replica = replica
    classes = [(module, type(module), _dispatching(cast(Any, type(module)))) for module in user_modules.modules]
    used = {id(own) for replica in replicas.values() for own in replica.parameters.values()}
    plain = [param for param in user_modules.parameters if type(param) is nn.Parameter and id(param) not in used]
    try:
        for module, _, dispatching in classes:
            object.__setattr__(module, "__class__", dispatching)
        for param in plain:
            param.__class__ = _UserParameter
        yield
    finally:
        for param in plain:
            param.__class__ = nn.Parameter
        for module, original, _ in classes:
            object.__setattr__(module, "__class__", original)
        for index in replicas:
            threads[index].replica = None
