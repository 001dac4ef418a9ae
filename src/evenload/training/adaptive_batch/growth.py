"""The global batch that grows: `batch_max`. Measures, and chooses where an epoch of the loader begins.

What a step says goes in by `observe`; at the end of an epoch rank 0 decides (`balance/batch.py`) and all ranks hear integers:
the batch, the noise scale that the learning rate follows, and the shares. Inside an epoch nothing changes, so the order of
samples, the cursor and `len(loader)` are those of a loader of that batch_size.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from evenload.balance.batch import BatchChoice, StepOverhead, choose_batch, efficiency
from evenload.balance.cost import CostSample
from evenload.balance.drift import SpeedTracker
from evenload.balance.noise import LEAST_MEASURED, NoiseScale
from evenload.balance.values import StepPlan
from evenload.errors import CheckpointError
from evenload.training.compute.grad_norms import MEASURE_EVERY
from evenload.training.data.loader import GlobalLoader
from evenload.training.data.tuning import StepCost
from evenload.training.step.planner import Planner, PlanSource
from evenload.training.step.stats import StepStats

_REMEMBERED = 64
_PARTS = 1000
"""The noise scale travels as an integer, in thousandths of a sample."""


class ObservedStep(Protocol):
    """A step of training: its index among the loader's steps, and its plan."""

    global_step: int
    plan: StepPlan


@dataclass(frozen=True)
class EpochBatch:
    """The batch of an epoch, the same on all ranks."""

    batch_size: int
    noise: float
    """The noise scale that was surely there when it was chosen, in samples; 0 before the first choice."""


@dataclass(frozen=True)
class BatchReport:
    """What there is to say of a choice; on rank 0."""

    epoch: int
    before: int
    chosen: EpochBatch
    choice: BatchChoice | None
    """None where not enough was measured."""
    measured: float | None
    """The noise scale as measured."""
    num_measured: int
    num_steps: int
    epoch_steps: int | None
    is_first: bool
    """Nothing of this kind was told before: that it stays, or that the noise can't be measured."""


class BatchGrowth(PlanSource):
    """The global batch of one loader, and what it is chosen by."""

    def __init__(
        self, loader: GlobalLoader, planner: Planner, *, base: int, limit: int, tell: Callable[[BatchReport], None]
    ) -> None:
        """Args:
        loader: whose epochs are cut.
        planner: who gives shares.
        base: the user's batch_size.
        limit: `batch_max`.
        tell: told each choice on rank 0, when the epoch that it is for has begun.
        """
        self.base = base
        self.limit = limit
        self.now = EpochBatch(base, 0.0)
        self._loader = loader
        self._planner = planner
        self._tell = tell
        self._noise = NoiseScale()
        self._tracks = [SpeedTracker() for _ in range(planner.world_size)]
        self._rests: deque[StepOverhead] = deque(maxlen=_REMEMBERED)
        self._tried_from: int | None = None
        self._has_tried = False
        self._num_steps = 0
        self._said: set[str] = set()
        self._news: BatchReport | None = None
        planner.use(self)

    def observe(self, seen: ObservedStep, stats: StepStats, usual: bool) -> None:
        """All ranks: what a step of training showed; its times only count where it was a usual one."""
        if self._news is not None:
            # Not before: there may be no further epoch, and who draws progress still draws the last one.
            self._tell(self._news)
            self._news = None
        self._num_steps += 1
        if stats.norms is not None:
            self._noise.add(stats.norms)
        if self._planner.rank != 0 or not usual:
            return
        plan = seen.plan
        cost = stats.cost(plan.num_samples)
        if not all(0 < seconds < float("inf") for seconds in cost.busy_s):
            return
        for track, share, own_s in zip(self._tracks, plan.shares, cost.busy_s, strict=True):
            track.add(CostSample(seen.global_step, max(share, plan.num_micro), plan.num_micro, own_s))
        self._rests.append(_rest(cost))

    def next_batch_size(self) -> int:
        """Choose the global batch of the next epoch; see `PlanSource`."""
        before, choice = self.now, None
        integers = None
        if self._planner.rank == 0:
            choice = self._decide()
            size = before.batch_size if choice is None else choice.batch_size
            noise = before.noise if choice is None else self._noise.at_least or 0.0
            shares = () if size == before.batch_size else self._planner.split(size, self._costs()).shares
            integers = [size, round(noise * _PARTS), *shares]
        size, noise_parts, *told = self._planner.agree(integers)
        self.now = EpochBatch(size, noise_parts / _PARTS)
        if told:
            self._planner.resize(size, tuple(told))
        if self._planner.rank == 0:
            self._remember(before.batch_size, choice)
            self._news = BatchReport(
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

    def progress(self) -> tuple[int, int]:
        """How far the loader is in steps of the user's batch, and that batch: a speed in them says the same in every epoch."""
        return self._loader.cursor().samples_total // self.base, self.base

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "base": self.base,
            "batch_size": self.now.batch_size,
            "noise_parts": round(self.now.noise * _PARTS),
            "measured": self._noise.state_dict(),
            "tried_from": self._tried_from,
            "has_tried": self._has_tried,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, in_epoch: bool) -> None:
        """Goes on with a checkpoint's batch, before the planner and after the loader have loaded theirs.

        Args:
            state: what `state_dict` gave; None from a run without `batch_max`.
            in_epoch: the checkpoint stands inside an epoch, which must be cut as it was.
        """
        if state is None:
            return
        self._noise.load_state_dict(state["measured"])
        if not in_epoch and state["base"] != self.base:
            return  # the user chose another batch to begin with
        if in_epoch and state["base"] != self.base:
            raise CheckpointError(
                f"the checkpoint stands inside an epoch of a loader with batch_size={state['base']}, which batch_max lets grow; "
                f"now it is {self.base}: set it as it was, or start anew with --fresh"
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
        """Whether this may be said: once that there is no noise to measure, after steps enough, and once that it stays."""
        if choice is None:
            enough = self._num_steps >= LEAST_MEASURED * MEASURE_EVERY
            kind = "unmeasured" if enough and self._noise.num_measured < LEAST_MEASURED else ""
        else:
            kind = choice.kind
        is_first = bool(kind) and kind not in self._said
        self._said.add(kind)
        return is_first

    def _remember(self, before: int, choice: BatchChoice | None) -> None:
        if choice is None:
            return
        self._has_tried = self._has_tried or choice.kind == "trial"
        self._tried_from = before if choice.kind == "trial" else None


def _rest(cost: StepCost) -> StepOverhead:
    """Rank 0's step, without what the slowest rank computed."""
    data_s = cost.data_s[0]
    return StepOverhead(max(0.0, cost.seconds - max(cost.busy_s) - data_s), data_s / cost.num_samples)


def sentence(told: BatchReport, base: int, gains: Mapping[str, float]) -> str:
    """What a person reads of a choice; empty where there is nothing new."""
    choice, size = told.choice, told.chosen.batch_size
    if choice is None:
        if not told.is_first:
            return ""
        return (
            f"batch_max has no effect so far: {told.num_measured} of {told.num_steps} steps told how noisy the gradients are; it "
            "takes two ranks with samples, or one with several micro-batches (--micro-batch below the batch_size)"
        )
    noise = f"noise scale {told.measured or 0.0:.0f} samples (at least {told.chosen.noise:.0f})"
    if size == told.before:
        return (
            f"the global batch stays {size}: {noise}, no other one promises enough goodput yet" if told.is_first else ""
        )
    worth = efficiency(told.chosen.noise, base, size)
    why = {
        "grown": "more goodput",
        "shrunk": "the smaller one trains faster",
        "trial": "a trial for one epoch, to tell overhead from samples",
    }[choice.kind]
    rates = ", ".join(f"{gain:.2f}× for {name}" for name, gain in gains.items() if gain != 1.0)
    return (
        f"global batch {told.before} → {size} from epoch {told.epoch} on ({why}): {noise}, goodput "
        f"{choice.before_per_s:.4g} → {choice.expected_per_s:.4g} samples of batch {base} a second; a sample is worth "
        f"{worth:.2f} of one" + (f"; learning rate {rates}" if rates else "")
    )
