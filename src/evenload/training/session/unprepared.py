"""Find what loss_fn uses although `run.prepare` was not given it, and what would be of one rank alone.

- BatchNorm in training mode: its statistics would be those of this rank's samples.
- Parameters of frozen modules that differ between ranks: the loss of a sample would depend on its rank.
- Tensors that receive a gradient and are then changed by hand: they would be trained with this rank's gradient.

Modules are watched by hooks during a backward only: a hook that stays would be in the user's copies and files.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenload.errors import DesyncError, StepError
from evenload.training.comm.control import Operation
from evenload.training.compute import batchnorm
from evenload.training.compute.checksums import QueuedScalars, fold, queue_checksums
from evenload.training.session.live_objects import live_objects
from evenload.training.step.context import TrainingContext

_NUM_WATCHED = 3
"""Backwards after which tensors that received no gradient are no longer looked at, unless they are bare ones of an optimizer."""


class UnpreparedUses:
    """Watches the objects that exist at the first step of a session."""

    def __init__(self, context: TrainingContext, models: Sequence[nn.Module]) -> None:
        self._context = context
        self._models = models
        self._norms: list[weakref.ref[nn.Module]] = []
        self._others: list[weakref.ref[nn.Module]] = []
        self._used: dict[int, nn.Module] = {}
        self._tensors: list[tuple[weakref.ref[torch.Tensor], Any]] = []
        """Trainable tensors of no prepared model, each with a mark of its gradient before this backward."""
        self._received: list[tuple[weakref.ref[torch.Tensor], int]] = []
        """Those that received a gradient, each with its version after that."""
        self._by_hand: set[int] = set()
        """Ids of what `filled_by_hand` has found; it is watched as long as it lives."""
        self._reached: set[int] = set()
        """Ids of tensors whose present gradient a backward gave, or a part of it."""
        self._bare: set[int] = set()
        """Ids of tensors in an optimizer and in no module: it may step for the first time after many backwards."""
        self._num_backwards = 0
        self._compared: set[str] = set()
        """The workers whose modules were compared with those of this rank."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def find(self, objects: Iterable[Any]) -> None:
        """Take the modules and tensors to watch from all that exist, at the first step."""
        objects, own = list(objects), self._own()
        modules = [v for v in objects if isinstance(v, nn.Module) and not isinstance(v, torch.jit.ScriptModule)]
        compiled = _inside_compiled(modules)
        for module in modules:
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not batchnorm.has_global_statistics(module):
                self._norms.append(weakref.ref(module))
            if id(module) not in compiled and any(id(p) not in own for p in _watched_params(module)):
                self._others.append(weakref.ref(module))
        # Parameters of other modules belong to another training, whose optimizer may live on.
        held = {id(p) for module in modules for p in module.__dict__.get("_parameters", {}).values()}
        # One that wraps another may have no groups of its own.
        found = [vars(v).get("param_groups", ()) for v in objects if isinstance(v, Optimizer)]
        stepped = (p for groups in found for group in groups for p in group["params"])
        self._bare = {id(p) for p in stepped} - held
        plain = (v for v in objects if type(v) in (torch.Tensor, nn.Parameter))
        trainable = (v for v in plain if _is_trainable(v) and id(v) not in own)
        self._tensors = [(weakref.ref(tensor), None) for tensor in trainable]

    def attach(self) -> None:
        """Forget tensors that `run.prepare` received meanwhile."""
        own = self._own()
        self._tensors = [(ref, mark) for ref, mark in self._tensors if id(ref()) not in own]
        self._received = [(ref, version) for ref, version in self._received if id(ref()) not in own]

    def _own(self) -> set[int]:
        return {id(p) for model in self._models for p in model.parameters()}

    @property
    def rests(self) -> bool:
        """True if nothing that exists has to be watched any more, as long as the ranks are the same."""
        if self._context.num_sharing == 1:
            return True
        refuses = self._context.config.batch_norm == "global" and any(_alive(self._norms))
        is_over = self._num_backwards >= _NUM_WATCHED and not (self._tensors or refuses)
        return is_over and self._compared.issuperset(self._context.groups.membership.workers)

    def begin(self) -> None:
        """Watch until `end`; raise StepError if a tensor was trained by hand since the last backward."""
        if self._handles:
            self.release()
        if self._context.num_sharing == 1:
            return
        if self._norms and self._context.config.batch_norm == "global":
            self._handles = [m.register_forward_pre_hook(self._refuse) for m in _alive(self._norms) if _is_at_risk(m)]
        if self._context.groups.world_size == 1:  # replicas of one process share all other objects
            return
        for reference, version in self._received:
            tensor = reference()
            if tensor is not None and tensor._version != version and id(tensor) not in self._own():
                raise StepError(
                    f"a tensor of shape {tuple(tensor.shape)} that is in no prepared model received a gradient in loss_fn, and "
                    "then it was changed: its gradient is this rank's alone. To train it, make it an nn.Parameter of a module "
                    "and pass that to run.prepare; freeze what is not trained (requires_grad_(False))"
                )
        if self._tensors:
            self._tensors = [(ref, _mark(tensor)) for ref, _ in self._tensors if (tensor := ref()) is not None]
        if self._reached:
            self._reached &= {id(ref()) for ref, mark in self._tensors if mark is not None}
        if not self._compared.issuperset(self._context.groups.membership.workers):
            self._handles += [m.register_forward_pre_hook(self._note) for m in _alive(self._others)]

    def end(self) -> None:
        """Compare what was used, after the first backward and the first with a rank that has joined; all ranks call it."""
        if self._handles:
            self.release()
        groups = self._context.groups
        if compares := not self._compared.issuperset(groups.membership.workers):
            self._compared.update(groups.membership.workers)
        if groups.world_size == 1:
            return
        self._received = []
        for ref, before in self._tensors:
            if (tensor := ref()) is not None and _mark(tensor) != before:
                self._received.append((ref, tensor._version))
                self._reached.add(id(tensor))
        if compares:
            self._compare()
        self._num_backwards += 1
        if self._num_backwards == _NUM_WATCHED:
            kept = self._reached | self._by_hand | self._bare
            self._tensors = [(ref, None) for ref, _ in self._tensors if id(ref()) in kept]

    def filled_by_hand(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the ids of those whose gradient the script set, and no backward: copies of the model's weights."""
        if self._context.groups.world_size == 1:
            return set()  # nobody knows
        found = {id(ref()) for ref, _ in self._tensors}.intersection(map(id, tensors)) - self._reached
        self._by_hand |= found
        return found

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _refuse(self, module: nn.Module, _: object) -> None:
        if self._context.loop.in_backward and self._context.clock.current != "data" and _is_at_risk(module):
            raise StepError(
                f"loss_fn runs {_path(module, _parents())[1]} in training mode, and its model was not given to run.prepare: it "
                "would take the statistics of this rank's samples alone. Give the model to run.prepare too (a frozen one may be "
                "prepared; layers must be in it before), or call its .eval()"
            )

    def _note(self, module: nn.Module, _: object) -> None:
        # A compiled graph would keep the hook. A module of the dataset's transforms has random weights for each sample.
        if not torch.compiler.is_compiling() and self._context.clock.current != "data":
            self._used[id(module)] = module

    def _compare(self) -> None:
        own, parents = self._own(), _parents() if self._used else {}
        roots = {id(root): root for root in (_path(module, parents)[0] for module in self._used.values())}.values()
        named = [(name, p) for root in roots for name, p in root.named_parameters() if id(p) not in own]
        self._used = {}
        structure = zlib.crc32(repr([(name, tuple(p.shape), p.dtype) for name, p in named]).encode())
        key = (
            fold(QueuedScalars(queue_checksums(p.detach() for _, p in named if not p.is_meta)).read()) if named else 0.0
        )
        rows = self._context.control.exchange(Operation.BACKWARD, [float(structure), key])
        # Ranks may use different modules, chosen by their samples; a rank without samples uses none.
        keys = {(shapes, value) for shapes, value in rows if value}
        if len(keys) > len({shapes for shapes, _ in keys}):
            kinds = ", ".join(sorted({type(root).__name__ for root in roots})) or "a model"
            raise DesyncError(
                f"loss_fn uses {kinds}, which was not given to run.prepare, and its parameters differ between the ranks: the "
                "loss of a sample would depend on its rank. Give it to run.prepare too (a frozen model may be prepared, and "
                "gets rank 0's weights), or build it alike on all ranks (a copy of a model after run.prepare, the same seed)"
            )


def _alive(references: Iterable[weakref.ref[nn.Module]]) -> Iterator[nn.Module]:
    return (module for module in (reference() for reference in references) if module is not None)


def _is_trainable(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf and tensor.requires_grad
    except RuntimeError:  # a view whose base was changed in place under no_grad
        return False


def _mark(tensor: torch.Tensor) -> tuple[int, int] | None:
    return None if tensor.grad is None else (id(tensor.grad), tensor.grad._version)


def _is_at_risk(module: nn.Module) -> bool:
    return batchnorm.takes_batch_statistics(module) and not batchnorm.has_global_statistics(module)


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module in the wrapper that ``torch.compile(module)`` returns."""
    wrapped: nn.Module | None = module.__dict__.get("_modules", {}).get("_orig_mod")
    return wrapped


def _watched_params(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own parameters, or all that a compiled one holds."""
    if (wrapped := _wrapped(module)) is not None:
        return list(wrapped.parameters())
    return [p for p in module.__dict__.get("_parameters", {}).values() if p is not None]


def _inside_compiled(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of modules in a compiled one: a hook in it would have it compiled again when it goes."""
    found: set[int] = set()
    for module in modules:
        if (wrapped := _wrapped(module)) is not None:
            found.update(map(id, wrapped.modules()))
        elif module.__dict__.get("_compiled_call_impl") is not None:  # module.compile()
            found.update(map(id, module.modules()))
    return found


def _parents() -> dict[int, tuple[nn.Module, str]]:
    """Return a module that holds each module, by id, and the name there."""
    found = {}
    for module in live_objects(nn.Module):
        for name, child in module.__dict__.get("_modules", {}).items():
            found[id(child)] = (module, name)
    return found


def _path(module: nn.Module, parents: Mapping[int, tuple[nn.Module, str]]) -> tuple[nn.Module, str]:
    """Return the outermost module that holds this one, and the path to it, such as ``ResNet.layer1.0.bn1``."""
    names: list[str] = []
    while id(module) in parents and len(names) < len(parents):
        module, name = parents[id(module)]
        names.append(name)
    return module, ".".join([type(module).__name__, *reversed(names)])
