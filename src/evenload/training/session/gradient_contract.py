"""The gradient contract: name what would make a gradient wrong, and compute nothing then (docs/gradient-contract.md).

    prepare -> a hook that sees gradients before their sum
    before the first backward of a step -> such a hook again, gradients that no optimizer steps, BatchNorm that is not prepared
    after a backward -> the user's own loss scale
    before an optimizer steps -> inside a backward, with the gradients of one rank alone, or with none

What happens on every step costs a few microseconds; the garbage collector's objects are searched once, at the first step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenload.errors import ConfigError, StepError
from evenload.training.compute.model_parameters import any_nonzero
from evenload.training.session.live_objects import live_objects
from evenload.training.session.unprepared import UnpreparedUses
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_ACCUMULATED_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_PARAMS = itemgetter("params")
_LIST_HOOKS_EVERY = 10
"""Backwards after which parameters that had no hooks are looked at again; they were frozen before."""
_NUM_SCALED = 3
"""Backwards after which the user's own GradScaler and schedulers are looked at: the first one that is used reveals it."""

HOOK = (
    "{name} has a hook that runs when its gradient is accumulated (register_post_accumulate_grad_hook; an optimizer in the "
    "backward?). At that moment the gradient is this rank's part of one micro-batch, not yet summed over micro-batches and "
    "ranks. Remove the hook, and use .grad after step.backward(loss_fn): clip it, step the optimizer"
)
NODE = (
    "the script holds the node of the graph that accumulates the gradient of {name} (get_gradient_edge(p).node, "
    "p.expand_as(p).grad_fn.next_functions[0][0], register_multi_grad_hook). A hook on it would see or change this rank's part "
    "of one micro-batch, not yet summed. Keep no such node: p.register_hook runs on the sum, and .grad is final after "
    "step.backward(loss_fn)"
)
IN_BACKWARD = (
    "{optimizer} stepped inside step.backward (in loss_fn, or in a hook of a parameter), where the gradient is this rank's part "
    "of one micro-batch, not yet summed. Step it after step.backward(loss_fn) returned"
)
OWN_SCALER = (
    "the script's own torch.amp.GradScaler scaled this step's loss or gradients. step.backward scales and unscales them itself, "
    'by one scale on all ranks: set evenload.init(precision="fp16") and remove the scaler; return the loss from loss_fn as it '
    "is, and call optimizer.step()"
)
SCHEDULER = (
    "{scheduler}.step() was called inside loss_fn, which runs once for each micro-batch on each rank; call it in the loop body, "
    "after optimizer.step()"
)
UNUSED = (
    "{count} parameters have gradients from the last step that no optimizer has used (the first is {name}): an "
    "optimizer of other parameters leaves them at zero_grad(), and this step's would add to them. Freeze what is not trained, "
    "which also saves its gradients (module.requires_grad_(False) on all ranks), or call model.zero_grad()"
)
STRAY = (
    "{optimizer} steps {count} parameters that are in no model given to run.prepare (the first has shape {shape}), so their "
    "gradients are not summed over ranks. Pass the module that holds them to run.prepare too"
)
WRAPPED = (
    "a prepared model was wrapped in {name}: it would average gradients over ranks in each backward, before step.backward sums "
    "them. Remove the wrapper, and call the model that run.prepare returned"
)
NOT_REACHED = (
    "the loss depends on no parameter of a prepared model: loss_fn computes with another model, such as a copy made before or "
    "after run.prepare. Use the model that run.prepare returned, and pass others that are trained to run.prepare too"
)
WITHOUT_EFFECT = (
    "{optimizer} changes nothing: none of its {count} parameters is in a prepared model, and none has a gradient. Was the model "
    "copied, or were its parameters replaced, after the optimizer was made? Make it from model.parameters() of the model that "
    "run.prepare returned"
)


def check_hooks(model: nn.Module, kind: type[ConfigError] | type[StepError]) -> None:
    """Raise an error of this kind if a parameter has a hook of others that runs when its gradient is accumulated."""
    for name, param in model.named_parameters():
        hooks = list((_ACCUMULATED_HOOKS(param) or {}).values())
        foreign = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("evenload.")]
        if foreign:
            # Prepared parameters share their hooks (parallel/grad_hooks.py): which one got a new one can't be told.
            one = (
                f"{type(model).__name__}.{name}"
                if len(foreign) == len(hooks)
                else f"A parameter of {type(model).__name__}"
            )
            raise kind(HOOK.format(name=one))


@dataclass
class _Known:
    """An optimizer that has stepped, as it was when it was checked."""

    num_params: int
    stray: list[torch.Tensor]
    """Its parameters that are in no prepared model."""


class GradientContract(StepListener):
    """Checks of one session; the loop calls them at each backward, torch at each optimizer step."""

    def __init__(self, context: TrainingContext, models: Sequence[nn.Module], *, verifies: bool) -> None:
        """Args:
        context: parts of the job.
        models: the prepared models; the list grows.
        verifies: `evenload verify` runs, which computes with models by itself and names causes.
        """
        self._context = context
        self._models = models
        self._verifies = verifies
        self._unprepared = UnpreparedUses(context, models)
        self._params: list[nn.Parameter] = []
        self._param_ids: frozenset[int] = frozenset()
        self._hooks: list[Mapping[int, object]] = []
        self._num_hooks = -1
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._stepped_ids: set[int] = set()
        self._unused: dict[str, nn.Parameter] | None = {}
        """Trainable parameters in no optimizer that has stepped; None if they must be listed again."""
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] | None = None
        self._unscaled_ids: set[int] = set()
        self._num_backwards = 0
        self._schedulers: list[weakref.ref[LRScheduler]] = []
        self._counts: dict[LRScheduler, int] = {}

    def attach(self) -> None:
        """Follow the models after `run.prepare`."""
        self._params = list({id(p): p for model in self._models for p in model.parameters()}.values())
        self._param_ids = frozenset(map(id, self._params))
        self._hooks = self._list_hooks()
        self._num_hooks = -1
        self._unprepared.attach()
        self._optimizers.clear()
        self._unused = None if self._stepped_ids else {}

    def close(self) -> None:
        self._unprepared.release()

    @property
    def rests(self) -> bool:
        has_looked = self._num_backwards > _NUM_SCALED and self._unused == {}
        return has_looked and not self._verifies and self._unprepared.rests

    def on_backward(self, step: Step, loss_fn: object) -> None:
        if self._num_backwards % _LIST_HOOKS_EVERY == 0:
            self._hooks = self._list_hooks()
        # Hooks of Evenload's own are counted too: names are looked at only when the number changes.
        num_hooks = sum(map(len, self._hooks))
        if num_hooks != self._num_hooks:
            for model in self._models:
                check_hooks(model, StepError)
            self._num_hooks = num_hooks
        if step.stats.calls == 0 and self._unused != {}:
            self._check_unused()
        if self._verifies:
            return
        if self._scalers is None:
            self.search()
        self._unprepared.begin()
        if self._num_backwards < _NUM_SCALED:
            self._counts = self._scheduler_steps()

    def search(self) -> None:
        """Find what is looked at in the first backwards; a rank that joins does it before the others wait for it."""
        found = live_objects(torch.amp.GradScaler, LRScheduler, Optimizer, nn.Module, torch.Tensor, _AccumulateGrad)
        nodes = [value for value in found if isinstance(value, _AccumulateGrad)]
        found = [value for value in found if not isinstance(value, _AccumulateGrad)]
        self._schedulers = [weakref.ref(value) for value in found if isinstance(value, LRScheduler)]
        scalers = [value for value in found if isinstance(value, torch.amp.GradScaler) and value.is_enabled()]
        self._scalers = [weakref.ref(scaler) for scaler in scalers]
        self._unscaled_ids = {id(scaler) for scaler in scalers if scaler._scale is None}
        self._check_wrapped(found)
        if self._held_by(nodes):
            nodes.clear()
            gc.collect()  # a drawing of the graph may have left cycles of what it looked at
            self._check_nodes(live_objects(_AccumulateGrad))
        self._unprepared.find(found)

    def on_gradients(self, step: Step) -> None:
        self._unprepared.end()
        self._num_backwards += 1
        if self._num_backwards == 1 and self._context.config.strategy != "async":
            stays = not step.stats.skipped and all(step.batch.plan.shares)
            # Those that were added since run.prepare (adapters) count too.
            if stays and all(p.grad is None for model in self._models for p in model.parameters()):
                raise StepError(NOT_REACHED)
        if self._num_backwards <= _NUM_SCALED:
            before, self._counts = self._counts, {}
            for scheduler, count in self._scheduler_steps().items():
                if count != before.get(scheduler, count):
                    raise StepError(SCHEDULER.format(scheduler=type(scheduler).__name__))
        if self._scalers and self._num_backwards <= _NUM_SCALED:
            # The scale is made at the first use: here, inside loss_fn.
            for scaler in filter(None, (reference() for reference in self._scalers)):
                if id(scaler) in self._unscaled_ids and scaler._scale is not None:
                    raise StepError(OWN_SCALER)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Check an optimizer that is about to step in a loop body."""
        loop = self._context.loop
        if loop.in_backward:
            # An inner loop over other parameters (a copy, a sample's own) is the user's affair.
            if any(id(p) in self._param_ids for p in _params_of(optimizer)):
                raise StepError(IN_BACKWARD.format(optimizer=type(optimizer).__name__))
            return
        if loop.step is None or self._verifies:
            return
        for scaler in filter(None, (reference() for reference in self._scalers)) if self._scalers else ():
            if id(optimizer) in scaler._per_optimizer_states:
                raise StepError(OWN_SCALER)
        known = self._known(optimizer, loop.step)
        if known.stray and self._context.num_sharing > 1:
            covers = self._context.engine.covers
            stray = [p for p in known.stray if p.grad is not None]
            by_hand = self._unprepared.filled_by_hand(stray) if stray else ()
            # For each of the others the models are walked.
            stray = [p for p in stray if id(p) not in by_hand and not covers(p)]
            if stray:
                raise StepError(
                    STRAY.format(optimizer=type(optimizer).__name__, count=len(stray), shape=tuple(stray[0].shape))
                )

    def _scheduler_steps(self) -> dict[LRScheduler, int]:
        living = filter(None, (reference() for reference in self._schedulers))
        return {scheduler: getattr(scheduler, "_step_count", 0) for scheduler in living}

    def _list_hooks(self) -> list[Mapping[int, object]]:
        # Parameters may share them (parallel/grad_hooks.py).
        return list({id(hooks): hooks for hooks in filter(None, map(_ACCUMULATED_HOOKS, self._params))}.values())

    def _known(self, optimizer: Optimizer, step: Step) -> _Known:
        num_params = sum(map(len, map(_PARAMS, optimizer.param_groups)))
        known = self._optimizers.get(optimizer)
        if known is not None and known.num_params == num_params:
            return known
        params = list(_params_of(optimizer))
        # Parameters that were replaced in a prepared model are new to it too.
        held = {id(p) for model in self._models for p in model.parameters()}
        known = _Known(num_params, [p for p in params if id(p) not in held])
        if step.stats.calls and len(known.stray) == len(params) and all(p.grad is None for p in params):
            raise StepError(WITHOUT_EFFECT.format(optimizer=type(optimizer).__name__, count=len(params)))
        self._optimizers[optimizer] = known
        self._stepped_ids.update(map(id, params))
        self._unused = None
        self._context.loop.leave_line()
        return known

    def _check_wrapped(self, found: Iterable[object]) -> None:
        if self._context.num_sharing == 1:
            return
        for wrapper in (value for value in found if isinstance(value, nn.parallel.DistributedDataParallel)):
            if any(id(p) in self._param_ids for p in wrapper.parameters()):
                raise StepError(WRAPPED.format(name=type(wrapper).__name__))

    def _held_by(self, nodes: Iterable[Any]) -> set[int]:
        """Return the ids of prepared parameters whose gradients these nodes accumulate."""
        return {id(node.variable) for node in nodes} & self._param_ids

    def _check_nodes(self, nodes: Iterable[Any]) -> None:
        # Torch makes such an object for a script that asks for it, and shows no hooks of it.
        held = self._held_by(nodes)
        for model in self._models if held else ():
            for name, param in model.named_parameters():
                if id(param) in held:
                    raise StepError(NODE.format(name=f"{type(model).__name__}.{name}"))

    def _check_unused(self) -> None:
        if self._unused is None:
            trained = [model for model in self._models if any(p.requires_grad for p in model.parameters())]
            self._unused = {}
            if len(trained) == 1:  # of several models, gradients may wait for their own zero_grad (a GAN)
                kind = type(trained[0]).__name__
                named = trained[0].named_parameters()
                self._unused = {f"{kind}.{name}": p for name, p in named if id(p) not in self._stepped_ids}
        grads = {name: p.grad for name, p in self._unused.items() if p.requires_grad and p.grad is not None}
        if not grads or not any_nonzero(list(grads.values())):  # waits for a GPU once
            return
        if left := [name for name, grad in grads.items() if bool(grad.count_nonzero())]:
            raise StepError(UNUSED.format(count=len(left), name=left[0]))


def _params_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
