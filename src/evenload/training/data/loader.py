"""Yield global batches from the user's DataLoader, each rank with its own part."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from evenload.balance.values import StepPlan
from evenload.errors import ConfigError, DataError, StepError
from evenload.training.comm.clock import StepClock
from evenload.training.data import checks, order, randomness
from evenload.training.data.batches import transfer_seconds
from evenload.training.data.cursor import Cursor
from evenload.training.data.global_batch import GlobalBatch, spans_of
from evenload.training.data.prefetch import Prefetcher
from evenload.training.data.reading import ReadTask, read_settings
from evenload.training.data.stream import StreamReader, check_same_stream
from evenload.training.data.tuning import PINNING_PAYS, ReadSettings, StepCost, WorkerTuner


class StepPlanner(Protocol):
    world_size: int
    rank: int

    def plan(self, epoch: int, epoch_step: int, global_step: int, start: int, num_samples: int) -> StepPlan:
        """Return the plan of a step under the decisions known now; equal on all ranks when the step is executed."""

    def revision(self) -> int:
        """Return a number that grows when a decision changes plans of steps not yet executed."""

    def next_batch_size(self) -> int | None:
        """Return the global batch of the next epoch; None keeps it. All ranks call it between two epochs."""

    def agree(self, values: Sequence[int] | None) -> list[int]:
        """Broadcast rank 0's integers to all ranks."""


class GlobalLoader:
    """Wrap the user's DataLoader; iterating yields one `GlobalBatch` per optimizer step.

    ``batch_size`` is the global batch. Map-style datasets are read by key: the order of samples is a function of
    (seed, epoch), or of the user's sampler drawn once and shared. For iterable datasets see stream.py.

    A loop that was left by `break` and starts again begins the next epoch, as with a plain DataLoader; until then the
    cursor stays in the epoch that was left. A loop left before any step was committed has not begun the epoch.

    With `most_workers` the number of workers is chosen by measurement, up to this many. `ranks` are those whose parts this
    process reads (all its replicas); the planner's rank by default.
    """

    def __init__(
        self,
        user_loader: DataLoader[Any],
        planner: StepPlanner,
        *,
        seed: int,
        device: torch.device,
        keyed_rng: bool,
        clock: StepClock,
        most_workers: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        checks.check_loader(user_loader)
        self.user_loader = user_loader
        self._planner = planner
        self._ranks = tuple(ranks) if ranks is not None else (planner.rank,)
        self._seed = seed
        self._device = device
        self._clock = clock
        self._generators = randomness.find_generators(checks.samplers_of(user_loader))
        pin = bool(user_loader.pin_memory) and device.type == "cuda"
        self._tuner: WorkerTuner | None = None
        self._measures_pinning = False
        self._reader: Prefetcher | StreamReader
        if checks.is_stream(user_loader):
            if most_workers is not None:
                raise ConfigError(
                    "num_workers='auto' has no effect on an iterable dataset: its workers decide the order of its samples; "
                    "leave it out, and set DataLoader(num_workers=...)"
                )
            self._reader = StreamReader(user_loader, seed=seed, keyed=keyed_rng, pin=pin)
        else:
            reading = read_settings(user_loader, pinned=pin)
            self._tuner = None if most_workers is None else WorkerTuner(reading, most_workers, planner.rank)
            self._measures_pinning = self._tuner is not None and device.type == "cuda" and not pin
            first = reading if self._tuner is None else self._tuner.reading
            self._reader = Prefetcher(user_loader, seed=seed, rank=planner.rank, keyed=keyed_rng, reading=first)
        self._cursor = Cursor(seed=seed)
        self._resized: int | None = None
        self._generators_before: tuple[str, ...] | None = None
        self._begun = False
        self._running: weakref.ref[Generator[GlobalBatch, None, None]] | None = None
        self._committed: weakref.ref[GlobalBatch] | None = None

    def __len__(self) -> int:
        """Raise TypeError where the user's loader has no length."""
        return len(self.user_loader) if self._resized is None else self.num_steps(self._resized) or 0

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def batch_size(self) -> int | None:
        """Samples of a global batch; None with a batch_sampler."""
        return self._resized or self.user_loader.batch_size

    @property
    def num_samples(self) -> int | None:
        sampler = self.user_loader.sampler
        return len(sampler) if isinstance(sampler, Sized) else None

    def num_steps(self, batch_size: int) -> int | None:
        if self.num_samples is None:
            return None
        return len(order.regular_bounds(self.num_samples, self.user_loader, batch_size)) - 1

    def resize(self, batch_size: int) -> None:
        """Change the global batch size from the next drawn epoch on; not for streams and batch_samplers."""
        self._resized = batch_size

    @property
    def dataset(self) -> Any:
        return self.user_loader.dataset

    def __iter__(self) -> Iterator[GlobalBatch]:
        self._leave()
        if self._begun:
            self._next_epoch()
        steps = (
            self._stream_steps(self._reader)
            if isinstance(self._reader, StreamReader)
            else self._map_steps(self._reader)
        )
        self._running = weakref.ref(steps)
        return steps

    def cursor(self) -> Cursor:
        before = self._generators_before
        if before is None:
            before = randomness.save_generators(self._generators)
        return Cursor(**{**vars(self._cursor), "generators": before})

    def commit(self, batch: GlobalBatch) -> None:
        """Count a step, once for each and before the next batch is requested; else StepError."""
        if batch.epoch != self._cursor.epoch:
            raise StepError(
                f"step {batch.epoch_step} of epoch {batch.epoch} was committed when the loader was in epoch "
                f"{self._cursor.epoch}; commit each step before requesting the next"
            )
        if self._committed is not None and self._committed() is batch:
            raise StepError(f"step {batch.epoch_step} of epoch {batch.epoch} was committed twice")
        self._committed = weakref.ref(batch)
        self._begun = True
        now = self._cursor
        self._move(
            step=batch.epoch_step + 1,
            position=batch.plan.start + batch.num_samples,
            global_step=now.global_step + 1,
            samples_total=now.samples_total + batch.num_samples,
        )

    def load(self, cursor: Cursor) -> None:
        """Continue at a cursor, in mid-epoch if need be; DataError if it does not fit this loader."""
        if cursor.position > 0 and cursor.seed != self._seed:
            raise DataError(
                f"the checkpoint is in the middle of an epoch whose order was drawn with seed {cursor.seed}, now the seed is "
                f"{self._seed}: samples would be used twice; set seed={cursor.seed}, or start anew with --fresh"
            )
        if cursor.generators and len(cursor.generators) != len(self._generators):
            raise DataError(
                f"the checkpoint's sampler had {len(cursor.generators)} generators of its own, this one has "
                f"{len(self._generators)}; use the sampler that it was written with, or start anew with --fresh"
            )
        self._leave()
        self._begun = False
        self._generators_before = None
        self._cursor = Cursor(**{**vars(cursor), "seed": self._seed})
        if cursor.generators:
            randomness.load_generators(self._generators, cursor.generators)

    @property
    def reading(self) -> ReadSettings:
        return self._reader.reading

    def observe(self, cost: StepCost) -> None:
        """Record the cost of the last step; with measured workers the next step may start others."""
        if self._tuner is not None:
            self._tuner.observe(cost)

    def close(self) -> None:
        self._leave()
        self._reader.close()

    def _map_steps(self, reader: Prefetcher) -> Generator[GlobalBatch, None, None]:
        planner, epoch = self._planner, self._cursor.epoch
        drawn = order.draw_order(
            self.user_loader,
            seed=self._seed,
            epoch=epoch,
            rank=planner.rank,
            agree=planner.agree,
            batch_size=self._resized,
        )
        self._check_resumed(drawn)
        self._generators_before = drawn.generators_before
        self._move(epoch_samples=drawn.num_samples, order_key=drawn.key)

        def task(span: tuple[int, int]) -> ReadTask:
            return ReadTask(epoch, span[0], tuple(drawn.keys(*span)))

        def read(low: int, high: int) -> Any:
            with self._clock.segment("data"):
                data = reader.get(task((low, high)))
            if self._measures_pinning:
                self._measure_pinning(data)
            return data

        def wanted(now: GlobalBatch) -> Iterator[ReadTask]:
            yield from map(task, now.unread_spans())
            for step in range(now.epoch_step + 1, drawn.num_steps):
                plan = self._plan(step, drawn.bounds[step], drawn.bounds[step + 1], now)
                yield from map(task, spans_of(plan, self._ranks))

        def on_replan() -> None:
            with self._clock.segment("data"):
                reader.read_ahead(epoch, functools.partial(wanted, batch))

        revision: int | None = None
        try:
            for step in range(drawn.step_at(self._cursor.position), drawn.num_steps):
                changed = self._apply_tuned_settings(reader)
                revised = planner.revision()
                batch = self._batch(self._plan(step, drawn.bounds[step], drawn.bounds[step + 1]), read, on_replan)
                if changed or revised != revision:
                    revision = revised
                    on_replan()
                yield batch
            self._next_epoch()
        finally:
            reader.pause()

    def _measure_pinning(self, data: Any) -> None:
        """Pin memory from now on if that speeds up the copy to the GPU; measured once."""
        self._measures_pinning = False
        with contextlib.suppress(RuntimeError):  # the samples are on a GPU already
            usual_s, pinned_s = transfer_seconds(data, self._device)
            if self._tuner is not None and pinned_s < PINNING_PAYS * usual_s:
                self._tuner.pin()

    def _apply_tuned_settings(self, reader: Prefetcher) -> bool:
        if self._tuner is None:
            return False
        if reader.workers_failed:
            self._tuner.disable_workers()
        return reader.change(self._tuner.reading)

    def _stream_steps(self, reader: StreamReader) -> Generator[GlobalBatch, None, None]:
        epoch, position = self._cursor.epoch, self._cursor.position
        try:
            reader.begin(epoch, skip_batches=self._cursor.step, skip_samples=position)
            step = self._cursor.step
            while True:
                with self._clock.segment("data"):
                    samples = reader.next_batch(position)
                with self._clock.segment("wait"):
                    check_same_stream(self._planner.agree, self._planner.rank, len(samples), f"step {step}")
                if not len(samples):
                    break

                def read(low: int, high: int, samples: Any = samples) -> Any:
                    with self._clock.segment("data"):
                        return reader.collate(samples.samples(low, high), low)

                plan = self._plan(step, position, position + len(samples))
                yield self._batch(plan, read, lambda: None)
                step, position = step + 1, position + len(samples)
            self._next_epoch()
        finally:
            reader.pause()

    def _plan(self, step: int, low: int, high: int, now: GlobalBatch | None = None) -> StepPlan:
        global_step = self._cursor.global_step if now is None else now.global_step + step - now.epoch_step
        return self._planner.plan(self._cursor.epoch, step, global_step, low, high - low)

    def _batch(self, plan: StepPlan, read: Callable[[int, int], Any], on_replan: Callable[[], None]) -> GlobalBatch:
        return GlobalBatch(
            plan,
            ranks=self._ranks,
            global_step=self._cursor.global_step,
            device=self._device,
            read=read,
            on_replan=on_replan,
            reading=self._reader.reading,
        )

    def _check_resumed(self, drawn: order.SampleOrder) -> None:
        now = self._cursor
        if now.position > 0 and now.epoch_samples not in (-1, drawn.num_samples):
            raise DataError(
                f"the checkpoint is in the middle of an epoch of {now.epoch_samples} samples, now the epoch has "
                f"{drawn.num_samples}: the dataset or the sampler changed; use the same data, or start anew with "
                f"--fresh"
            )
        if now.position > 0 and now.order_key not in (-1, drawn.key):
            raise DataError(
                "the checkpoint is in the middle of an epoch, and the sampler now draws a different order: samples would be "
                "used twice or left out. The sampler has a state that a resume can't restore; let it draw from torch's, Python's "
                "or numpy's global generators, from a generator that it holds, or by set_epoch; or start anew with --fresh"
            )

    def _next_epoch(self) -> None:
        self._begun = False
        self._generators_before = None
        self._move(epoch=self._cursor.epoch + 1, step=0, position=0, epoch_samples=-1, order_key=-1)
        if (batch_size := self._planner.next_batch_size()) is not None:
            self.resize(batch_size)

    def _move(self, **changes: int) -> None:
        self._cursor = Cursor(**{**vars(self._cursor), **changes})

    def _leave(self) -> None:
        """End an iteration that was left by an exception and is still referenced by its traceback."""
        running = self._running() if self._running is not None else None
        self._running = None
        if running is not None:
            running.close()
