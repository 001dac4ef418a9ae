"""The loader that yields global batches, each rank holding its own part."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from evenload.balance.values import StepPlan
from evenload.errors import DataError, StepError
from evenload.training.data import checks, order, randomness
from evenload.training.data.batches import MicroBatch, move
from evenload.training.data.cursor import Cursor
from evenload.training.data.feed import TaskFeed
from evenload.training.data.reading import Task
from evenload.training.data.stream import StreamFeed
from evenload.training.launch.clock import StepClock


class Planner(Protocol):
    """Who computes what: asked by the loader, decided elsewhere."""

    world_size: int
    rank: int

    def plan(self, epoch: int, epoch_step: int, global_step: int, start: int, num_samples: int) -> StepPlan:
        """The plan of a step under the decisions known now; equal on all ranks when the step is executed."""
        ...

    def revision(self) -> int:
        """Grows when a decision changes plans of steps not yet executed."""
        ...

    def agree(self, values: Sequence[int] | None) -> list[int]:
        """Rank 0 gives integers, all ranks get them."""
        ...


class GlobalBatch:
    """One global batch: its plan, and this rank's samples of each micro-batch."""

    def __init__(
        self,
        plan: StepPlan,
        *,
        rank: int,
        global_step: int,
        device: torch.device,
        read: Callable[[int, int], Any],
        recut: Callable[[], None],
    ) -> None:
        """Made by the loader.

        Args:
            plan: who computes which sample.
            rank: this rank.
            global_step: steps committed before this one.
            device: where micro-batches are moved.
            read: gives the collated samples at global positions ``[low, high)``.
            recut: tells the loader that the plan is another one now.
        """
        self.plan = plan
        self.global_step = global_step
        self._rank = rank
        self._device = device
        self._read = read
        self._recut = recut
        self._held: dict[tuple[int, int], Any] = {}

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self.plan.epoch

    @property
    def epoch_step(self) -> int:
        """The step within its epoch, counted from 0."""
        return self.plan.step

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return self.plan.num_samples

    def micro(self, micro_index: int) -> MicroBatch:
        """This rank's part of micro-batch `micro_index`, on its device.

        Read once and kept (on the host) until the step is over, so every call gives the same samples, in containers of
        their own. A rank without samples gets one real sample of the slice, marked idle.
        """
        low, high = self._span(micro_index)
        num_samples = self.plan.micro[micro_index][self._rank]
        if (low, high) not in self._held:
            self._held[low, high] = self._read(low, high)
        return MicroBatch(move(self._held[low, high], self._device), num_samples, idle=num_samples == 0)

    def replan(self, plan: StepPlan) -> None:
        """Cuts the same samples otherwise; what didn't change is kept, the rest is read again.

        Raises:
            StepError: the plan is for other samples.
        """
        if (plan.start, plan.num_samples) != (self.plan.start, self.plan.num_samples):
            raise StepError(
                f"a step that covers samples {self.plan.start} to {self.plan.start + self.plan.num_samples} can't be "
                f"planned anew for {plan.start} to {plan.start + plan.num_samples}"
            )
        self.plan = plan
        spans = set(self.spans())
        self._held = {span: data for span, data in self._held.items() if span in spans}
        self._recut()

    def whole(self, micro_index: int) -> Any:
        """The whole slice of micro-batch `micro_index`, all ranks' samples, collated, on this rank's device."""
        return self.read(*self.plan.slice_of(micro_index))

    def read(self, low: int, high: int) -> Any:
        """The samples at global positions ``[low, high)``, whosever they are, collated, on this rank's device."""
        return move(self._read(low, high), self._device)

    def spans(self) -> list[tuple[int, int]]:
        """The global positions ``[low, high)`` this rank reads for each micro-batch."""
        return [self._span(micro_index) for micro_index in range(self.plan.num_micro)]

    def wanted(self) -> Iterator[tuple[int, int]]:
        """The positions of micro-batches not read yet."""
        return (span for span in self.spans() if span not in self._held)

    def _span(self, micro_index: int) -> tuple[int, int]:
        return read_span(self.plan, micro_index, self._rank)


def read_span(plan: StepPlan, micro_index: int, rank: int) -> tuple[int, int]:
    """The positions a rank reads for a micro-batch; where its share is 0, one sample that stands for none."""
    low, high = plan.slice_of(micro_index, rank)
    if low < high:
        return low, high
    first, end = plan.slice_of(micro_index)
    idle = first if first < end else plan.start  # more micro-batches than samples: this slice is empty
    return idle, idle + 1


class GlobalLoader:
    """Wraps the user's DataLoader; iterating gives one `GlobalBatch` per optimizer step.

    ``batch_size`` is the global batch. Map-style datasets are read by key: the order of samples is a function of
    (seed, epoch), or of the user's sampler drawn once and shared. For iterable datasets see stream.py.

    A loop left by `break` and begun again starts the next epoch, as with a plain DataLoader; until then the cursor
    still stands in the epoch that was left. A loop left before any step was committed (`next(iter(loader))`, to look at
    a batch) has not begun the epoch.

    Args:
        user_loader: the user's.
        planner: says who computes what.
        seed: of the order and of keyed randomness.
        device: where batches go.
        keyed_rng: whether randomness inside the dataset is keyed by (seed, epoch, global position).
        clock: counts the waiting for samples as ``data``.

    Raises:
        ConfigError: not a DataLoader, or a setting of it without effect.
        DataError: it can't be split over ranks.
    """

    def __init__(
        self,
        user_loader: DataLoader[Any],
        planner: Planner,
        *,
        seed: int,
        device: torch.device,
        keyed_rng: bool,
        clock: StepClock,
    ) -> None:
        checks.check_loader(user_loader)
        self.user_loader = user_loader
        self._planner = planner
        self._seed = seed
        self._device = device
        self._clock = clock
        self._generators = randomness.find_generators(checks.samplers_of(user_loader))
        pin = bool(user_loader.pin_memory) and device.type == "cuda"
        self._feed: TaskFeed | StreamFeed
        if checks.is_stream(user_loader):
            self._feed = StreamFeed(user_loader, seed=seed, keyed=keyed_rng, pin=pin)
        else:
            self._feed = TaskFeed(user_loader, seed=seed, rank=planner.rank, keyed=keyed_rng, pin=pin)
        self._cursor = Cursor(seed=seed)
        self._generators_before: tuple[str, ...] | None = None
        self._begun = False
        self._running: weakref.ref[Generator[GlobalBatch, None, None]] | None = None
        self._committed: weakref.ref[GlobalBatch] | None = None

    def __len__(self) -> int:
        """Steps of an epoch, whatever the devices; TypeError where the user's loader has no length."""
        return len(self.user_loader)

    @property
    def epoch(self) -> int:
        """The epoch of the present iteration, or of the next where none is begun."""
        return self._cursor.epoch

    @property
    def batch_size(self) -> int | None:
        """Samples of a global batch; None with a batch_sampler."""
        return self.user_loader.batch_size

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.user_loader.dataset

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Goes through the epoch from where the cursor stands; the next one if an iteration was left before."""
        self._leave()
        if self._begun:
            self._next_epoch()
        steps = self._stream_steps(self._feed) if isinstance(self._feed, StreamFeed) else self._map_steps(self._feed)
        self._running = weakref.ref(steps)
        return steps

    def cursor(self) -> Cursor:
        """Where training stands: after the last committed step."""
        before = self._generators_before
        if before is None:
            before = randomness.save_generators(self._generators)
        return Cursor(**{**vars(self._cursor), "generators": before})

    def commit(self, batch: GlobalBatch) -> None:
        """Counts a step; called once for each, before the next batch is asked for.

        Raises:
            StepError: the batch was committed before, or its epoch is over.
        """
        if batch.epoch != self._cursor.epoch:
            raise StepError(
                f"step {batch.epoch_step} of epoch {batch.epoch} was committed when the loader stood in epoch "
                f"{self._cursor.epoch}; commit a step before the next is asked for"
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
        """Continues at a cursor: the next iteration begins there, in mid-epoch if need be.

        Raises:
            DataError: the cursor can't be continued with this loader.
        """
        if cursor.position > 0 and cursor.seed != self._seed:
            raise DataError(
                f"the checkpoint stands in mid-epoch of an order drawn with seed {cursor.seed}, now the seed is "
                f"{self._seed}: samples would be used twice; set seed={cursor.seed}, or start anew with --fresh"
            )
        if cursor.generators and len(cursor.generators) != len(self._generators):
            raise DataError(
                f"the checkpoint's sampler had {len(cursor.generators)} generators of its own, this one has "
                f"{len(self._generators)}; give the sampler it was made with, or start anew with --fresh"
            )
        self._leave()
        self._begun = False
        self._generators_before = None
        self._cursor = Cursor(**{**vars(cursor), "seed": self._seed})
        if cursor.generators:
            randomness.load_generators(self._generators, cursor.generators)

    def close(self) -> None:
        """Ends all workers, persistent ones too."""
        self._leave()
        self._feed.close()

    def _map_steps(self, feed: TaskFeed) -> Generator[GlobalBatch, None, None]:
        planner, epoch = self._planner, self._cursor.epoch
        drawn = order.draw_order(self.user_loader, seed=self._seed, epoch=epoch, rank=planner.rank, agree=planner.agree)
        self._check_resumed(drawn)
        self._generators_before = drawn.generators_before
        self._move(epoch_samples=drawn.num_samples)

        def task(span: tuple[int, int]) -> Task:
            return Task(epoch, span[0], tuple(drawn.keys(*span)))

        def read(low: int, high: int) -> Any:
            with self._clock.segment("data"):
                return feed.get(task((low, high)))

        def wanted(now: GlobalBatch) -> Iterator[Task]:
            yield from map(task, now.wanted())
            for step in range(now.epoch_step + 1, drawn.num_steps):
                plan = self._plan(step, drawn.bounds[step], drawn.bounds[step + 1], now)
                for micro_index in range(plan.num_micro):
                    yield task(read_span(plan, micro_index, planner.rank))

        def recut() -> None:
            with self._clock.segment("data"):
                feed.read_ahead(epoch, functools.partial(wanted, batch))

        revision: int | None = None
        try:
            for step in range(drawn.step_at(self._cursor.position), drawn.num_steps):
                revised = planner.revision()
                batch = self._batch(self._plan(step, drawn.bounds[step], drawn.bounds[step + 1]), read, recut)
                if revised != revision:
                    revision = revised
                    recut()
                yield batch
            self._next_epoch()
        finally:
            feed.pause()

    def _stream_steps(self, feed: StreamFeed) -> Generator[GlobalBatch, None, None]:
        epoch, position = self._cursor.epoch, self._cursor.position
        try:
            feed.begin(epoch, skip_batches=self._cursor.step, skip_samples=position)
            step = self._cursor.step
            while True:
                with self._clock.segment("data"):
                    samples = feed.next_batch(position)
                with self._clock.segment("wait"):
                    self._check_same_stream(len(samples), step)
                if not len(samples):
                    break

                def read(low: int, high: int, samples: Any = samples) -> Any:
                    with self._clock.segment("data"):
                        return feed.collate(samples.samples(low, high), low)

                plan = self._plan(step, position, position + len(samples))
                yield self._batch(plan, read, lambda: None)
                step, position = step + 1, position + len(samples)
            self._next_epoch()
        finally:
            feed.pause()

    def _plan(self, step: int, low: int, high: int, now: GlobalBatch | None = None) -> StepPlan:
        global_step = self._cursor.global_step if now is None else now.global_step + step - now.epoch_step
        return self._planner.plan(self._cursor.epoch, step, global_step, low, high - low)

    def _batch(self, plan: StepPlan, read: Callable[[int, int], Any], recut: Callable[[], None]) -> GlobalBatch:
        return GlobalBatch(
            plan,
            rank=self._planner.rank,
            global_step=self._cursor.global_step,
            device=self._device,
            read=read,
            recut=recut,
        )

    def _check_same_stream(self, num_samples: int, step: int) -> None:
        """A rank whose stream ends alone would leave the others in a collective for ever."""
        (first,) = self._planner.agree([num_samples] if self._planner.rank == 0 else None)
        if first != num_samples:
            raise DataError(
                f"step {step}: rank {self._planner.rank} read {num_samples} samples where rank 0 read {first}; an "
                f"iterable dataset must give the same samples on every rank: don't shard it by rank (Evenload takes "
                f"each rank's part), and draw its randomness from the global generators"
            )

    def _check_resumed(self, drawn: order.Order) -> None:
        now = self._cursor
        if now.position > 0 and now.epoch_samples not in (-1, drawn.num_samples):
            raise DataError(
                f"the checkpoint stands in mid-epoch of {now.epoch_samples} samples, now the epoch has "
                f"{drawn.num_samples}: the dataset or the sampler changed; give the same data, or start anew with "
                f"--fresh"
            )

    def _next_epoch(self) -> None:
        self._begun = False
        self._generators_before = None
        self._move(epoch=self._cursor.epoch + 1, step=0, position=0, epoch_samples=-1)

    def _move(self, **changes: int) -> None:
        self._cursor = Cursor(**{**vars(self._cursor), **changes})

    def _leave(self) -> None:
        """Ends an iteration that was left by an exception and is still held by its traceback."""
        running = self._running() if self._running is not None else None
        self._running = None
        if running is not None:
            running.close()
