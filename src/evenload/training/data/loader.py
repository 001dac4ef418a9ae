"""Yield global batches from the user's DataLoader, each rank with its own part."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from evenload.balance.values import StepPlan
from evenload.errors import ConfigError, DataError, StepError
from evenload.training.comm.clock import StepClock
from evenload.training.data import checks, order, randomness
from evenload.training.data.cursor import Cursor
from evenload.training.data.global_batch import CopiedAhead, GlobalBatch
from evenload.training.data.map_reader import MapReader
from evenload.training.data.places import BatchPlace, RoundPlanner
from evenload.training.data.read_ahead import Place, ReadAhead
from evenload.training.data.resumed import check_resumed
from evenload.training.data.step_planner import StepPlanner
from evenload.training.data.stream import StreamBatch, StreamReader, check_same_stream
from evenload.training.data.tuning import ReadSettings, StepCost


class GlobalLoader:
    """Wrap the user's DataLoader, or a tuple of them; iterating yields one `GlobalBatch` per optimizer step.

    ``batch_size`` is the global batch. Map-style datasets are read by key: the order of samples is a function of
    (seed, epoch), or of the user's sampler drawn once and shared. For iterable datasets see stream.py. Where the samples of
    plans and of the cursor are counted, a tuple's count is of units; see map_reader.py.

    A loop that was left by `break` and starts again begins the next epoch, as with a plain DataLoader; until then the
    cursor stays in the epoch that was left. A loop left before any step was committed has not begun the epoch.

    With `most_workers` the number of workers is chosen by measurement, up to this many. `ranks` are those whose parts this
    process reads (all its replicas); the planner's rank by default, and so is `reader_rank`, of which 0 draws the order.
    """

    def __init__(
        self,
        loaders: DataLoader[Any] | tuple[DataLoader[Any], ...],
        planner: StepPlanner,
        *,
        seed: int,
        device: torch.device,
        keyed_rng: bool,
        clock: StepClock,
        most_workers: int | None = None,
        ranks: Sequence[int] | None = None,
        reader_rank: int | None = None,
    ) -> None:
        self.is_joint = isinstance(loaders, tuple)
        """True for a tuple of loaders."""
        self.user_loaders = loaders if isinstance(loaders, tuple) else (loaders,)
        if self.is_joint:
            checks.check_tuple(self.user_loaders)
        else:
            checks.check_loader(loaders)
        self.user_loader = self.user_loaders[0]
        """The one whose epochs count."""
        self._planner = planner
        self.is_tuned = most_workers is not None
        """True if the number of workers is chosen by measurement: `observe` wants the cost of each step."""
        self._ranks = tuple(ranks) if ranks is not None else (planner.rank,)
        self._reader_rank = planner.rank if reader_rank is None else reader_rank
        self._seed = seed
        self._device = device
        self._clock = clock
        self._generators = randomness.find_generators(checks.samplers_of(self.user_loader))
        self._reader: MapReader | StreamReader
        if checks.is_stream(self.user_loader):
            if most_workers is not None:
                raise ConfigError(
                    "num_workers='auto' has no effect on an iterable dataset: its workers decide the order of its samples; "
                    "leave it out, and set DataLoader(num_workers=...)"
                )
            pin = bool(self.user_loader.pin_memory) and device.type == "cuda"
            self._reader = StreamReader(self.user_loader, seed=seed, keyed=keyed_rng, pin=pin)
        else:
            self._reader = MapReader(
                self.user_loaders,
                self.is_joint,
                seed,
                self._reader_rank,
                device,
                keyed=keyed_rng,
                most_workers=most_workers,
            )
        self._cursor = Cursor(seed=seed)
        self._resized: int | None = None
        self._generators_before: tuple[str, ...] | None = None
        self._begun = False
        self.draws_alone = False
        """True in a rank that joins until it has drawn the epoch in progress, which the others have drawn."""
        self._has_compared_stream = False
        self._running: weakref.ref[Generator[GlobalBatch, None, None]] | None = None
        self._committed: weakref.ref[GlobalBatch] | None = None

    def __len__(self) -> int:
        """Raise TypeError where the user's loader has no length."""
        if checks.is_stream(self.user_loader) and not hasattr(self.user_loader.dataset, "__len__"):
            raise TypeError(
                f"len(loader): its dataset, {type(self.user_loader.dataset).__name__}, is iterable and has no __len__, so the "
                "number of steps of an epoch is unknown; add a __len__ (the number of samples), or count by step.index"
            )
        if self._resized is None:
            return len(self.user_loader)
        now, num = self._cursor, self.num_samples or 0
        return len(order.regular_bounds(num, self.user_loader, self._resized, now.step, now.position)) - 1

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def batch_size(self) -> int | tuple[int, ...] | None:
        """Samples of a global batch, of each loader of a tuple; None with a batch_sampler."""
        if self.is_joint:
            return tuple(loader.batch_size or 1 for loader in self.user_loaders)
        return self._resized or self.user_loader.batch_size

    @property
    def unit_name(self) -> str:
        """``samples``, or for a tuple such as ``units of 1 + 7 samples``."""
        if not isinstance(self._reader, MapReader) or not self.is_joint:
            return "samples"
        return f"units of {' + '.join(map(str, self._reader.units))} samples"

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, of the first loader of a tuple."""
        sampler = self.user_loader.sampler
        return len(sampler) if isinstance(sampler, Sized) else None

    def resize(self, batch_size: int) -> None:
        """Change the global batch size of what is left of the epoch, and of later ones; not for streams and batch_samplers."""
        self._resized = batch_size

    @property
    def dataset(self) -> Any:
        if self.is_joint:
            return tuple(loader.dataset for loader in self.user_loaders)
        return self.user_loader.dataset

    def __iter__(self) -> Iterator[GlobalBatch]:
        self._leave()
        if self._begun:
            self._next_epoch()
        reader = self._reader
        steps = self._stream_steps(reader) if isinstance(reader, StreamReader) else self._map_steps(reader)
        self._running = weakref.ref(steps)
        return steps

    def cursor(self) -> Cursor:
        before = self._generators_before or randomness.save_generators(self._generators)
        return Cursor(**{**vars(self._cursor), "generators": before})

    def commit(self, batch: GlobalBatch) -> int:
        """Count a step, once for each and before the next batch is requested, else StepError; return the steps of the job."""
        plan = batch.plan
        if plan.epoch != self._cursor.epoch:
            raise StepError(
                f"step {plan.step} of epoch {plan.epoch} was committed when the loader was in epoch "
                f"{self._cursor.epoch}; commit each step before requesting the next"
            )
        if self._committed is not None and self._committed() is batch:
            raise StepError(f"step {plan.step} of epoch {plan.epoch} was committed twice")
        self._committed = weakref.ref(batch)
        self._begun = True
        if (of := plan.of) is None:
            self._cursor = self._cursor.after(plan.step, plan.start, plan.start + plan.num_samples)
            return 1
        now, num_steps = self._cursor, of.step - self._cursor.step
        totals = {"global_step": now.global_step + num_steps, "samples_total": now.samples_total + of.num_samples}
        self._move(step=of.step, position=of.position, **totals)
        return num_steps

    def follow(self, values: Sequence[int]) -> None:
        """Take the position of rank 0, as its `follow_values`: this rank executed other steps than it (``async``)."""
        self._begun, self._cursor = bool(values[0]), self._cursor.moved_to(values[1:])

    def follow_values(self) -> list[int]:
        return [int(self._begun), *self._cursor.place()]

    def load(self, cursor: Cursor) -> None:
        """Continue at a cursor, in mid-epoch if need be; DataError if it does not fit this loader."""
        if cursor.in_epoch and cursor.seed != self._seed:
            raise DataError(
                f"the checkpoint is in the middle of an epoch whose order was drawn with seed {cursor.seed}, now the seed is "
                f"{self._seed}: samples would be used twice; set seed={cursor.seed}, leave the rest of the epoch out with "
                "--override, or start anew with --fresh"
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

    def set_rank(self, rank: int) -> None:
        """Read as this rank from now on: the plans are those of another generation."""
        self._reader_rank = rank
        if len(self._ranks) == 1:
            self._ranks = (rank,)
        if isinstance(self._reader, MapReader):
            self._reader.follow(rank)

    @property
    def reading(self) -> ReadSettings:
        return self._reader.reading

    def observe(self, cost: StepCost) -> None:
        """Record the cost of the last step; with measured workers the next step may start others."""
        if isinstance(self._reader, MapReader):
            self._reader.observe(cost)

    def close(self) -> None:
        self._leave()
        self._reader.close()

    def _draw(self, reader: MapReader) -> order.SampleOrder:
        """Draw the order of the epoch, or of what a resume has left of it."""
        cursor = self._cursor
        in_epoch = cursor.position + sum(count for _, count in cursor.ahead)
        agree, self.draws_alone = (None if self.draws_alone else self._planner.agree), False
        drawn = reader.begin(cursor.epoch, cursor.samples_total - in_epoch, agree)
        if self._resized is not None:
            drawn = drawn.in_batches_of(self._resized, self.user_loader, cursor.step, cursor.position)
        check_resumed(self._cursor, drawn, self.user_loader, is_joint=self.is_joint)
        self._generators_before = drawn.generators_before
        self._move(epoch_samples=drawn.num_samples, order_key=drawn.key)
        return drawn

    def _map_steps(self, reader: MapReader) -> Generator[GlobalBatch, None, None]:
        planner, cursor = self._planner, self._cursor
        drawn = self._draw(reader)
        begun = drawn.step_at(cursor.position)
        todo: Sequence[int] = range(begun, drawn.num_steps)
        if cursor.ahead:
            todo = [step for step in todo if step not in dict(cursor.ahead)]
        rounds = planner if isinstance(planner, RoundPlanner) and planner.by_speed else None
        before = cursor.global_step - begun  # steps of earlier epochs

        def following(place: Place) -> Iterator[Place]:
            if isinstance(place, int):
                return planner.following(place, todo)
            return itertools.islice(cast(RoundPlanner, rounds).places_from(place, before, drawn.num_steps), 1, None)

        def plan_of(place: Place, now: GlobalBatch | None = None) -> StepPlan:
            if isinstance(place, BatchPlace):
                return cast(RoundPlanner, rounds).plan_at(place, cursor.epoch, drawn.bounds)
            return self._plan(place, drawn.bounds[place], drawn.bounds[place + 1], now)

        ahead = ReadAhead(reader, self._clock, self._device, lambda: self._ranks, following, plan_of)
        copies = self._device.type != "cpu" and len(self._ranks) == 1  # replica threads would read at the same time
        may_repeat = not (copies or self.is_tuned or cursor.ahead) and rounds is None
        copy_next = ahead.copy_next if copies else lambda: None
        revision: int | None = None
        try:
            places: Iterator[Place] = iter(
                planner.steps(todo) if rounds is None else rounds.places(begun, cursor.global_step, drawn.num_steps)
            )
            while True:
                at = self._cursor
                within = 0 < at.position < at.epoch_samples
                if within and (size := planner.next_batch_size(at.global_step)) is not None:
                    self.resize(size)
                    drawn = drawn.in_batches_of(size, self.user_loader, at.step, at.position)
                    self._move(epoch_samples=drawn.num_samples)
                    todo, ahead.copied = range(at.step, drawn.num_steps), None
                    places = iter(planner.steps(todo))
                if (given := next(places, None)) is None:
                    break
                place = given
                if not planner.in_order:
                    self._ranks = (planner.rank,)  # ranks may have been counted anew
                changed = reader.apply_tuned_settings()
                revised = planner.revision()
                plan = plan_of(place)
                number = place.number if isinstance(place, BatchPlace) else None
                batch = self._batch(plan, ahead.read, ahead.replan, ahead.copied, copy_next, number)
                ahead.batch, ahead.place, ahead.copied = batch, place, None
                if changed or revised != revision:
                    revision = revised
                    ahead.replan()
                yield batch
                if (
                    may_repeat
                    and isinstance(drawn.bounds, order.RegularBounds)
                    and planner.repeats_plans(batch.global_step)
                ):
                    ends_at = drawn.bounds[-1]
                    while plan.start + 2 * plan.num_samples <= ends_at and planner.revision() == revision:
                        place, plan = next(places), plan.following()
                        batch = batch.following(plan, self._cursor.global_step)
                        ahead.batch, ahead.place = batch, place
                        yield batch
            self._next_epoch()
        finally:
            reader.pause()

    def _stream_steps(self, reader: StreamReader) -> Generator[GlobalBatch, None, None]:
        epoch, position = self._cursor.epoch, self._cursor.position
        try:
            step = begun = self._cursor.step

            def read_first(position: int = position) -> StreamBatch:
                reader.begin(epoch, skip_batches=begun, skip_samples=position)
                return reader.next_batch(position)

            again = None if self._has_compared_stream else read_first
            next_batch: Callable[[int], StreamBatch] = read_first
            while True:
                with self._clock.reading(), self._clock.segment("data"):
                    own = next_batch(position)
                    with self._clock.segment("wait"):
                        samples = check_same_stream(self._planner.agree, self._reader_rank, own, f"step {step}", again)
                again, self._has_compared_stream = None, True
                if not len(samples):
                    break

                def read(low: int, high: int, samples: Any = samples) -> Any:
                    with self._clock.segment("data"):
                        return reader.collate(samples.samples(low, high), low)

                plan = self._plan(step, position, position + len(samples))
                yield self._batch(plan, read, lambda: None)
                step, position, next_batch = step + 1, position + len(samples), reader.next_batch
            self._next_epoch()
        finally:
            reader.pause()

    def _plan(self, step: int, low: int, high: int, now: GlobalBatch | None = None) -> StepPlan:
        if now is not None:
            global_step = now.global_step + step - now.epoch_step
        else:
            global_step = self._cursor.global_step if self._planner.in_order else self._global_step(step)
        return self._planner.plan(self._cursor.epoch, step, global_step, low, high - low)

    def _global_step(self, step: int) -> int:
        return self._planner.global_step(step, self._cursor.global_step)

    def _batch(
        self,
        plan: StepPlan,
        read: Callable[[int, int], Any],
        on_replan: Callable[[], None],
        first: CopiedAhead | None = None,
        copy_next: Callable[[], None] = lambda: None,
        number: int | None = None,
    ) -> GlobalBatch:
        if number is None:
            number = self._cursor.global_step if self._planner.in_order else self._global_step(plan.step)
        return GlobalBatch(
            plan,
            ranks=self._ranks,
            global_step=number,
            device=self._device,
            read=read,
            on_replan=on_replan,
            reading=self._reader.reading,
            first=first,
            copy_next=copy_next,
        )

    def _next_epoch(self) -> None:
        self._begun = False
        self._generators_before = None
        self._move(epoch=self._cursor.epoch + 1, step=0, position=0, epoch_samples=-1, order_key=-1)
        self._resized = self._planner.next_batch_size(None) or self._resized

    def _move(self, **changes: int) -> None:
        self._cursor = Cursor(**{**vars(self._cursor), **changes})

    def _leave(self) -> None:
        """End an iteration that was left by an exception and is still referenced by its traceback."""
        running, self._running = self._running, None
        if running is not None and (steps := running()) is not None:
            steps.close()
