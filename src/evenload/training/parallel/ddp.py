"""Strategy ``ddp``: a replica of the model on each rank, with gradients summed over all ranks."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from evenload.balance.exchange_times import BucketSizes, bucket_sizes
from evenload.balance.values import StepPlan
from evenload.errors import StepError
from evenload.training.comm.broadcast import broadcast
from evenload.training.comm.clock import StepClock
from evenload.training.comm.groups import Groups
from evenload.training.comm.link import LinkMeter
from evenload.training.compute import batchnorm, randomness
from evenload.training.compute.coupled_steps import run_steps
from evenload.training.compute.device_state import slow_down
from evenload.training.compute.device_sums import DeviceSums
from evenload.training.compute.grad_norms import GradNorms, UnreadNorms
from evenload.training.compute.label_watch import LabelWatch
from evenload.training.compute.micro_steps import LossFn, LossSums, StepContext
from evenload.training.compute.model_parameters import ModelParameters
from evenload.training.compute.precision import Precision
from evenload.training.compute.replicated_state import ReplicatedState
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.parallel.arrivals import Arrivals
from evenload.training.parallel.call_gradients import Expectation
from evenload.training.parallel.local_reducer import LocalReducer
from evenload.training.parallel.lone_call import LoneCall
from evenload.training.parallel.model_split.buckets import BucketSegments
from evenload.training.parallel.reducer import BucketReducer
from evenload.training.parallel.strategy import (
    LATE_GRADIENT,
    OK,
    AttemptFailedError,
    BackwardCall,
    LocalResult,
    StepResult,
)
from evenload.training.parallel.wire.gradient_wire import GradientWire, gradient_size


class ReplicaStrategy:
    def __init__(
        self,
        *,
        device: torch.device,
        seed: int,
        precision: Precision,
        clock: StepClock,
        throttle: ComputeThrottle,
        groups: Groups,
        grad_norms: GradNorms | None = None,
        on_device: bool | None = None,
        wire: GradientWire | None = None,
        link: LinkMeter | None = None,
    ) -> None:
        """`on_device`: sums of losses are made on the device (device_sums.py); None: where each rank that computes has a GPU."""
        self._groups = groups
        self._wire = wire
        self._link = link
        self._on_device = on_device
        self._clock = clock
        self._throttle = throttle
        self._precision = precision
        self._grad_norms = grad_norms
        self._statistics = batchnorm.Statistics(groups, clock)
        self._active = batchnorm.Active(self._statistics)
        self._context = StepContext(
            device, seed, self._statistics, precision, LabelWatch().check, grad_norms=grad_norms
        )
        self._segments = BucketSegments()
        self._models: list[nn.Module] = []
        self._state = ReplicatedState(())
        self._parameters = ModelParameters(())
        self._frozen: list[nn.Parameter] = []
        """Parameters without a slot: they have not been trained so far."""
        self._added: dict[str, nn.Parameter] = {}
        """Parameters that are new since the last step, and not equal on all ranks yet."""
        self._reducer: BucketReducer | LocalReducer | None = None
        self._arrivals = Arrivals()
        self._is_ordered = False
        self._reads_weights = False
        """True once a loss was not finite where its weight is 0: the host must know such weights before a backward."""
        self._zero_is_harmless = False
        """True once a loss was finite where its weight is 0: the host need not look for such weights."""
        self._built_for = -1
        """Number of the generation in which the buckets were built."""

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        self.detach()
        self._groups = groups
        self._segments = BucketSegments(models, groups)
        for model in models:
            broadcast((*model.parameters(), *model.buffers()), groups)
        self._models = list(models)
        self._state = ReplicatedState(models)
        self._parameters = ModelParameters(models)
        others = randomness.other_gpus(models, self._context.device)
        self._context = replace(self._context, other_gpus=others, models=self._models)
        self._statistics.in_use = any(batchnorm.has_global_statistics(model) for model in models)
        self._build()

    def detach(self) -> None:
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None
        if self._wire is not None:
            self._wire.close()

    def run(self, plan: StepPlan, batch: GlobalBatch, loss_fn: LossFn, call: BackwardCall) -> StepResult:
        reducer = self._follow_parameters(call)
        reducer.on_device, reducer.refuses_leftovers = self._sums_on_device(), call.refuses_leftovers
        if call.begins_update:
            reducer.clear_skip()
        if self._wire is not None:
            self._wire.begin(self._precision.scale, plan.shares, plan.num_micro)
        now = self._groups.generation
        if now.sums is not None:
            now.sums.begin_attempt()
        reducer.sends_all = now.gradients is not None and has_idle_rank(plan, now.computing)
        may_expect = call.may_expect and not (reducer.sends_all and self._shares_gpu_queue())
        reducer.begin(self._arrivals.expected.get(call.index) if may_expect else None)
        sums = LossSums(on_device=reducer.on_device, looks_for_zero=call.reads_late and not self._zero_is_harmless)
        started_s = time.perf_counter()
        try:
            with self._active:
                run_steps(
                    self._context,
                    batch,
                    loss_fn,
                    sums,
                    partial(_backward, reducer),
                    column=self._groups.generation.data_index,
                    call_index=call.index,
                    last_units=call.last_units,
                )
        finally:
            self._statistics.idle = False
        if self._throttle.active:
            slow_down(self._throttle, self._context.device, started_s)
        totals = call.exchange([self._local_result(reducer, sums)])
        touched = self._arrivals.agree(call.index, reducer, self._groups, totals, was_late=not call.may_expect)
        if reducer.on_device:
            # Errors change only by a step that is known to be finite.
            late = call.reads_late and not (totals.has_zero or reducer.has_summed_hooks or self._wire is not None)
            return self._finish_on_device(reducer, touched, sums, batch, reads_late=late)
        return self._finish(reducer, touched, sums, totals.units, totals.loss)

    def _finish(
        self,
        reducer: BucketReducer | LocalReducer,
        touched: Sequence[int],
        sums: LossSums,
        units: float,
        mean_loss: float,
    ) -> StepResult:
        """End a call whose loss the host knows."""
        correction = sums.nominal / (units * self._precision.scale)
        finite = reducer.finish(touched, correction)
        if not (finite and math.isfinite(mean_loss)):
            reducer.clear(touched)
        elif self._wire is not None:
            self._wire.commit(touched, correction)
        loss = torch.scalar_tensor(mean_loss, dtype=sums.dtype)
        return StepResult(units, loss, finite, sums.nominal, discard=partial(reducer.clear, touched))

    def lone_call(self) -> LoneCall | None:
        """Return what repeats the last call of `run` on a rank alone, with one micro-batch; None where more belongs to a call."""
        reducer, touched = self._reducer, self._arrivals.last_touched.get(0)
        if (
            type(self) is not ReplicaStrategy
            or not isinstance(reducer, LocalReducer)
            or touched is None
            or touched != reducer.touched()  # others than before: nobody knows yet that they are usual
            or reducer.has_summed_hooks
            or self._sums_on_device()
            or self._built_for != self._groups.generation.number
            or self._wire is not None
            or self._grad_norms is not None
            or self._throttle.active
            or self._added
            or self._parameters.has_changed
        ):
            return None
        agree = partial(self._arrivals.agree, 0, reducer, self._groups, was_late=False)
        finish = partial(self._finish, reducer)
        return LoneCall(self._context, reducer, self._parameters, tuple(self._frozen), touched, agree, finish)

    def _finish_on_device(
        self,
        reducer: BucketReducer | LocalReducer,
        touched: Sequence[int],
        sums: LossSums,
        batch: GlobalBatch,
        *,
        reads_late: bool,
    ) -> StepResult:
        """End a call whose loss the host has not read; see Note [One transfer]."""
        reducer.flush(touched)  # all ranks sum the vector behind the last bucket
        leftovers, reducer.leftovers = reducer.leftovers, None
        own = DeviceSums(sums, self._context.device, leftovers)
        rows = self._sum_norms(sums)
        self._groups.sum_async(own.vector).wait()
        correction: torch.Tensor | float = 1.0 / self._precision.scale
        if sums.weighted:
            correction = sums.nominal / (own.units * self._precision.scale)
        num_ranks = len(self._groups.generation.computing)
        unread = own.totals(reducer.finite_on_device(), batch.global_step, num_ranks)
        discard = partial(reducer.clear, touched)
        result = StepResult(
            math.nan,
            unread.loss,
            True,
            sums.nominal,
            discard=discard,
            touches=partial(reducer.touches, touched),
        )
        if reads_late:
            reducer.finish(touched, correction)
            return result._replace(unread=unread, norms=self._unread_norms(rows, sums, batch))
        try:
            totals = unread.read()
        except StepError:
            reducer.finish(touched, 1.0)
            discard()
            raise
        finite = totals.finite and math.isfinite(totals.loss)
        if totals.has_zero and not finite:
            # It may divide by its weight. Then a micro-batch without weight must be kept out of the backward.
            self._reads_weights = True
            # All ranks have read the same totals, so all repeat the attempt.
            raise AttemptFailedError([OK] * self._groups.world_size)
        self._zero_is_harmless = self._zero_is_harmless or totals.has_zero
        finite = reducer.finish(touched, correction) and finite
        if not finite:
            discard()
        elif self._wire is not None:
            self._wire.commit(touched, correction)
        norms = self._unread_norms(rows, sums, batch)
        return result._replace(units=totals.units, finite=finite, totals=totals, norms=norms)

    def _sum_norms(self, sums: LossSums) -> torch.Tensor | None:
        """Return the norms of all ranks' own gradients, summed behind the last bucket; None in a step that measures none."""
        if self._grad_norms is None or not self._grad_norms.on:
            return None
        now = self._groups.generation
        rows = self._grad_norms.row(now.ranks.index(now.rank), now.world_size, sums.units, self._context.device)
        self._groups.sum_async(rows).wait()
        return rows

    def _unread_norms(self, rows: torch.Tensor | None, sums: LossSums, batch: GlobalBatch) -> UnreadNorms | None:
        if rows is None or self._grad_norms is None:
            return None
        return self._grad_norms.unread(rows, batch.num_samples, sums.nominal / self._precision.scale)

    def _sums_on_device(self) -> bool:
        now = self._groups.generation
        if len(now.computing) < now.world_size:
            return False  # a rank that is away learns the loss by the exchange
        if self._reads_weights:
            return False
        if self._on_device is not None:
            return self._on_device
        if self._context.device.type != "cuda":
            return False
        group = now.gradients
        return group is None or (isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl")

    @property
    def finds_leftovers(self) -> bool:
        """True if `run` finds gradients that are left over without the host."""
        return self._sums_on_device()

    def rollback(self, *, together: bool) -> None:
        if self._reducer is None:
            return
        if together:
            self._reducer.rollback()
        else:
            self._reducer.abort()

    def state_dict(self) -> Mapping[int, Expectation]:
        """Return the arrivals that earlier steps had, by index of the call."""
        return dict(self._arrivals.expected)

    def load_state_dict(self, state: Mapping[int, Expectation]) -> None:
        self._arrivals.expected = dict(state)

    def fingerprint(self) -> Mapping[str, torch.Tensor]:
        return self._state.read()

    def _shares_gpu_queue(self) -> bool:
        """Return whether gradients are summed over NCCL while ranks wait for each other's statistics.

        All of them must begin both in the same order, or they may wait for each other. A rank without samples sends its buckets
        after its backward, so then all do.
        """
        return self._statistics.in_use and bool(self._groups.nccl_ranks)

    def _local_result(self, reducer: BucketReducer | LocalReducer, sums: LossSums) -> LocalResult:
        grad_norms, on_device = self._grad_norms, sums.on_device
        measured = grad_norms if grad_norms is not None and grad_norms.on and not on_device else None
        touched_key = reducer.touched_key()
        if self._added:
            # Ranks that added parameters have built new buckets, and can't wait for those of ranks that did not.
            touched_key = float(int(touched_key) ^ (_key_of(self._added) % 2**20 << 32))
        return LocalResult(
            status=LATE_GRADIENT if reducer.late or self._added else OK,
            weighted=sums.weighted,
            units=math.nan if on_device and sums.weighted else float(sums.units),
            loss_sum=math.nan if on_device else float(sums.loss_sum),
            metrics={name: math.nan if on_device else float(value) for name, value in sums.metrics.items()}
            if sums.metrics
            else {},
            touched_key=touched_key,
            touched=() if self._groups.gradients is None else reducer.touched_words(),
            times_late=on_device,
            has_zero=sums.zero_read is not None and sums.zero_read.read()[0] > 0,
            squared_norm=None if measured is None else float(measured.own()),
        )

    def _build(self) -> None:
        # A parameter that was trained once keeps its slot while it is frozen (a GAN freezes and unfreezes in each step).
        keep = {id(slot.param) for slot in self._reducer.slots} if self._reducer is not None else set()
        self.detach()
        if self._built_for != self._groups.generation.number:
            # A rank that was away did not see what was frozen meanwhile: all ranks begin with the same buckets.
            self._built_for, keep = self._groups.generation.number, set()
            self._reads_weights = self._zero_is_harmless = False
            if self._statistics.in_use and self._groups.nccl_ranks:
                # The first collective makes the communicator: in a forward it would wait for a rank whose forward failed.
                self._groups.sum_statistics(torch.zeros(1, device=self._context.device))
        if len(self._groups.generation.computing) == 1:  # alone, or the others have left
            self._reducer = LocalReducer(self._models, self._grad_norms, keep)
        else:
            self._reducer = BucketReducer(
                self._models,
                self._groups,
                self._segments,
                grad_norms=self._grad_norms,
                keep=keep,
                wire=self._wire,
                sizes=self._bucket_sizes(),
                confirm=self._groups.check if self._groups.nccl_ranks else lambda: None,
            )
        slotted = {id(slot.param) for slot in self._reducer.slots}
        self._frozen = [p for p in self._parameters.named.values() if id(p) not in slotted]
        self._arrivals, self._is_ordered = Arrivals(), False

    def _bucket_sizes(self) -> BucketSizes | None:
        link = self._link.measure(self._context.device) if self._link is not None else None
        if self._link is None or link is None:
            return None
        # Equal on all ranks, also on one that does not know yet what `auto` has chosen.
        wire = self._wire.name if self._wire is not None and self._wire.name != "auto" else "fp32"
        return bucket_sizes(gradient_size(self._models), link, self._link.num_senders, wire)

    def _follow_parameters(self, call: BackwardCall) -> BucketReducer | LocalReducer:
        """Return the reducer of the parameters as they are now."""
        # Parameters may be frozen, unfrozen, converted, added or replaced between steps, on all ranks.
        if self._built_for != self._groups.generation.number:
            self._build()
        reducer, gone = self._of(), False
        if self._parameters.has_changed:
            known = list(self._parameters.named.values())
            self._parameters.read()
            before, now = set(map(id, known)), set(map(id, self._parameters.named.values()))
            self._added |= {name: p for name, p in self._parameters.named.items() if id(p) not in before}
            self._frozen += self._added.values()
            gone = any(id(slot.param) not in now for slot in reducer.slots)
        if gone or not reducer.fits or (self._frozen and any(p.requires_grad for p in self._frozen)):
            self._build()
            reducer = self._of()
        if self._groups.gradients is None:
            self._added = {}
        elif not call.may_expect:
            # Equal in name and shape on all ranks: they were part of the key in the attempt before.
            broadcast(self._added.values(), self._groups)
            self._added = {}
        elif call.index == 0 and self._arrivals.order and not self._is_ordered:
            self._is_ordered = True
            reducer.reorder(self._arrivals.order)
        return reducer

    def _of(self) -> BucketReducer | LocalReducer:
        if self._reducer is None:
            raise RuntimeError("the strategy is not attached to a model")
        return self._reducer


def _backward(reducer: BucketReducer | LocalReducer, loss: torch.Tensor, *, last: bool, idle: bool) -> None:
    reducer.micro(last=last, idle=idle)
    loss.backward()  # type: ignore[no-untyped-call]
    reducer.end_micro()
    if idle:
        reducer.end_idle()


def _key_of(params: Mapping[str, nn.Parameter]) -> int:
    """Return a checksum of names, shapes and dtypes."""
    text = repr([(name, tuple(p.shape), p.dtype) for name, p in params.items()])
    return zlib.crc32(text.encode()) % 2**31


def has_idle_rank(plan: StepPlan, computing: Sequence[int]) -> bool:
    """Return whether a rank that computes has no sample in the last micro-batch, in which buckets leave."""
    return 0 in map(plan.micro[-1].__getitem__, computing)
