"""Evaluation: every sample of a plain loader once, none twice, on any number of devices.

Note [ Equally many batches ]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model with collectives in its forward hangs when one rank has a batch more than another, and most code breaks on an
empty batch. So the n samples are cut, in order, into T rounds of at least one sample a rank, with T as near to the
loader's own number of batches as that allows: T = min(number of batches, n // world_size). Where every batch of the
loader has at least one sample a rank, the rounds are its batches. Each round is cut into one part a rank, sized by the
ranks' speeds. Only where n < world_size the last ranks get nothing, for there is nothing to give.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenload.balance.split import slice_sizes
from evenload.errors import ConfigError, DataError
from evenload.training.data import checks, order
from evenload.training.data.batches import move
from evenload.training.data.loader import GlobalLoader
from evenload.training.data.reading import (
    Task,
    TaskReader,
    as_read,
    end_workers,
    inner_loader,
    quiet,
    reading_of,
    seed_workers,
)
from evenload.training.data.stream import StreamBatch, StreamFeed

_kept: weakref.WeakKeyDictionary[DataLoader[Any], Any] = weakref.WeakKeyDictionary()
"""Readers with persistent workers, as long as the user's loader lives (which they don't hold)."""


def evaluation_batches(
    user_loader: DataLoader[Any],
    *,
    rank: int,
    world_size: int,
    weights: Sequence[float],
    agree: order.Agree,
    seed: int,
    epoch: int,
    device: torch.device,
    keyed_rng: bool = True,
) -> Iterator[Any]:
    """This rank's batches of a plain DataLoader; over all ranks every sample once, in equally many batches a rank.

    The loader's sampler, batch_sampler, workers, pin_memory and collate_fn are honoured; parts keep the order, so the
    ranks' parts of one round joined by rank are the samples in the loader's order. An iterable dataset is read whole by
    every rank (see stream.py), a batch ahead.

    Args:
        user_loader: not one that was given to `prepare`.
        rank: this rank.
        world_size: number of ranks.
        weights: relative speed of each rank, at least 0, equal on all ranks.
        agree: rank 0 gives integers, every rank gets them.
        seed: of shuffling and keyed randomness.
        epoch: likewise; the same epoch gives the same batches.
        device: where batches go.
        keyed_rng: whether randomness inside the dataset is keyed by (seed, epoch, position).

    Raises:
        ConfigError: a loader that was prepared for training, or none at all.
        DataError: it can't be split over ranks.
    """
    if isinstance(user_loader, GlobalLoader):
        raise ConfigError(
            "run.batches got a loader that was given to prepare, which is for training; give it a plain DataLoader, "
            "not prepared"
        )
    checks.check_loader(user_loader)
    if len(weights) != world_size or not all(0 <= weight < math.inf for weight in weights):
        raise ConfigError(f"weights={list(weights)}: expected {world_size} speeds, finite and at least 0")
    pin = bool(user_loader.pin_memory) and device.type == "cuda"
    if checks.is_stream(user_loader):
        batches = _stream_batches(user_loader, rank, list(weights), agree, seed, epoch, keyed_rng, pin)
    else:
        batches = _map_batches(user_loader, rank, list(weights), agree, seed, epoch, keyed_rng, pin)
    return _moved(batches, device)


def close_kept_workers() -> None:
    """Ends the persistent workers of all loaders evaluated so far."""
    for reader in list(_kept.values()):
        reader.close()
    _kept.clear()


def cut_rounds(bounds: Sequence[int], world_size: int) -> list[tuple[int, int]]:
    """The rounds ``[low, high)``, each of at least `world_size` samples (see the note above).

    Args:
        bounds: where each batch begins, and the end.
        world_size: number of ranks.
    """
    batches = list(itertools.pairwise(bounds))
    num_samples = bounds[-1]
    if all(high - low >= world_size for low, high in batches):
        return batches
    num_rounds = min(len(batches), num_samples // world_size)
    if num_rounds == 0:
        return [(0, num_samples)] if num_samples else []
    starts = [0, *itertools.accumulate(slice_sizes(num_samples, num_rounds))]
    return list(itertools.pairwise(starts))


def cut_parts(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Samples of each rank in a round: in proportion to `weights`, at least one where there are enough."""
    world_size = len(weights)
    if num_samples < world_size:
        return [int(rank < num_samples) for rank in range(world_size)]
    total = sum(weights)
    quotas = [num_samples * weight / total if total > 0 else num_samples / world_size for weight in weights]
    parts = [max(1, math.floor(quota)) for quota in quotas]
    while sum(parts) < num_samples:
        parts[max(range(world_size), key=lambda rank: (quotas[rank] - parts[rank], -rank))] += 1
    while sum(parts) > num_samples:
        candidates = [rank for rank in range(world_size) if parts[rank] > 1]
        parts[max(candidates, key=lambda rank: (parts[rank] - quotas[rank], -rank))] -= 1
    return parts


def _part(low: int, high: int, weights: Sequence[float], rank: int) -> tuple[int, int]:
    parts = cut_parts(high - low, weights)
    first = low + sum(parts[:rank])
    return first, first + parts[rank]


def _moved(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield move(batch, device)


class _MapReader:
    """Reads a list of tasks through the workers that the user's loader asks for."""

    def __init__(self, loader: DataLoader[Any], seed: int, keyed: bool, pin: bool) -> None:
        self.tasks: list[Task] = []
        self._generator = loader.generator
        self._persistent = loader.persistent_workers
        reader = TaskReader(loader.dataset, loader.collate_fn, seed=seed, keyed=keyed)
        self._inner = inner_loader(
            loader, reader, reading_of(loader, pinned=pin), batch_sampler=self, collate_fn=as_read
        )
        self._iterator: Any = None

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def read(self, *seed_parts: int) -> Iterator[Any]:
        """Collated samples of each task, in order."""
        seed_workers(self._inner, self._generator, *seed_parts)
        try:
            with quiet():
                self._iterator = iter(self._inner)
            yield from self._iterator
        finally:
            if not self._persistent:
                self.close()

    def close(self) -> None:
        """Ends the workers."""
        iterator, self._iterator = self._iterator, None
        self._inner._iterator = None
        end_workers(iterator)


def _map_batches(
    loader: DataLoader[Any],
    rank: int,
    weights: list[float],
    agree: order.Agree,
    seed: int,
    epoch: int,
    keyed: bool,
    pin: bool,
) -> Iterator[Any]:
    drawn = order.draw_order(loader, seed=seed, epoch=epoch, rank=rank, agree=agree)
    reader = _kept.get(loader) or _MapReader(loader, seed, keyed, pin)
    if loader.persistent_workers:
        _kept[loader] = reader
    spans = (_part(low, high, weights, rank) for low, high in cut_rounds(drawn.bounds, len(weights)))
    reader.tasks = [Task(epoch, low, tuple(drawn.keys(low, high))) for low, high in spans if low < high]
    yield from reader.read(seed, epoch, rank)


def _stream_batches(
    loader: DataLoader[Any],
    rank: int,
    weights: list[float],
    agree: order.Agree,
    seed: int,
    epoch: int,
    keyed: bool,
    pin: bool,
) -> Iterator[Any]:
    feed = _kept.get(loader) or StreamFeed(loader, seed=seed, keyed=keyed, pin=pin)
    if loader.persistent_workers:
        _kept[loader] = feed
    try:
        feed.begin(epoch)
        position = 0
        for batch in _stream_rounds(feed, len(weights)):
            _check_same(agree, rank, len(batch))
            low, high = _part(position, position + len(batch), weights, rank)
            position += len(batch)
            if low < high:
                yield feed.collate(batch.samples(low, high), low)
        _check_same(agree, rank, 0)
    finally:
        feed.pause()


def _stream_rounds(feed: StreamFeed, world_size: int) -> Iterator[StreamBatch]:
    """The stream's batches; one with fewer samples than ranks is joined to the one before."""
    position = 0
    held: StreamBatch | None = None
    while len(batch := feed.next_batch(position)):
        position += len(batch)
        if held is None:
            held = batch
        elif len(batch) < world_size or len(held) < world_size:
            held = held.joined(batch)
        else:
            yield held
            held = batch
    if held is not None:
        yield held


def _check_same(agree: order.Agree, rank: int, num_samples: int) -> None:
    (first,) = agree([num_samples] if rank == 0 else None)
    if first != num_samples:
        raise DataError(
            f"rank {rank} read {num_samples} samples of the evaluation stream where rank 0 read {first}; an iterable "
            f"dataset must give the same samples on every rank: don't shard it by rank"
        )
