"""Measure ways to share a batch ("arms") against each other in the middle of a user's unchanged script.

After some steps of training the loader yields further steps, in short blocks: with equal shares, with the shares that
Evenload assigned, and with every rank alone on whole global batches, all at the same time. Then the state is restored and
training continues from it.

Note [Blocks]
  All blocks begin in the same state (model, optimizer, everything given to `run.resume`) and at the same position in the
  data, so they compute the same. Their samples are never committed. A block lasts from barrier to barrier. The arms of a
  round run forwards in one round and backwards in the next, which cancels a steady drift.

Note [Solo]
  A rank alone runs whole steps: forward and backward of the full global batch, clipping and optimizer, and no collective.
  It is timed until its own step that ends after the block's length, and continues untimed until all ranks have come that
  far, so that ranks still timed have the same neighbours as before. Ranks do different numbers of steps, so their positions
  in the data diverge; at the end of an epoch a rank repeats the block's first batch.

Note [Read ahead]
  With loader workers, the first batch of a block is read before the clock starts: training would have read it during the
  step before. Without workers, reading is part of the step, as in training.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenload import stored_names
from evenload.errors import ConfigError
from evenload.records import measurement
from evenload.training.checkpoint.host_copy import HostCopy
from evenload.training.checkpoint.registry import OWN_STATE
from evenload.training.comm.control import Operation
from evenload.training.compute import randomness
from evenload.training.data.cursor import Cursor
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.elastic.leaving import ComputingRanks
from evenload.training.step.assignment import ShareAssignment, Shares
from evenload.training.step.context import TrainingContext, device_names
from evenload.training.step.plan_source import FixedProportions
from evenload.training.step.step import Step, StepListener
from evenload.training.step.step_loader import StepLoader

_RECENT_STEPS = 8
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class MeasurementOptions:
    after_steps: int = 24
    """Steps of training before it: the balancer needs about twenty to settle."""
    num_rounds: int = 6
    block_s: float = 4.0
    """Approximate length of a block, which is a whole number of steps."""
    arms: tuple[str, ...] = (measurement.EVEN, measurement.EVENLOAD, measurement.SOLO)


def read_options(raw: Mapping[str, Any]) -> MeasurementOptions:
    """Read `WorkerSpec.options`; ConfigError for an unknown option or arm, or a number out of range."""
    known = MeasurementOptions.__dataclass_fields__
    if unknown := raw.keys() - known.keys():
        raise ConfigError(
            f"measurement: unknown option {', '.join(sorted(unknown))}; the options are {', '.join(known)}"
        )
    options = MeasurementOptions(**{**raw, "arms": tuple(raw.get("arms", MeasurementOptions.arms))})
    if options.after_steps < 1 or options.num_rounds < 1 or not 0 < options.block_s < float("inf"):
        raise ConfigError(
            f"measurement: after_steps={options.after_steps}, num_rounds={options.num_rounds}, block_s={options.block_s}; "
            "expected at least 1 step, at least 1 round, and a length above 0"
        )
    for arm in options.arms:
        if arm not in (measurement.EVEN, measurement.EVENLOAD, measurement.SOLO) and _static_shares(arm) is None:
            raise ConfigError(f"measurement: unknown arm {arm!r}; expected even, evenload, solo, or static:24,8")
    if len(set(options.arms)) != len(options.arms):
        raise ConfigError(f"measurement: an arm is named twice in {', '.join(options.arms)}")
    return options


class Measurement(StepListener):
    def __init__(self, context: TrainingContext, options: MeasurementOptions, ranks: ComputingRanks) -> None:
        """`ranks` lets all ranks compute before the measurement."""
        self._context = context
        self._ranks = ranks
        self._options = options
        self._done = False
        self._ends_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._blocks: list[measurement.TimedBlock] = []
        self._block_steps = 1
        self._record_index = 0
        self._solo_assignments: tuple[ShareAssignment, ...] = ()
        """Holds the caps that a full global batch needs on this rank."""
        self._saved: _SavedRun | None = None

    def on_boundary(self, step: Step) -> None:
        self._ends_s.append(time.perf_counter())

    def is_due(self, num_steps: int) -> bool:
        """Return whether enough steps of training are done; True once."""
        return not self._done and num_steps >= self._options.after_steps

    def extra_steps(self, loader: StepLoader) -> Iterator[Step]:
        """Yield the steps of all rounds; raise ConfigError if the script can't be measured."""
        self._done = True
        self._check(loader)
        context, options = self._context, self._options
        if context.control.exchange(Operation.MEASURE, [float(loader.planner.has_decision)])[0][0]:
            loader.planner.sync_decision(loader.loader.cursor().global_step)
        self._ranks.set_out((), context.loop.steps_done)
        self._record_index = context.loop.steps_done
        self._block_steps = self._agree_steps()
        saved = self._saved = _SavedRun(context, loader)
        context.recorder.event(
            stored_names.MEASUREMENT_BEGIN,
            f"training pauses at step {context.loop.steps_done}: {options.num_rounds} rounds of {', '.join(options.arms)}, "
            f"about {options.block_s:g} s each",
            step=context.loop.steps_done,
        )
        try:
            for round_index in range(options.num_rounds):
                for arm in options.arms[:: 1 if round_index % 2 == 0 else -1]:
                    saved.restore()
                    if arm == measurement.SOLO:
                        yield from self._solo_block(loader, round_index)
                    else:
                        yield from self._shared_block(loader, arm, round_index)
        finally:
            saved.restore()
            self._saved = None
        self._report()

    def _check(self, loader: StepLoader) -> None:
        context, options = self._context, self._options
        if not context.registry.names:
            raise ConfigError(
                "a measurement restores the script's state afterwards: call run.resume(model=model, optimizer=optimizer, "
                "...) before the loop, so that it knows the state"
            )
        for arm in options.arms:
            shares = _static_shares(arm)
            if shares is not None and len(shares) != loader.planner.world_size:
                raise ConfigError(f"measurement: {arm} has {len(shares)} shares for {loader.planner.world_size} ranks")
        if measurement.SOLO in options.arms and isinstance(
            loader.loader.user_loader.dataset, torch.utils.data.IterableDataset
        ):
            raise ConfigError(
                "measurement: solo blocks read the data at each rank's own pace, which needs a map-style dataset"
            )

    def _agree_steps(self) -> int:
        ends = list(self._ends_s)
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        count = round(self._options.block_s / median(lengths)) if lengths else 1
        (steps,) = self._context.control.agree(
            [min(max(1, count), _MOST_STEPS)] if self._context.groups.rank == 0 else None
        )
        return steps

    # -- blocks ---------------------------------------------------------------------------------------------------------

    def _shared_block(self, loader: StepLoader, arm: str, round_index: int) -> Iterator[Step]:
        """Run a block of all ranks together, with the arm's shares."""
        context, planner = self._context, loader.planner
        proportions = (
            planner.shares if arm == measurement.EVENLOAD else _static_shares(arm) or (1,) * planner.world_size
        )
        with planner.override(FixedProportions(proportions)), contextlib.closing(_batches(loader)) as batches:
            batch = _first(loader, batches)
            shares = batch.plan.shares
            self._barrier(loader)
            began_s, num_samples = time.perf_counter(), 0
            for count in range(self._block_steps):
                if count:
                    context.clock.switch("data")
                    batch = next(batches)
                yield from self._step(loader, batch, arm)
                num_samples += batch.num_samples
            self._barrier(loader)
            seconds = time.perf_counter() - began_s
        self._blocks.append(measurement.TimedBlock(arm, round_index, (num_samples,), (seconds,), shares))

    def _solo_block(self, loader: StepLoader, round_index: int) -> Iterator[Step]:
        """Run a block of every rank alone, at the same time; see Note [Solo]."""
        context, planner = self._context, loader.planner
        alone = FixedProportions([int(rank == planner.rank) for rank in range(planner.world_size)])
        with planner.override(alone, self._solo_assignments), contextlib.closing(_batches(loader)) as batches:
            batch = first = _first(loader, batches)
            self._barrier(loader)
            began_s, num_samples, seconds = time.perf_counter(), 0, 0.0
            arrival = None
            # The loader is asked for this epoch's batches only: to begin another may take all ranks.
            num_left = len(loader) - batch.epoch_step - 1
            with context.groups.alone():
                while arrival is None or not arrival.done:
                    yield from self._step(loader, batch, measurement.SOLO)
                    if arrival is None:
                        num_samples += batch.num_samples
                        self._synchronize()
                        seconds = time.perf_counter() - began_s
                        if seconds >= self._options.block_s:
                            arrival = context.groups.arrive()
                    context.clock.switch("data")
                    batch = next(batches) if num_left > 0 else first
                    num_left -= 1
                context.clock.switch("other")
            self._solo_assignments = planner.assignments
        self._barrier(loader)
        rows = context.control.exchange(Operation.MEASURE, [float(num_samples), seconds])
        samples, times = tuple(int(row[0]) for row in rows), tuple(row[1] for row in rows)
        self._blocks.append(measurement.TimedBlock(measurement.SOLO, round_index, samples, times))

    def _step(self, loader: StepLoader, batch: GlobalBatch, arm: str) -> Iterator[Step]:
        loop = self._context.loop
        step = Step(loop, loader.loader, loader.planner, batch, arm=arm, record_index=self._record_index)
        self._record_index += 1
        if self._saved is not None:
            self._saved.rewind_schedules()
        loop.begin(step)
        try:
            yield step
        finally:
            loop.end(step)

    def _barrier(self, loader: StepLoader) -> None:
        self._synchronize()
        self._context.clock.switch("other")
        self._context.control.set_position(loader.loader.epoch, -1)
        self._context.control.barrier(Operation.MEASURE)

    def _synchronize(self) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)

    def _report(self) -> None:
        context = self._context
        own_factor = float(context.spec.throttle.get("factor", 1.0))
        factors = [row[0] for row in context.control.exchange(Operation.MEASURE, [own_factor])]
        if context.groups.rank != 0:
            return  # the others wait for it in the next step; a slowed rank would take longer
        found = measurement.evaluate(self._blocks)
        if found.solo:
            context.recorder.event("solo_speeds", "", speeds_per_s=[speed.value for speed in found.solo])
        table = measurement.format_measurement(found, device_names(context), factors).replace("\n", "\n  ")
        context.recorder.event(
            stored_names.MEASUREMENT,
            f"measured in {found.num_rounds} rounds of short blocks:\n  {table}\n  training goes on",
            step=context.loop.steps_done,
            blocks=measurement.blocks_to_rows(self._blocks),
            throttle=factors,
        )


class _SavedRun:
    """The state of a run between two steps, to be restored any number of times."""

    def __init__(self, context: TrainingContext, loader: StepLoader) -> None:
        context.loop.settle()
        context.engine.forget_times()
        self._context = context
        self._loader = loader
        self._cursor: Cursor = loader.loader.cursor()
        self._steps_done = context.loop.steps_done
        self._generators = randomness.capture(context.device)
        self._engine_state = context.engine.state_dict()
        # In host memory: beside the copies the largest arm must still fit on the device.
        self._precision = HostCopy(context.engine.precision)
        # Evenload's own part of the registry holds what is saved here beside it.
        named = zip(context.registry.names, context.registry.values(), strict=True)
        self._objects = [(value, HostCopy(value)) for name, value in named if name != OWN_STATE]

    def rewind_schedules(self) -> None:
        """Restore the schedulers: some raise when they are stepped past their end."""
        for value, saved in self._objects:
            if isinstance(value, LRScheduler):
                saved.restore()

    def restore(self) -> None:
        context = self._context
        context.loop.settle()  # the last step of a block
        context.engine.forget_times()
        with context.clock.segment("other"):
            for _, saved in self._objects:
                saved.restore()
            self._precision.restore()
            context.engine.load_state_dict(self._engine_state)
            context.loop.steps_done = self._steps_done
            self._loader.loader.load(self._cursor)
            randomness.restore(self._generators, context.device)


def _batches(loader: StepLoader) -> Generator[GlobalBatch, None, None]:
    while True:
        yield from loader.loader


def _first(loader: StepLoader, batches: Iterator[GlobalBatch]) -> GlobalBatch:
    """Return the first batch of a block; see Note [Read ahead]."""
    batch = next(batches)
    if loader.loader.reading.num_workers:
        for index in range(batch.plan.num_micro):
            batch.micro(index)
    return batch


def _static_shares(arm: str) -> Shares | None:
    """Return the shares of ``static:24,8``; None for another arm."""
    parts: Sequence[str] = arm.removeprefix(measurement.STATIC).split(",") if arm.startswith(measurement.STATIC) else ()
    return tuple(map(int, parts)) if parts and all(part.isdecimal() for part in parts) else None
