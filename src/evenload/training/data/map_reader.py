"""Read the samples of map-style DataLoaders: of one, or of several side by side in units.

Note [Units]
  Loaders with global batches B_0, B_1, ... make one loader whose step has g = gcd(B_0, B_1, ...) units; a unit holds B_i / g
  samples of loader i. Plans, shares, micro-batches and the cursor count units, so any part of a step holds the loaders'
  samples in the same proportion, and the mean over a part, weighted by its units, is exact for every loader.

  The epoch is that of the first loader. Each of the others restarts when it ends: the whole batches of its epochs follow one
  another without end. Its position is the number of units committed since training began, times its samples of a unit, so the
  cursor holds it already. Positions of a sample, which key its randomness, run on through its loader's epochs.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenload.errors import DataError
from evenload.training.data import checks, order, randomness
from evenload.training.data.batches import transfer_seconds
from evenload.training.data.prefetch import Prefetcher, Span
from evenload.training.data.reading import PartialRead, ReadTask, read_settings
from evenload.training.data.tuning import PINNING_PAYS, ReadSettings, StepCost, WorkerTuner

_MOST_HELD = 2
"""Epochs of a restarting loader whose orders are held: the one that is read, and the next."""


class RestartingOrder:
    """The whole batches of a loader's epochs, one epoch after another. Every epoch's order is a function of (seed, epoch)."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._own = randomness.find_generators(checks.samplers_of(loader))
        self._own_key = zlib.crc32("".join(randomness.save_generators(self._own)).encode())
        self._is_shared = not order.is_function_of_seed(loader)
        self._orders: dict[int, order.SampleOrder] = {}
        size = loader.batch_size or 1
        self.num_samples = len(loader.sampler) // size * size  # type: ignore[arg-type]
        """Samples of each epoch."""

    def draw(self, low: int, high: int, rank: int, agree: order.BroadcastIntegers) -> list[int]:
        """Draw what the positions ``[low, high)`` need from the user's sampler, and return its checksums; a collective call."""
        if not self._is_shared:
            return []
        epochs = range(low // self.num_samples, -(-high // self.num_samples))
        self._orders = {
            epoch: self._orders[epoch] if epoch in self._orders else self._draw_epoch(epoch, rank, agree)
            for epoch in epochs
        }
        return [self._orders[epoch].key for epoch in epochs]

    def keys(self, low: int, high: int) -> list[Any]:
        found: list[Any] = []
        while low < high:
            epoch, first = divmod(low, self.num_samples)
            last = min(first + high - low, self.num_samples)
            found += self._order_of(epoch).keys(first, last)
            low += last - first
        return found

    def _order_of(self, epoch: int) -> order.SampleOrder:
        if epoch not in self._orders:
            self._orders[epoch] = self._draw_epoch(epoch, 0, _keep)
            for past in sorted(self._orders)[:-_MOST_HELD]:
                if past != epoch:
                    del self._orders[past]
        return self._orders[epoch]

    def _draw_epoch(self, epoch: int, rank: int, agree: order.BroadcastIntegers) -> order.SampleOrder:
        drawn = order.draw_order(
            self._loader, seed=self._seed, epoch=epoch, rank=rank, agree=agree, own_key=self._own_key
        )
        if len(drawn.source) < self.num_samples:
            raise DataError(
                f"{type(self._loader.sampler).__qualname__} yielded {len(drawn.source)} keys in epoch {epoch} of its loader, and "
                f"its length is {len(self._loader.sampler)}: a loader that restarts needs equal epochs"  # type: ignore[arg-type]
            )
        return drawn


def _keep(values: Sequence[int] | None) -> list[int]:
    """Agree with no other rank."""
    return list(values or ())


@dataclass
class _Source:
    """One loader, and what is read of it."""

    loader: DataLoader[Any]
    seed: int
    unit: int
    """Samples of a unit."""
    prefetcher: Prefetcher
    restarting: RestartingOrder | None = None
    """Of the loaders after the first."""
    epoch: int = 0
    first_unit: int = 0
    """Units before this epoch of the first loader, where this one goes on."""
    keys: Callable[[int, int], list[Any]] = lambda low, high: []
    index: Callable[[int, int], torch.Tensor | None] = lambda low, high: None
    """The same keys as a tensor, if they are one."""

    def get(self, span: Span) -> Any:
        """Return the collated samples at these positions."""
        if (rows := self.prefetcher.rows) is not None and (index := self.index(*span)) is not None:
            return rows(index)
        return self.prefetcher.get(self.task(span))

    def task(self, span: Span) -> ReadTask:
        low, high = (self.first_unit + span[0]) * self.unit, (self.first_unit + span[1]) * self.unit
        return ReadTask(self.epoch, low, tuple(self.keys(low, high)))


class MapReader:
    """Reads spans of positions, in samples of one loader or in units of several; see Note [Units].

    With `most_workers` the number of workers is chosen by measurement, up to this many, the same for each loader.
    """

    def __init__(
        self,
        loaders: Sequence[DataLoader[Any]],
        is_joint: bool,
        seed: int,
        rank: int,
        device: torch.device,
        *,
        keyed: bool,
        most_workers: int | None,
    ) -> None:
        self._is_joint = is_joint
        self._rank = rank
        self._device = device
        self.num_units = math.gcd(*(loader.batch_size or 1 for loader in loaders)) if is_joint else 0
        """Units of a whole step; 0 for one loader, which is read in samples."""
        pins = [bool(loader.pin_memory) and device.type == "cuda" for loader in loaders]
        readings = [read_settings(loader, pinned=pin) for loader, pin in zip(loaders, pins, strict=True)]
        self._tuner: WorkerTuner | None = None
        if most_workers is not None:
            self._tuner = WorkerTuner(readings[0], max(1, most_workers // len(loaders)), rank)
            readings = [self._tuner.reading] * len(loaders)
        self._measures_pinning = self._tuner is not None and device.type == "cuda" and not pins[0]
        self._sources = []
        for index, (loader, reading) in enumerate(zip(loaders, readings, strict=True)):
            own_seed = randomness.mix(seed, index, randomness.JOINT) if index else seed
            self._sources.append(
                _Source(
                    loader,
                    own_seed,
                    (loader.batch_size or 1) // self.num_units if is_joint else 1,
                    Prefetcher(loader, seed=own_seed, rank=rank, keyed=keyed, reading=reading),
                    RestartingOrder(loader, own_seed) if index else None,
                )
            )

    @property
    def units(self) -> tuple[int, ...]:
        """Samples of each loader in a unit."""
        return tuple(source.unit for source in self._sources)

    @property
    def reading(self) -> ReadSettings:
        """The settings of the loader with the most workers."""
        if len(self._sources) == 1:
            return self._sources[0].prefetcher.reading
        return max((source.prefetcher.reading for source in self._sources), key=lambda reading: reading.num_workers)

    def begin(self, epoch: int, units_before: int, agree: order.BroadcastIntegers | None) -> order.SampleOrder:
        """Draw an epoch of the first loader, after `units_before` of earlier epochs; its bounds count units.

        Collective; without `agree` this rank draws alone, as rank 0 did.
        """
        first, *others = self._sources
        rank, agree = (0, _keep) if agree is None else (self._rank, agree)
        drawn = order.draw_order(first.loader, seed=first.seed, epoch=epoch, rank=rank, agree=agree)
        first.epoch, first.keys = epoch, drawn.keys
        if not self._is_joint:
            first.index = drawn.index
            return drawn
        checks.check_whole_units(drawn.num_samples, self.units)
        num_units = drawn.num_samples // first.unit
        found = [drawn.key]
        for source in others:
            if (restarting := source.restarting) is not None:
                source.first_unit, source.keys = units_before, restarting.keys
                low, high = (end * source.unit for end in (units_before, units_before + num_units))
                found += [source.unit, restarting.num_samples, *restarting.draw(low, high, rank, agree)]
        return replace(
            drawn, bounds=order.RegularBounds(num_units, self.num_units), key=zlib.crc32(repr(found).encode())
        )

    def follow(self, rank: int) -> None:
        """Continue as another rank."""
        self._rank = rank
        if self._tuner is not None:
            self._tuner.follow(rank)

    @property
    def span_reader(self) -> Callable[[Span], Any]:
        """Returns what `get` does, until the settings are tuned."""
        return self.get if self._is_joint or self._tuner is not None else self._sources[0].get

    def get(self, span: Span) -> Any:
        """Return the collated samples at these positions; of several loaders a tuple."""
        if self._is_joint:
            data: Any = tuple([source.get(span) for source in self._sources])
            if any(type(part) is PartialRead for part in data):
                raise DataError("a dataset of the tuple of loaders returned None for a sample: use a Subset without")
        else:
            data = self._sources[0].get(span)
        if self._measures_pinning:
            self._measure_pinning(data)
        return data

    def read_ahead(self, wanted: Callable[[], Iterator[Span]]) -> None:
        """Prefetch the spans that each call of `wanted` yields, in order."""
        for source in self._sources:
            source.prefetcher.read_ahead(source.epoch, partial(_tasks, source, wanted))

    def observe(self, cost: StepCost) -> None:
        if self._tuner is not None:
            self._tuner.observe(cost)

    def apply_tuned_settings(self) -> bool:
        """Use the workers that the search tries now; return True if spans must be prefetched again."""
        if self._tuner is None:
            return False
        if any(source.prefetcher.workers_failed for source in self._sources):
            self._tuner.disable_workers()
        changed = [source.prefetcher.change(self._tuner.reading) for source in self._sources]
        return any(changed)

    def pause(self) -> None:
        for source in self._sources:
            source.prefetcher.pause()

    def close(self) -> None:
        for source in self._sources:
            source.prefetcher.close()

    def _measure_pinning(self, data: Any) -> None:
        """Pin memory from now on if that speeds up the copy to the GPU; measured once."""
        self._measures_pinning = False
        with contextlib.suppress(RuntimeError):  # the samples are on a GPU already
            usual_s, pinned_s = transfer_seconds(data, self._device)
            if self._tuner is not None and pinned_s < PINNING_PAYS * usual_s:
                self._tuner.pin()


def _tasks(source: _Source, wanted: Callable[[], Iterator[Span]]) -> Iterator[ReadTask]:
    return map(source.task, wanted())
