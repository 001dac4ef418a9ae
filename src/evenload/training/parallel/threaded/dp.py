"""`dp`: several replicas in one process, a lane for each; gradients summed over the lanes onto the user's parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from evenload.errors import ConfigError, StepError
from evenload.training.comm.groups import Groups
from evenload.training.parallel.reducer import PLAIN_BACKWARD, BucketReducer, Expectation
from evenload.training.parallel.threaded.bucket_sums import LaneSums
from evenload.training.parallel.threaded.dispatch import check_replicable, dispatched
from evenload.training.parallel.threaded.replica_modules import Origins, Replica, alias_of, renew
from evenload.training.parallel.threaded.replica_threads import Lane, Lanes, here

_SHARED = (
    "the loss of replica {here} depends on what another replica computed: something outside the model is one for all replicas "
    "(a dict that a hook fills, a global, a list on the model). Let forward return it, or use strategy='ddp', where each "
    "replica has a process of its own"
)
_PAST_THE_REPLICA = (
    "a gradient came to the prepared model itself, past the replica of its thread: loss_fn used a parameter that it can't be "
    "led to its replica from (in a thread of its own, or of a class of its own). Take it from the model inside loss_fn, or "
    "use strategy='ddp'"
)


class LaneStrategy:
    """Replicated data parallelism within one process; see replica_modules.py and replica_threads.py for how."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self._models: list[nn.Module] = []
        self._origins: Origins | None = None
        self._replicas: dict[int, Replica] = {}
        self._reducers: dict[int, BucketReducer] = {}
        self._guards: list[torch.utils.hooks.RemovableHandle] = []
        self._names: dict[int, str] = {}
        self._sums = LaneSums(lanes.all[0].device)
        self._taking_part: tuple[int, ...] = ()
        self._expectations: dict[int, Expectation] = {}
        self._expect = True
        self._call_index = 0
        self._touched: list[int] = []

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        """Makes a replica of the models for each lane, and hooks the gradients."""
        self._take_off()
        check_replicable(models, "strategy='dp'")
        self._models = list(models)
        self._build()

    def detach(self) -> None:
        """Takes the hooks off, and ends the lanes' threads."""
        self._take_off()
        self.lanes.close()

    def begin(self, call_index: int, *, expect: bool) -> None:
        """An attempt begins; its lanes are told by `taking_part`."""
        self._call_index = call_index
        self._taking_part = ()
        self._expect = expect

    @contextlib.contextmanager
    def taking_part(self, active: Sequence[int], keeper: int) -> Iterator[None]:
        """While the body runs, the lanes that have samples find their replicas where loss_fn names the user's models.

        What the forward of `keeper`, a lane with samples in every micro-batch, does to buffers is done to the user's.
        Gradients that earlier calls of this step left are set aside before it.
        """
        if self._origins is None:
            raise RuntimeError("the strategy is not attached to a model")
        if self._origins.changed:
            check_replicable(self._models, "strategy='dp'")
            self._build()
        self._refresh(active, keeper)
        # The first lane's buckets receive the sums, also where it has no samples.
        self._taking_part = tuple(sorted({0, *active}))
        self._sums.begin(self._taking_part)
        for param, own in self._pairs(0):
            own.grad = param.grad
        expected = self._expectations.get(self._call_index) if self._expect else None
        for index in self._taking_part:
            self._reducers[index].begin(expected)
        try:
            with dispatched(self._origins, {index: self._replicas[index] for index in active}, self.lanes.all):
                yield
            self._replicas[keeper].bring_home()
        finally:
            if 0 in active:
                self._replicas[0].give_back()

    def backward(self, loss: torch.Tensor, *, last: bool, idle: bool) -> None:
        """Runs autograd for one micro-batch of the calling lane."""
        reducer = self._own()
        reducer.micro(last=last, idle=idle)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            lane = here()
            if lane is not None and "the graph a second time" in str(error):
                raise StepError(_SHARED.format(here=lane.index)) from error
            raise
        reducer.end_micro()
        if idle:
            reducer.end_idle()

    def report(self) -> tuple[float, bool]:
        """Of the calling lane: the checksum of touched parameters, and whether a gradient came too late."""
        reducer = self._own()
        return reducer.touched_key(), reducer.late

    def resolve(self, same: bool) -> None:
        """Which parameters any lane touched."""
        rows = [self._reducers[index].touched() for index in self._taking_part]
        self._touched = [max(column) for column in zip(*rows, strict=True)]

    def finish(self, correction: float) -> bool:
        """Sends what has not left yet, and puts the sums into `.grad` of the user's parameters."""
        first, *others = (self._reducers[index] for index in self._taking_part)
        for reducer in others:
            reducer.flush(self._touched)
        finite = first.finish(self._touched, correction)
        known = self._expectations.get(self._call_index)
        if known is None or any(now and not then for now, then in zip(self._touched, known, strict=True)):
            learnt = self._agreed()
            if known is not None:
                learnt = tuple(max(now, then) for now, then in zip(learnt, known, strict=True))
            self._expectations[self._call_index] = learnt
        for reducer in others:
            reducer.release()
        self._give()
        return finite

    def rollback(self) -> None:
        """Gradients are as they were before the attempt."""
        self.abort()

    def abort(self) -> None:
        """Gradients are as they were before the attempt, if one had begun."""
        if not self._taking_part:
            return
        self._sums.settle()
        for index in self._taking_part:
            self._reducers[index].abort()
        self._give()
        self._taking_part = ()

    def clear(self) -> None:
        """No gradient is left where the last call gave one."""
        self._reducers[0].clear(self._touched)
        self._give()

    def clear_skip(self) -> None:
        """A new update begins."""
        if self._reducers:
            self._reducers[0].clear_skip()

    def state_dict(self) -> Mapping[int, Expectation]:
        """Which gradients each call expects."""
        return dict(self._expectations)

    def load_state_dict(self, state: Mapping[int, Expectation]) -> None:
        """Puts back what `state_dict` returned."""
        self._expectations = dict(state)

    def covers(self, param: torch.Tensor) -> bool:
        """Whether the parameter is one of the models'."""
        return id(param) in self._names

    def leftovers(self) -> list[str]:
        """Names of parameters with a gradient other than zero."""
        return [
            self._names[id(p)]
            for p in self._parameters()
            if p.requires_grad and p.grad is not None and bool(p.grad.count_nonzero())
        ]

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self._take_off()
        self._check_hooks()
        home = self.lanes.all[0].device
        origins = self._origins = Origins(self._models)
        for lane in self.lanes.all:
            replica = Replica(origins, lane.device, functools.partial(alias_of, device=lane.device))
            for module in replica.all_modules:
                if isinstance(module, nn.RNNBase) and lane.device != home:
                    module.flatten_parameters()
            self._replicas[lane.index] = replica
            twins = [replica.modules[id(model)] for model in self._models]
            self._reducers[lane.index] = BucketReducer(
                twins,
                self._sums.of(lane.index),
                check=_owner_check(lane),
                pins=lane.device.type == "cpu" and home.type == "cuda",
                strategy="dp",
            )
        self._guards = [
            p.register_post_accumulate_grad_hook(_guard)  # type: ignore[no-untyped-call]
            for p in origins.parameters
            if p.requires_grad
        ]
        self._names = {id(p): name for model in self._models for name, p in model.named_parameters()}
        self._expectations.clear()

    def _check_hooks(self) -> None:
        for model in self._models:
            for name, param in model.named_parameters():
                if getattr(param, "_post_accumulate_grad_hooks", None):
                    raise ConfigError(
                        f"strategy='dp': {name} has a hook that is called when its gradient is complete (an optimizer that steps "
                        "in the backward?); gradients come to replicas here, so it never would be; use strategy='ddp'"
                    )

    def _take_off(self) -> None:
        for guard in self._guards:
            guard.remove()
        for reducer in self._reducers.values():
            reducer.remove()
        self._guards, self._reducers, self._replicas, self._origins = [], {}, {}, None
        self._taking_part = ()

    def _refresh(self, active: Sequence[int], keeper: int) -> None:
        """The replicas become what the user's models are now."""
        if self._origins is None:
            return
        for index, changed, gone in self._origins.news():
            for replica in self._replicas.values():
                replica.take(index, changed, gone)
        for index in active:
            replica = self._replicas[index]
            renew(self._origins.parameters, [replica.parameters[id(p)] for p in self._origins.parameters])
            replica.refresh_buffers(keeps=index == keeper)

    def _agreed(self) -> Expectation:
        """Which buckets leave early, on all lanes alike: none with a parameter that only some lanes touch."""
        rows = [self._reducers[index].observed() for index in self._taking_part if self._reducers[index].has_run]
        if not rows:
            return tuple(0 for _ in self._touched)
        agreed = list(rows[0])
        for bucket in self._reducers[0].buckets:
            if any(len({bool(row[slot.index]) for row in rows}) > 1 for slot in bucket.slots):
                for slot in bucket.slots:
                    agreed[slot.index] = 0
        return tuple(agreed)

    def _parameters(self) -> list[nn.Parameter]:
        return self._origins.parameters if self._origins is not None else []

    def _pairs(self, index: int) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        own = self._replicas[index].parameters
        return ((param, own[id(param)]) for param in self._parameters())

    def _give(self) -> None:
        """The first lane's gradients are the user's."""
        if not self._replicas:
            return
        for param, own in self._pairs(0):
            param.grad = own.grad

    def _own(self) -> BucketReducer:
        lane = here()
        if lane is None:
            raise RuntimeError("this thread computes for no replica")
        return self._reducers[lane.index]


def _owner_check(lane: Lane) -> Callable[[], None]:
    """Raises where a gradient of this lane's replica comes in another lane's backward."""

    def check() -> None:
        now = here()
        if now is not None and now is not lane:
            raise StepError(_SHARED.format(here=now.index))

    return check


def _guard(param: torch.Tensor) -> None:
    """On the user's own parameters, which no lane computes with."""
    param.grad = None
    raise StepError(PLAIN_BACKWARD if here() is None else _PAST_THE_REPLICA)
