"""The strategy `dp`: replicas in threads of one process; their gradients are summed into the user's parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from evenload.errors import StepError
from evenload.training.parallel.call_gradients import PLAIN_BACKWARD, SET_IN_LOSS_FN, Expectation, number_slots
from evenload.training.parallel.reducer import BucketReducer
from evenload.training.parallel.threaded.bucket_sums import BucketSums, ReplicaBuckets
from evenload.training.parallel.threaded.dispatch import check_replicable, dispatched
from evenload.training.parallel.threaded.replica_modules import Replica, UserModules, make_parameter, refresh_parameters
from evenload.training.parallel.threaded.replica_threads import (
    ReplicaThread,
    ReplicaThreads,
    current_replica,
    this_replica,
)

_SHARED = (
    "the loss of replica {index} depends on what another replica computed: something outside the model is shared by all replicas "
    "(a dict that a hook fills, a global, a list on the model). Let forward return it, or use strategy='ddp', where each "
    "replica has its own process"
)
_NOT_REPLICATED = (
    "a gradient reached the prepared model itself instead of its thread's replica: loss_fn used a parameter that can't be "
    "exchanged for the replica's (in another thread, or of another class). Take it from the model inside loss_fn, or use "
    "strategy='ddp'"
)


class ReplicaGradients:
    """The replicas of the models in one process, and the reduction of their gradients to the user's parameters."""

    def __init__(self, threads: ReplicaThreads) -> None:
        self.threads = threads
        self._models: list[nn.Module] = []
        self._user_modules: UserModules | None = None
        self._replicas: dict[int, Replica] = {}
        self._reducers: dict[int, BucketReducer] = {}
        self._guards: list[torch.utils.hooks.RemovableHandle] = []
        self._sums = BucketSums(threads.all[0].device)
        self._active: tuple[int, ...] = ()
        self._expectations: dict[int, Expectation] = {}
        self._expect = True
        self._call_index = 0
        self._touched: list[int] = []

    def attach(self, models: Sequence[nn.Module]) -> None:
        self._remove_hooks()
        check_replicable(models, "strategy='dp'")
        self._models = list(models)
        self._build()

    def detach(self) -> None:
        self._remove_hooks()

    def begin(self, call_index: int, *, expect: bool) -> None:
        self._call_index = call_index
        self._active = ()
        self._expect = expect

    @contextlib.contextmanager
    def active_replicas(self, active: Sequence[int], buffer_owner: int) -> Iterator[None]:
        """Dispatch the user's models to the replicas that have samples, in the body.

        The replica `buffer_owner`, with samples in every micro-batch, updates the user's buffers. Gradients of earlier calls
        of this step are set aside first.
        """
        if self._user_modules is None:
            raise RuntimeError("the strategy is not attached to a model")
        if self._user_modules.changed:
            check_replicable(self._models, "strategy='dp'")
            self._build()
        self._refresh(active, buffer_owner)
        # The first replica's buckets receive the sums, even if it has no samples.
        self._active = tuple(sorted({0, *active}))
        self._sums.begin(self._active)
        earlier = [param.grad for param in self._parameters()]
        for param, own in self._pairs():
            own.grad = param.grad
        expected = self._expectations.get(self._call_index) if self._expect else None
        for index in self._active:
            self._reducers[index].begin(expected)
        try:
            with dispatched(self._user_modules, {index: self._replicas[index] for index in active}, self.threads.all):
                yield
            self._look_for_set(earlier)
            self._replicas[buffer_owner].write_back_buffers()
        finally:
            if 0 in active:
                self._replicas[0].write_back_attributes()

    def backward(self, loss: torch.Tensor, *, last: bool, idle: bool) -> None:
        reducer = self._own_reducer()
        reducer.micro(last=last, idle=idle)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            thread = current_replica()
            if thread is not None and "the graph a second time" in str(error):
                raise StepError(_SHARED.format(index=thread.index)) from error
            raise
        reducer.end_micro()
        if idle:
            reducer.end_idle()

    def report(self) -> tuple[float, bool]:
        """Return the calling replica's checksum of touched parameters, and whether a gradient came too late."""
        reducer = self._own_reducer()
        return reducer.touched_key(), reducer.late

    def resolve(self) -> None:
        """Take the parameters that any replica touched."""
        rows = [self._reducers[index].touched() for index in self._active]
        self._touched = [max(column) for column in zip(*rows, strict=True)]

    def finish(self, correction: float) -> bool:
        """Reduce the remaining buckets, and set `.grad` of the user's parameters to the sums."""
        first, *others = (self._reducers[index] for index in self._active)
        for reducer in others:
            reducer.flush(self._touched)
        finite = first.finish(self._touched, correction)
        known = self._expectations.get(self._call_index)
        if (
            known is None
            or not self._expect
            or any(now and not then for now, then in zip(self._touched, known, strict=True))
        ):
            expectation = self._agreed_expectation()
            if known is not None:
                expectation = tuple(max(now, then) for now, then in zip(expectation, known, strict=True))
            self._expectations[self._call_index] = expectation
        for reducer in others:
            reducer.release()
        self._publish_gradients()
        return finite

    def abort(self) -> None:
        if not self._active:
            return
        self._sums.wait()
        for index in self._active:
            self._reducers[index].abort()
        self._publish_gradients()
        self._active = ()

    def clear(self) -> None:
        self._reducers[0].clear(self._touched)
        self._publish_gradients()

    def clear_skip(self) -> None:
        if self._reducers:
            self._reducers[0].clear_skip()

    def state_dict(self) -> Mapping[int, Expectation]:
        return dict(self._expectations)

    def load_state_dict(self, state: Mapping[int, Expectation]) -> None:
        self._expectations = dict(state)

    def _build(self) -> None:
        self._remove_hooks()
        home = self.threads.all[0].device
        user_modules = self._user_modules = UserModules(self._models)
        for thread in self.threads.all:
            replica = Replica(user_modules, thread.device, functools.partial(make_parameter, device=thread.device))
            for module in replica.all_modules:
                if isinstance(module, nn.RNNBase) and thread.device != home:
                    module.flatten_parameters()
            self._replicas[thread.index] = replica
            self._reducers[thread.index] = BucketReducer(
                [replica.modules[id(model)] for model in self._models],
                ReplicaBuckets(self._sums, thread.index),
                check=_owner_check(thread),
                hooked=[slot.param for slot in number_slots(self._models)] if thread.index == 0 else None,
                pins=thread.device.type == "cpu" and home.type == "cuda",
            )
        self._guards = [
            p.register_post_accumulate_grad_hook(_guard)  # type: ignore[no-untyped-call]
            for p in user_modules.parameters
            if p.requires_grad
        ]
        self._expectations.clear()

    def _remove_hooks(self) -> None:
        for guard in self._guards:
            guard.remove()
        for reducer in self._reducers.values():
            reducer.remove()
        self._guards, self._reducers, self._replicas, self._user_modules = [], {}, {}, None
        self._active = ()

    def _refresh(self, active: Sequence[int], buffer_owner: int) -> None:
        if self._user_modules is None:
            return
        for index, changed, gone in self._user_modules.changes():
            for replica in self._replicas.values():
                replica.apply_changes(index, changed, gone)
        for index in active:
            replica = self._replicas[index]
            refresh_parameters(
                self._user_modules.parameters, [replica.parameters[id(p)] for p in self._user_modules.parameters]
            )
            replica.refresh_buffers(owns_buffers=index == buffer_owner)

    def _agreed_expectation(self) -> Expectation:
        """Return the expectation common to all replicas: no bucket with a parameter that only some touch is sent early."""
        rows = [self._reducers[index].observed() for index in self._active if self._reducers[index].has_run]
        if not rows:
            return tuple(0 for _ in self._touched)
        # As in arrivals.py: 1 for a gradient that came once in all replicas, 2 for one that waits until the end.
        return tuple(0 if not any(counts) else 1 if set(counts) == {1} else 2 for counts in zip(*rows, strict=True))

    def _parameters(self) -> list[nn.Parameter]:
        return self._user_modules.parameters if self._user_modules is not None else []

    def _pairs(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        own = self._replicas[0].parameters
        return ((param, own[id(param)]) for param in self._parameters())

    def _publish_gradients(self) -> None:
        if not self._replicas:
            return
        for param, own in self._pairs():
            param.grad = own.grad

    def _look_for_set(self, earlier: Sequence[torch.Tensor | None]) -> None:
        """Raise StepError if loss_fn has set a gradient of the user's own parameters, which receive the sums."""
        changed = [
            id(param)
            for param, grad in zip(self._parameters(), earlier, strict=True)
            if param.grad is not None and param.grad is not grad
        ]
        if changed:
            name = next((slot.name for slot in number_slots(self._models) if id(slot.param) in changed), "a parameter")
            raise StepError(SET_IN_LOSS_FN.format(name=name))

    def _own_reducer(self) -> BucketReducer:
        return self._reducers[this_replica().index]


def _owner_check(thread: ReplicaThread) -> Callable[[], None]:
    """Return a check that a gradient of this replica is not computed in another replica's backward."""

    def check() -> None:
        now = current_replica()
        if now is not None and now is not thread:
            raise StepError(_SHARED.format(index=now.index))

    return check


def _guard(param: torch.Tensor) -> None:
    param.grad = None
    raise StepError(PLAIN_BACKWARD if current_replica() is None else _NOT_REPLICATED)
