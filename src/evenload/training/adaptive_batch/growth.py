"""Grow the global batch up to `batch_max`: measure steps, and choose the batch of each epoch.

`observe` takes each step; at the end of an epoch rank 0 decides (`balance/batch.py`) and all ranks receive integers: the
batch, the noise scale that the learning rate follows, and the shares. Inside an epoch nothing changes, so the order of
samples, the cursor and `len(loader)` are those of a loader with that batch_size.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenload.balance.batch import BatchChoice, StepOverhead, choose_batch, efficiency
from evenload.balance.cost import CostSample
from evenload.balance.drift import SpeedTracker
from evenload.balance.noise import LEAST_MEASURED, NoiseScale
from evenload.errors import CheckpointError
from evenload.training.compute.grad_norms import MEASURE_EVERY
from evenload.training.data.loader import GlobalLoader
from evenload.training.data.tuning import StepCost
from evenload.training.step.plan_source import PlanSource
from evenload.training.step.planner import Planner
from evenload.training.step.stats import StepStats

_REMEMBERED = 64
_PARTS = 1000
"""The noise scale is sent as an integer, in thousandths of a sample."""


@dataclass(frozen=True)
class EpochBatch:
    """The batch of an epoch, the same on all ranks."""

    batch_size: int
    noise: float
    """Lower bound of the noise scale when it was chosen, in samples; 0 before the first choice."""


@dataclass(frozen=True)
class BatchReport:
    """A choice and its reasons, on rank 0."""

    epoch: int
    before: int
    chosen: EpochBatch
    choice: BatchChoice | None
    """None if not enough was measured."""
    measured: float | None
    num_measured: int
    num_steps: int
    epoch_steps: int | None
    is_first: bool
    """True if this is the first report of its kind: that the batch stays, or that the noise can't be measured."""


class BatchGrowth(PlanSource):
    """The global batch of one loader, and the measurements that choose it."""

    def __init__(
        self, loader: GlobalLoader, planner: Planner, *, base: int, limit: int, record: Callable[[BatchReport], None]
    ) -> None:
        """`base` is the user's batch_size; `record` is called on rank 0 with each choice, once its epoch has begun."""
        self.base = base
        self.limit = limit
        self.now = EpochBatch(base, 0.0)
        self._loader = loader
        self._planner = planner
        self._record = record
        self._noise = NoiseScale()
        self._tracks = [SpeedTracker() for _ in range(planner.world_size)]
        self._rests: deque[StepOverhead] = deque(maxlen=_REMEMBERED)
        self._tried_from: int | None = None
        self._has_tried = False
        self._num_steps = 0
        self._reported: set[str] = set()
        self._unreported: BatchReport | None = None
        planner.use(self)

    def observe(self, stats: StepStats, usual: bool) -> None:
        """Take a step of training, on all ranks; its times count only if it was a usual one."""
        if self._unreported is not None:
            # Not earlier: there may be no further epoch, and progress bars still show the last one.
            self._record(self._unreported)
            self._unreported = None
        self._num_steps += 1
        timed = stats.timed  # the step whose norms and times the host has read by now
        if timed is not None and timed.norms is not None:
            self._noise.add(timed.norms)
        if self._planner.rank != 0 or not usual or timed is None or timed.plan is None:
            return
        plan = timed.plan
        cost = timed.cost(plan.num_samples)
        if not all(0 < seconds < float("inf") for seconds in cost.busy_s):
            return
        for track, share, own_s in zip(self._tracks, plan.shares, cost.busy_s, strict=True):
            track.add(CostSample(timed.global_step, max(share, plan.num_micro), plan.num_micro, own_s))
        self._rests.append(_rest(cost))

    def next_batch_size(self) -> int:
        before, choice = self.now, None
        integers = [before.batch_size, round(before.noise * _PARTS)]  # what holds if rank 0 is lost in this exchange
        if self._planner.rank == 0:
            choice = self._decide()
            size = before.batch_size if choice is None else choice.batch_size
            noise = before.noise if choice is None else self._noise.at_least or 0.0
            shares = () if size == before.batch_size else self._planner.split(size, self._costs()).shares
            integers = [size, round(noise * _PARTS), *shares]
        size, noise_parts, *new_shares = self._planner.agree(integers)
        self.now = EpochBatch(size, noise_parts / _PARTS)
        if new_shares:
            self._planner.resize(size, tuple(new_shares))
        if self._planner.rank == 0:
            if choice is not None:
                self._has_tried = self._has_tried or choice.kind == "trial"
                self._tried_from = before.batch_size if choice.kind == "trial" else None
            self._unreported = BatchReport(
                self._loader.epoch,
                before.batch_size,
                self.now,
                choice,
                self._noise.samples,
                self._noise.num_measured,
                self._num_steps,
                self._loader.num_steps(size),
                self._is_first(choice),
            )
        return size

    @property
    def noise_samples(self) -> float | None:
        """The lower bound of the noise scale that choices follow; None before enough was measured."""
        return self._noise.at_least

    def progress(self) -> tuple[int, int]:
        """Return the progress in steps of the user's batch, and that batch, so that speeds compare between epochs."""
        return self._loader.cursor().samples_total // self.base, self.base

    def state_dict(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "batch_size": self.now.batch_size,
            "noise_parts": round(self.now.noise * _PARTS),
            "measured": self._noise.state_dict(),
            "tried_from": self._tried_from,
            "has_tried": self._has_tried,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, in_epoch: bool) -> None:
        """Continue with a checkpoint's batch, before the planner and after the loader have loaded theirs.

        `state` is None from a run without `batch_max`; a checkpoint `in_epoch` keeps its batch to the end of the epoch.
        """
        if state is None:
            return
        self._noise.load_state_dict(state["measured"])
        if not in_epoch and state["base"] != self.base:
            return  # the user chose another initial batch
        if in_epoch and state["base"] != self.base:
            raise CheckpointError(
                f"the checkpoint stands inside an epoch of a loader with batch_size={state['base']}, which batch_max lets grow; "
                f"now it is {self.base}: set the old value, or start from scratch with --fresh"
            )
        self._tried_from, self._has_tried = state["tried_from"], bool(state["has_tried"])
        self.now = EpochBatch(int(state["batch_size"]), int(state["noise_parts"]) / _PARTS)
        if self.now.batch_size != self.base:
            self._planner.resize(self.now.batch_size, None)
            self._loader.resize(self.now.batch_size)

    def _decide(self) -> BatchChoice | None:
        noise = self._noise.at_least
        if noise is None or not self._rests:
            return None
        costs = self._costs()
        fixed_s = statistics.median(rest.fixed_s for rest in self._rests)
        per_sample_s = statistics.median(rest.per_sample_s for rest in self._rests)
        rest = StepOverhead(fixed_s, per_sample_s)
        limit = min(self.limit, self._loader.num_samples or self.limit)
        return choose_batch(
            base=self.base,
            limit=max(limit, self.base),
            now=self.now.batch_size,
            noise=noise,
            seconds_of=lambda size: self._planner.split(size, costs).expected_s + rest.predict_s(size),
            may_try=not self._has_tried and not all(track.fit.is_telling for track in self._tracks),
            tried_from=self._tried_from,
        )

    def _costs(self) -> list[Any]:
        return [track.refit().cost for track in self._tracks]

    def _is_first(self, choice: BatchChoice | None) -> bool:
        # Report each kind once; that there is no noise to measure only after enough steps.
        if choice is None:
            enough = self._num_steps >= LEAST_MEASURED * MEASURE_EVERY
            kind = "unmeasured" if enough and self._noise.num_measured < LEAST_MEASURED else ""
        else:
            kind = choice.kind
        is_first = bool(kind) and kind not in self._reported
        self._reported.add(kind)
        return is_first


def _rest(cost: StepCost) -> StepOverhead:
    # Of rank 0's step, without the computation of the slowest rank.
    data_s = cost.data_s[0]
    return StepOverhead(max(0.0, cost.seconds - max(cost.busy_s) - data_s), data_s / cost.num_samples)


def sentence(report: BatchReport, base: int, gains: Mapping[str, float]) -> str:
    """Describe a choice; empty if there is nothing new."""
    choice, size = report.choice, report.chosen.batch_size
    if choice is None:
        if not report.is_first:
            return ""
        return (
            f"batch_max has no effect so far: {report.num_measured} of {report.num_steps} steps measured the gradient noise; "
            "that takes two ranks with samples, or one with several micro-batches (--micro-batch below the batch_size)"
        )
    noise = f"noise scale {report.measured or 0.0:.0f} samples (at least {report.chosen.noise:.0f})"
    if size == report.before:
        return (
            f"the global batch stays {size}: {noise}, no other size promises enough goodput yet"
            if report.is_first
            else ""
        )
    worth = efficiency(report.chosen.noise, base, size)
    reason = {
        "grown": "more goodput",
        "shrunk": "the smaller one trains faster",
        "trial": "a trial for one epoch, to separate overhead from time per sample",
    }[choice.kind]
    rates = ", ".join(f"{gain:.2f}× for {name}" for name, gain in gains.items() if gain != 1.0)
    return (
        f"global batch {report.before} → {size} from epoch {report.epoch} on ({reason}): {noise}, goodput "
        f"{choice.before_per_s:.4g} → {choice.expected_per_s:.4g} samples of batch {base} a second; a sample is worth "
        f"{worth:.2f} of one" + (f"; learning rate {rates}" if rates else "")
    )
