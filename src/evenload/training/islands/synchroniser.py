"""Synchronise islands every few steps: when, what they report to each other, and which weights are shown.

    body of step s ends -> s + 1 = a multiple of sync_every: outer step (parallel/outer.py) -> what follows from the rows of all
    ranks (times, units, loss, stop requests) some steps before (reports.py): rank 0 divides the batch anew -> the next body

Times are exchanged between two synchronisations too (`ReportTimes`), which sums nothing.
With P fragments one is sent P times in this period, and used at the next of these times, or `sync_delay` steps later. A
checkpoint needs synchronised weights: it is written at the end of a period, after all fragments were synchronised at once.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenload.balance.wire_bytes import sent_bytes
from evenload.errors import ConfigError
from evenload.job import stop_requested
from evenload.training.comm.control import Operation
from evenload.training.comm.islands import IslandLink, IslandMap
from evenload.training.islands.learning_rates import NUM_VALUES, LearningRates
from evenload.training.islands.opening_line import describe
from evenload.training.islands.planner import IslandPlanner
from evenload.training.islands.reports import IslandReports
from evenload.training.islands.schedulers import FollowedScheduler, follow_all
from evenload.training.islands.shares import LEAD, NUM_BLOCKS, ReportTimes, blocks_of
from evenload.training.parallel.outer import OuterState
from evenload.training.parallel.wire.outer_wire import OuterWire
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener
from evenload.training.step.step_loader import StepLoader

Listing = Callable[..., Sequence[Any]]


class IslandSynchroniser(StepListener):
    """One for a job of strategy local. All ranks synchronise at the same steps."""

    def __init__(
        self,
        context: TrainingContext,
        islands: IslandMap,
        models: list[nn.Module],
        loaders: list[StepLoader],
        living: Listing,
    ) -> None:
        """`living` returns all living objects of some classes, `besides` some."""
        config = context.config
        self._context = context
        self._islands = islands
        self._models, self._loaders = models, loaders
        self._living = living
        self._every, self._num_fragments = config.sync_every, config.fragments
        has_wire = config.wire != "fp32"
        self._link = IslandLink(context.groups, context.step_groups, islands, has_wire=has_wire)
        self._wire = OuterWire(config.wire, self._link, config.seed) if has_wire and len(islands) > 1 else None
        self._outer: OuterState | None = None
        self._loaded: Mapping[str, Any] = {}
        self._delay = config.sync_delay
        self._streams = config.fragments > 1 or config.sync_delay > 0
        """True if sums are hidden behind steps."""
        self._num_slots = 0
        """Fragments sent so far, counted from the first step of the run."""
        self._take_at: int | None = None
        """Number of steps after which the sum in progress is used; None: before the next fragment is sent."""
        self._clean_at = 0
        """Number of steps after which the weights were those of all islands."""
        self._seconds: list[float] = []
        self._step_s = 0.0  # mean of those in the newest report
        self._times = ReportTimes()
        self._reports = IslandReports(context.groups)
        self._report_at, self._lead = 0, LEAD
        """Number of steps after which the next report counts, and how many before it its rows are sent."""
        self._sync_s = self._spent_s = 0.0
        self._loss_sum = self._loss_units = 0.0
        self._followed: list[FollowedScheduler] = []
        self._rates: LearningRates | None = None
        """Where all islands take the same steps, and so have the same rates at each."""
        self._ends: tuple[int, int] | None = (1, 1)
        self._reported = False
        self._asks = False
        """`run.checkpoint` was called between two synchronisations."""
        self.owes_checkpoint = False
        """The same on any rank, and they are synchronised now."""
        context.loop.defers_stop = True
        if config.local_steps == "auto" and len(islands) > 1:
            context.control.islands_apart = lambda: context.loop.step is not None

    # -- what others need to know ---------------------------------------------------------------------------------------

    @property
    def is_clean(self) -> bool:
        """True if this rank's weights are those of all islands."""
        loop = self._context.loop
        is_moving = loop.step is not None and loop.step.stats.calls > 0 and not loop.step.committed
        return self._outer is None or (self._clean_at == loop.steps_done and not self._is_inside and not is_moving)

    def opens(self, *, now: bool) -> bool:
        """Return whether a checkpoint may be written here; if not, and it is wanted `now`, ask for one at the next chance."""
        self._settle_body()
        loop = self._context.loop
        if self.is_clean or (self._streams and loop.steps_done % self._every == 0 and not self._is_inside):
            return True
        self._asks = self._asks or now
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's state; the synchronised weights are the models' own in a checkpoint."""
        return dict(self._loaded) if self._outer is None else self._outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin with the outer optimizer's state, on any islands."""
        self._loaded = state

    @contextlib.contextmanager
    def synchronised_weights(self, *, together: bool) -> Iterator[None]:
        """Let the models hold the weights of the newest synchronisation while the body runs; `together`: on all ranks."""
        if together:
            self._settle_body()
        outer = self._outer
        if outer is None or self.is_clean:
            yield
            return
        outer.show()
        try:
            yield
        finally:
            outer.hide()

    # -- the steps ------------------------------------------------------------------------------------------------------

    def on_begin(self, step: Step) -> None:
        if self._outer is None:
            self._open()
        elif step.index > 0:
            self._outer.hide()  # a loop over run.batches that was left may not have ended
            self.catch_up()
        if not self._is_inside:
            for scheduler in self._followed:
                scheduler.begin()

    def on_trained(self, step: Step) -> None:
        step.stats.sync_s, self._sync_s = self._sync_s, 0.0
        if (timed := step.stats.timed) is None or timed.plan is None:
            return
        seconds = timed.whole_seconds() - timed.sync_s
        planner, size = step.planner, timed.plan.num_samples
        mean = planner.own_mean if isinstance(planner, IslandPlanner) else 0
        # Not the last, short batch of an epoch, nor the last one of another division.
        if abs(size - mean) <= 1 and step.stats.is_usual and seconds > 0:
            self._seconds.append(seconds * mean / size)
        units = self._context.engine.totals.units.get(0, 0.0)
        if timed.loss == timed.loss:
            self._loss_sum += timed.loss * units
            self._loss_units += units

    def on_boundary(self, step: Step) -> None:
        self.catch_up()

    def on_end(self, step: Step) -> None:
        self._ends = step.batch.plan.progress.ends
        if self._ends is not None:
            for scheduler in self._followed:
                scheduler.end(*self._ends, left_early=self._context.loop.left_early)

    def catch_up(self) -> None:
        """Synchronise what is due after the committed steps. All ranks call it at the same step."""
        outer, done = self._outer, self._context.loop.steps_done
        if outer is None:
            return
        due, count = done * self._num_fragments // self._every, self._num_fragments
        is_whole = due // count > self._num_slots // count
        takes = self._take_at is not None and done >= self._take_at
        is_due = done >= self._report_at and not self._is_inside
        if due == self._num_slots and not takes and not is_due and self._reports.num_begun >= self._num_due(done):
            return
        began_s = time.perf_counter()
        with self._context.clock.segment("comm"):
            outer.check_frozen()
            units = self._units() if self._num_slots < due else 0.0
            self._go_on_reporting(done)
            if is_due and (self._streams or not is_whole):
                self._end_report()
            sums_since_s = time.perf_counter()
            while self._num_slots < due:
                index = self._num_slots % count
                self._num_slots += 1
                if not self._streams:
                    outer.synchronise(units)
                    self._clean_at = done
                    continue
                outer.take((index - 1) % count)
                outer.send(index, units)
                self._take_at = -(-self._num_slots * self._every // count) + self._delay if self._delay else None
            if self._take_at is not None and done >= self._take_at:
                outer.take((self._num_slots - 1) % count)
                self._take_at = None
            self._spent_s += time.perf_counter() - sums_since_s
            self._report_wire(outer)
            if is_whole and not self._streams:
                self._end_report()
        self._sync_s += time.perf_counter() - began_s

    def finish(self) -> None:
        """Synchronise everything now, at the end of the run or for a checkpoint. All ranks call it."""
        outer, self.owes_checkpoint = self._outer, False
        if outer is None:
            return
        self._context.control.leave_loops()
        outer.hide()
        self.catch_up()  # a break may have left a body where it was due
        if self._reports.num_begun or self._context.config.local_steps == "auto":
            # Islands may have left a round at different steps, and each is to be as far as the others.
            begun = self._context.control.exchange(Operation.SYNCHRONISE, [self._reports.num_begun])
            if any(row[0] for row in begun):
                self._go_on_reporting(self._report_at)
        if self.is_clean:
            return
        with self._context.clock.segment("comm"):
            outer.synchronise(self._units())
        if not self._is_inside:
            self._clean_at = self._context.loop.steps_done

    def gather(self) -> None:
        """Move to rank 0 what a checkpoint must hold of all islands. All ranks call it, after `finish`."""
        if self._outer is not None:
            self._outer.gather()

    def close(self) -> None:
        if self._outer is not None:
            self._outer.close()

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        context, config = self._context, self._context.config
        by_speed = config.local_steps == "auto"
        if by_speed:
            self._check_schedulers()
        self._outer = OuterState(
            self._models,
            self._link,
            lr=config.outer_lr,
            momentum=config.outer_momentum,
            num_fragments=self._num_fragments,
            wire=self._wire,
        )
        self._outer.load_state_dict(self._loaded)
        self._loaded = {}
        done = context.loop.steps_done
        self._clean_at, self._num_slots = done, done * self._num_fragments // self._every
        planner = self._loaders[0].planner
        is_timed = isinstance(planner, IslandPlanner) and planner.adapts_parts
        self._report_next(done, self._times.gap + LEAD if is_timed else 0)
        self._followed = follow_all(context.registry.values()) if by_speed else []
        if not by_speed and len(self._islands) > 1:
            self._rates = self._find_rates()
        text = describe(config, self._islands, context.registry.values())
        context.recorder.event("islands", text, islands=[list(ranks) for ranks in self._islands.ranks])

    def _find_rates(self) -> LearningRates:
        def steps_models(optimizer: Optimizer) -> bool:
            return any(map(self._context.engine.covers, (p for g in optimizer.param_groups for p in g["params"])))

        if found := self._living(ReduceLROnPlateau):
            gc.collect()  # one that nobody uses any more may be there on some ranks alone
            found = self._living(ReduceLROnPlateau)
        plateaus = [value for value in found if steps_models(value.optimizer)]
        registered = [value for value in self._context.registry.values() if isinstance(value, Optimizer)]
        return LearningRates(registered, plateaus)

    def _check_schedulers(self) -> None:
        if len(self._loaders) > 1:
            raise ConfigError("local_steps='auto' divides the steps of one loader; this script prepared several")
        covers = self._context.engine.covers
        missing = [
            type(value).__name__
            for value in self._living(LRScheduler, besides=self._context.registry.values())
            if any(covers(p) for group in value.optimizer.param_groups for p in group["params"])
        ]
        if missing:
            raise ConfigError(
                f"local_steps='auto': {', '.join(missing)} is not registered, and would follow the steps of one island; pass it "
                "to run.resume, so that it is set to the global step at each synchronisation"
            )

    def _units(self) -> float:
        engine = self._context.engine
        engine.totals.read()
        return engine.totals.used_units

    @property
    def _is_inside(self) -> bool:
        """True if this island is between two of its own batches of a round."""
        step = self._context.loop.step
        ends = step.batch.plan.progress.ends if step is not None and step.stats.calls else self._ends
        return ends is None

    def _settle_body(self) -> None:
        """Synchronise in the loop body what is due at its end, if the optimizer has stepped. All ranks call it."""
        loop = self._context.loop
        if loop.step is not None and loop.step.stats.calls and not loop.step.arm and not loop.is_half_done:
            loop.step.commit()
            self.catch_up()

    def _num_due(self, done: int) -> int:
        """Return how many exchanges of the next report are to be begun after so many steps of the run."""
        return (done >= self._report_at - self._lead) + (done >= self._report_at - self._lead // 2)

    def _go_on_reporting(self, done: int) -> None:
        """Take the next report as far as it is due after so many steps of the run. All ranks do it in the same order."""
        reports, planner = self._reports, self._loaders[0].planner
        if reports.num_begun == 0 < self._num_due(done):
            own_s, self._step_s = blocks_of(self._seconds), sum(self._seconds) / max(len(self._seconds), 1)
            self._seconds = []
            if isinstance(planner, IslandPlanner) and planner.by_speed:
                own_s = [planner.parts.means[self._islands.own] * time_s for time_s in own_s]
            rates = (0.0,) * NUM_VALUES if self._rates is None else self._rates.row()
            row = [self._context.engine.elapsed_s, 0.0, 0.0, 0.0, 0.0, *rates]
            if self._report_at % self._every == 0:
                stops = stop_requested() and self._context.spec.mode == "train"
                row[1:5] = float(stops), float(self._asks), self._loss_sum, self._loss_units
                self._asks, self._loss_sum, self._loss_units = False, 0.0, 0.0
            reports.send_row([*row, *own_s])
        if reports.num_begun == 1 < self._num_due(done):
            reports.wait()
            leaders = [reports.rows[rank] for rank in self._islands.leaders]
            gap, shares = 0, [0] * len(leaders)
            if isinstance(planner, IslandPlanner) and planner.adapts_parts:
                decision = planner.parts.observe([row[-NUM_BLOCKS:] for row in leaders])
                gap = self._times.next_gap(self._step_s, has_moved=decision is not None)
                shares = shares if decision is None else list(decision.shares)
            reports.send_decision([gap, *shares])

    def _end_report(self) -> None:
        """Do what follows from the report that is due: divide the batch anew where that pays, stop, and note the loss."""
        context, loop, reports = self._context, self._context.loop, self._reports
        planner, due = self._loaders[0].planner, self._report_at
        gap, *shares = reports.end()
        self._times.cost_s = min(self._times.cost_s, reports.waited_s)
        if any(shares):
            self._divide(shares)
        self._report_next(due, gap)
        LearningRates.check([row[5 : 5 + NUM_VALUES] for row in reports.rows], self._islands.leaders)
        if due % self._every:
            return
        context.engine.elapsed_s = reports.rows[0][0]
        loop.stop_requested = loop.stop_requested or any(row[1] for row in reports.rows)
        self.owes_checkpoint = any(row[2] for row in reports.rows)
        leaders = [reports.rows[rank] for rank in self._islands.leaders]
        units = sum(row[4] for row in leaders)
        context.recorder.event(
            "synchronised",
            "",
            step=loop.steps_done,
            seconds=self._spent_s,
            num_bytes=0 if self._outer is None else self._outer.num_bytes,
            loss=sum(row[3] for row in leaders) / units if units else None,
            parts=list(planner.parts.means) if isinstance(planner, IslandPlanner) else [],
        )
        self._spent_s = 0.0

    def _report_next(self, done: int, gap: int) -> None:
        """Report at the next synchronisation after `done`, or `gap` steps after it, if that is sooner; 0: times do not count."""
        planner, self._report_at = self._loaders[0].planner, (done // self._every + 1) * self._every
        self._lead = LEAD * (planner.steps_per_batch if isinstance(planner, IslandPlanner) else 1)
        if gap:
            self._times.gap, self._report_at = gap, min(self._report_at, done + gap)
            for loader in self._loaders:
                if isinstance(loader.planner, IslandPlanner):
                    loader.planner.cut_round(done + gap)

    def _report_wire(self, outer: OuterState) -> None:
        """Report once what the format of the wire sends and loses."""
        if self._wire is None or self._reported or (difference := outer.difference) is None:
            return
        self._reported = True
        sent, exact = (sent_bytes(name, outer.payload, len(self._islands)) for name in (self._wire.name, "fp32"))
        self._context.recorder.event(
            "wire",
            f"wire={self._wire.name}: each island sends {sent / 1e6:.3g} MB a synchronisation instead of {exact / 1e6:.3g} MB. "
            f"This pseudo-gradient differs from the exact one by {difference:.1e} (‖Δg‖/‖g‖); what it lacks is added to the "
            "next one",
            format=self._wire.name,
            sent_bytes=sent,
            exact_bytes=exact,
            difference=difference,
        )

    def _divide(self, shares: Sequence[int]) -> None:
        first = self._loaders[0].planner
        before = first.parts.means if isinstance(first, IslandPlanner) else ()
        for loader in self._loaders:
            if isinstance(loader.planner, IslandPlanner):
                loader.planner.set_parts(shares)
        self._seconds = []  # of the division before
        now = first.parts.means if isinstance(first, IslandPlanner) else ()
        if now == before:
            return
        what = "steps of a round" if self._context.config.local_steps == "auto" else "samples of a global batch"
        self._context.recorder.event(
            "islands_divided",
            f"{what} of each island: {_listed(before)} → {_listed(now)}, by measured speed",
            step=self._context.loop.steps_done,
            parts=list(now),
        )


def _listed(parts: Sequence[float]) -> str:
    return ", ".join(f"{part:.4g}" for part in parts)
