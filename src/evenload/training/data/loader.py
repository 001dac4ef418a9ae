"""The loader that yields global batches, each rank holding its own part."""

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
from evenload.training.data.feed import TaskFeed
from evenload.training.data.global_batch import GlobalBatch, spans_of
from evenload.training.data.reading import Task, reading_of
from evenload.training.data.stream import StreamFeed
from evenload.training.data.tuning import PINNING_PAYS, Reading, StepCost, Tuner


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
        most_workers: with a number, the loader's workers are chosen by measurement, at most so many.
        ranks: whose parts this process reads: those of all its replicas; without it, of the rank that the planner names.

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
        self._tuner: Tuner | None = None
        self._weighs_pinning = False
        self._feed: TaskFeed | StreamFeed
        if checks.is_stream(user_loader):
            if most_workers is not None:
                raise ConfigError(
                    "num_workers='auto' has no effect on an iterable dataset: its workers decide the order of its samples; "
                    "leave it out, and set DataLoader(num_workers=...)"
                )
            self._feed = StreamFeed(user_loader, seed=seed, keyed=keyed_rng, pin=pin)
        else:
            reading = reading_of(user_loader, pinned=pin)
            self._tuner = None if most_workers is None else Tuner(reading, most_workers, planner.rank)
            self._weighs_pinning = self._tuner is not None and device.type == "cuda" and not pin
            first = reading if self._tuner is None else self._tuner.reading
            self._feed = TaskFeed(user_loader, seed=seed, rank=planner.rank, keyed=keyed_rng, reading=first)
        self._cursor = Cursor(seed=seed)
        self._resized: int | None = None
        self.choose: Callable[[], int] | None = None
        """Asked by all ranks between two epochs for the global batch of the next; None: it stays the user's."""
        self._generators_before: tuple[str, ...] | None = None
        self._begun = False
        self._running: weakref.ref[Generator[GlobalBatch, None, None]] | None = None
        self._committed: weakref.ref[GlobalBatch] | None = None

    def __len__(self) -> int:
        """Steps of an epoch, whatever the devices; TypeError where the user's loader has no length."""
        return len(self.user_loader) if self._resized is None else self.num_steps(self._resized) or 0

    @property
    def epoch(self) -> int:
        """The epoch of the present iteration, or of the next where none is begun."""
        return self._cursor.epoch

    @property
    def batch_size(self) -> int | None:
        """Samples of a global batch; None with a batch_sampler."""
        return self._resized or self.user_loader.batch_size

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None where the sampler has no length."""
        sampler = self.user_loader.sampler
        return len(sampler) if isinstance(sampler, Sized) else None

    def num_steps(self, batch_size: int) -> int | None:
        """Steps of an epoch in batches of `batch_size`; None where the sampler has no length."""
        if self.num_samples is None:
            return None
        return len(order.regular_bounds(self.num_samples, self.user_loader, batch_size)) - 1

    def resize(self, batch_size: int) -> None:
        """Another global batch, from the epoch on that is drawn next; not for streams and batch_samplers."""
        self._resized = batch_size

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

    @property
    def reading(self) -> Reading:
        """How this rank reads its samples now."""
        return self._feed.reading

    def observe(self, cost: StepCost) -> None:
        """What the last step cost; where workers are chosen by measurement, the next step may begin with others."""
        if self._tuner is not None:
            self._tuner.observe(cost)

    def close(self) -> None:
        """Ends all workers, persistent ones too."""
        self._leave()
        self._feed.close()

    def _map_steps(self, feed: TaskFeed) -> Generator[GlobalBatch, None, None]:
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

        def task(span: tuple[int, int]) -> Task:
            return Task(epoch, span[0], tuple(drawn.keys(*span)))

        def read(low: int, high: int) -> Any:
            with self._clock.segment("data"):
                data = feed.get(task((low, high)))
            if self._weighs_pinning:
                self._weigh_pinning(data)
            return data

        def wanted(now: GlobalBatch) -> Iterator[Task]:
            yield from map(task, now.wanted())
            for step in range(now.epoch_step + 1, drawn.num_steps):
                plan = self._plan(step, drawn.bounds[step], drawn.bounds[step + 1], now)
                yield from map(task, spans_of(plan, self._ranks))

        def recut() -> None:
            with self._clock.segment("data"):
                feed.read_ahead(epoch, functools.partial(wanted, batch))

        revision: int | None = None
        try:
            for step in range(drawn.step_at(self._cursor.position), drawn.num_steps):
                changed = self._follow_tuner(feed)
                revised = planner.revision()
                batch = self._batch(self._plan(step, drawn.bounds[step], drawn.bounds[step + 1]), read, recut)
                if changed or revised != revision:
                    revision = revised
                    recut()
                yield batch
            self._next_epoch()
        finally:
            feed.pause()

    def _weigh_pinning(self, data: Any) -> None:
        """Once, where workers are chosen by measurement: whether pinned memory brings samples to the GPU sooner."""
        self._weighs_pinning = False
        with contextlib.suppress(RuntimeError):  # they lie on a GPU already
            usual_s, pinned_s = transfer_seconds(data, self._device)
            if self._tuner is not None and pinned_s < PINNING_PAYS * usual_s:
                self._tuner.pin()

    def _follow_tuner(self, feed: TaskFeed) -> bool:
        if self._tuner is None:
            return False
        if feed.refused:
            self._tuner.refuse()
        return feed.change(self._tuner.reading)

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
            ranks=self._ranks,
            global_step=self._cursor.global_step,
            device=self._device,
            read=read,
            recut=recut,
            reading=self._feed.reading,
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
        if now.position > 0 and now.order_key not in (-1, drawn.key):
            raise DataError(
                "the checkpoint stands in mid-epoch, and the sampler now draws another order than it did then: samples would be "
                "used twice or left out. It keeps a state that a resume can't restore; let it draw from torch's, Python's or "
                "numpy's global generators, from a generator that it holds, or by set_epoch; or start anew with --fresh"
            )

    def _next_epoch(self) -> None:
        self._begun = False
        self._generators_before = None
        self._move(epoch=self._cursor.epoch + 1, step=0, position=0, epoch_samples=-1, order_key=-1)
        if self.choose is not None:
            self.resize(self.choose())

    def _move(self, **changes: int) -> None:
        self._cursor = Cursor(**{**vars(self._cursor), **changes})

    def _leave(self) -> None:
        """Ends an iteration that was left by an exception and is still held by its traceback."""
        running = self._running() if self._running is not None else None
        self._running = None
        if running is not None:
            running.close()
