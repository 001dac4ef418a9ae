"""Grow the global batch up to `batch_max`: measure steps, and choose the batch of each epoch, and of other devices.

`observe` takes each step; at the end of an epoch rank 0 decides (`balance/batch.py`) and all ranks receive integers: the
batch, the noise scale that the learning rate follows, and the shares.

On other devices (ranks joined or left, or a checkpoint was loaded on others) the batch is chosen inside the epoch: after
`CHOICE_STEPS` steps, and again after as many until it stays or turns back. The rest of the epoch comes in batches of the
new size. The cursor counts samples, so the order of samples and what is used of it do not depend on the batches.

Ranks learn of a loss in different steps, so they may count differently. Rank 0 alone says whether it is time; all ask it in
front of the same steps (every `_ASK_EVERY`) and at the end of each epoch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.balance.batch import CHOICE_STEPS, BatchChoice, ChoiceTimes, StepOverhead, choose_batch, efficiency
from evenload.balance.cost import CostSample
from evenload.balance.drift import SpeedTracker
from evenload.balance.noise import LEAST_MEASURED, NoiseScale
from evenload.errors import CheckpointError
from evenload.training.compute.grad_norms import MEASURE_EVERY
from evenload.training.data.cursor import Cursor
from evenload.training.data.loader import GlobalLoader
from evenload.training.data.tuning import StepCost
from evenload.training.step.plan_source import PlanSource
from evenload.training.step.planner import Planner
from evenload.training.step.stats import StepStats

_ASK_EVERY = 10
"""Steps between two questions inside an epoch whether the batch is to be chosen."""
_REMEMBERED = 64
_PARTS = 1000
"""The noise scale is sent as an integer, in thousandths of a sample."""


@dataclass(frozen=True)
class EpochBatch:
    """The batch of an epoch, or of its steps up to the next choice; the same on all ranks."""

    batch_size: int
    noise: float
    """Lower bound of the noise scale when it was chosen, in samples; 0 before the first choice."""


@dataclass(frozen=True)
class BatchReport:
    """A choice and its reasons, on rank 0."""

    epoch: int
    epoch_step: int
    """The first step in the chosen batch; 0 at the beginning of an epoch."""
    before: int
    chosen: EpochBatch
    choice: BatchChoice | None
    """None if not enough was measured."""
    measured: float | None
    num_measured: int
    num_steps: int
    epoch_steps: int
    is_first: bool
    """True if this is the first report of its kind: that the batch stays, or that the noise can't be measured."""


class BatchGrowth(PlanSource):
    """The global batch of one loader, and the measurements that choose it."""

    def __init__(
        self,
        loader: GlobalLoader,
        planner: Planner,
        *,
        base: int,
        limit: int,
        devices: Callable[[], Sequence[str]],
        record: Callable[[BatchReport], None],
    ) -> None:
        """Args:
        base: the user's batch_size.
        devices: returns the names of the present devices, the same on all ranks.
        record: called on rank 0 with each choice, once a step in its batch is done.
        """
        self.base = base
        self.limit = limit
        self.now = EpochBatch(base, 0.0)
        self._loader = loader
        self._planner = planner
        self._devices = devices
        self._record = record
        self._noise = NoiseScale()
        self._generation = planner.generation
        self._tracks = [SpeedTracker() for _ in range(planner.world_size)]
        self._rests: deque[StepOverhead] = deque(maxlen=_REMEMBERED)
        self._tried_from: int | None = None
        self._has_tried = False
        self._times = ChoiceTimes()
        """Rank 0's counts; see the module's docstring."""
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
        self._follow_devices()
        if self._times.steps_left:
            self._times.steps_left -= 1
        timed = stats.timed  # the step whose norms and times the host has read by now
        if timed is not None and timed.norms is not None:
            self._noise.add(timed.norms)
        if self._planner.rank != 0 or not usual or timed is None or timed.plan is None:
            return
        plan = timed.plan
        if plan.generation != self._generation:
            return  # of other ranks
        cost = timed.cost(plan.num_samples)
        if not all(0 < seconds < float("inf") for seconds in cost.busy_s):
            return
        for track, share, own_s in zip(self._tracks, plan.shares, cost.busy_s, strict=True):
            track.add(CostSample(timed.global_step, max(share, plan.num_micro), plan.num_micro, own_s))
        self._rests.append(_rest(cost))

    def next_batch_size(self, step: int | None) -> int | None:
        if step is not None and step % _ASK_EVERY:
            return None
        self._follow_devices()
        return self._choose(is_due=self._times.is_due(in_epoch=step is not None))

    def _choose(self, is_due: bool) -> int | None:
        """Return what rank 0 chooses; None if it says that it is not time."""
        before, choice = self.now, None
        integers = [before.batch_size, round(before.noise * _PARTS)]  # what holds if rank 0 is lost in this exchange
        if self._planner.rank == 0 and not is_due:
            integers = []
        elif self._planner.rank == 0:
            choice = self._decide()
            size = before.batch_size if choice is None else choice.batch_size
            noise = before.noise if choice is None else self._noise.at_least or 0.0
            shares = () if size == before.batch_size else self._planner.split(size, self._costs()).shares
            integers = [size, round(noise * _PARTS), *shares]
        if not (agreed := self._planner.agree(integers)):
            return None
        size, noise_parts, *new_shares = agreed
        self.now = EpochBatch(size, noise_parts / _PARTS)
        if new_shares:
            # A rank may have been lost in the exchange, so that the shares are those of other ranks.
            fits = len(new_shares) == self._planner.world_size
            self._planner.resize(size, tuple(new_shares) if fits else None)
        self._times.chose(before.batch_size, size)
        self._loader.resize(size)
        if self._planner.rank == 0:
            if choice is not None:
                self._has_tried = self._has_tried or choice.kind == "trial"
                self._tried_from = before.batch_size if choice.kind == "trial" else None
            self._unreported = BatchReport(
                self._loader.epoch,
                self._loader.cursor().step,
                before.batch_size,
                self.now,
                choice,
                self._noise.samples,
                self._noise.num_measured,
                self._num_steps,
                len(self._loader),
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
            "times": dict(vars(self._times)),
            "devices": list(self._devices()),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, in_epoch: bool) -> None:
        """Continue with a checkpoint's batch, before the planner and after the loader have loaded theirs.

        `state` is None from a run without `batch_max`. On other devices than the checkpoint's the batch is chosen anew.
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
        if self.now.batch_size != sum(self._planner.shares):
            self._planner.resize(self.now.batch_size, None)
        self._loader.resize(self.now.batch_size)  # also to the user's: the epoch may hold batches of several sizes
        if (devices := list(self._devices())) != state.get("devices", devices):
            self._begin_choice()
        elif state.get("times", {}).get("steps_left") is not None:
            self._times = ChoiceTimes(CHOICE_STEPS, state["times"]["direction"])  # nothing is measured here yet

    def _follow_devices(self) -> None:
        if self._generation != self._planner.generation:
            self._generation = self._planner.generation
            self._begin_choice()

    def _begin_choice(self) -> None:
        """Forget what was measured on other devices, and choose the batch once these are measured."""
        self._tracks = [SpeedTracker() for _ in range(self._planner.world_size)]
        self._rests.clear()
        self._tried_from, self._has_tried = None, False
        self._times.begin()

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


def check_not_grown(state: Mapping[str, Any], cursor: Cursor) -> None:
    """Raise CheckpointError for a run without `batch_max` that would go on inside an epoch whose batches it chose."""
    base, size = state["base"], state["batch_size"]
    in_epoch = 0 < cursor.position < cursor.epoch_samples
    if in_epoch and (size, cursor.position) != (base, cursor.step * base):
        raise CheckpointError(
            f"the checkpoint stands inside an epoch in batches of {size}, which batch_max chose for a batch_size of {base}: "
            "keep batch_max until the epoch is over, or start from scratch with --fresh"
        )


def _rest(cost: StepCost) -> StepOverhead:
    # Of rank 0's step, without the computation of the slowest rank.
    data_s = cost.data_s[0]
    return StepOverhead(max(0.0, cost.seconds - max(cost.busy_s) - data_s), data_s / cost.num_samples)


def _place(report: BatchReport) -> str:
    return f"epoch {report.epoch}" if not report.epoch_step else f"step {report.epoch_step} of epoch {report.epoch}"


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
        "trial": "a trial until the next choice, to separate overhead from time per sample",
    }[choice.kind]
    rates = ", ".join(f"{gain:.2f}× for {name}" for name, gain in gains.items() if gain != 1.0)
    return (
        f"global batch {report.before} → {size} from {_place(report)} on ({reason}): {noise}, goodput "
        f"{choice.before_per_s:.4g} → {choice.expected_per_s:.4g} samples of batch {base} a second; a sample is worth "
        f"{worth:.2f} of one" + (f"; learning rate {rates}" if rates else "")
    )
