"""Evaluate a plain loader on any number of devices: every sample once, none twice.

Note [Equally many batches]
  A model with collectives in its forward hangs when one rank has more batches than another, and most code breaks on an
  empty batch. So the n samples are cut, in order, into T rounds of at least one sample per rank:
  T = min(number of batches, n // world_size). Where every batch of the loader has at least one sample per rank, the rounds
  are its batches. Each round is split over the ranks by their speeds. Only where n < world_size do the last ranks get none.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenload.balance.split import slice_sizes
from evenload.errors import ConfigError
from evenload.training.data import checks, order
from evenload.training.data.batches import move
from evenload.training.data.gather import EvaluationParts
from evenload.training.data.loader import GlobalLoader
from evenload.training.data.prefetch import Prefetcher
from evenload.training.data.reading import PartialRead, ReadTask, read_settings
from evenload.training.data.stream import StreamBatch, StreamReader, check_same_stream

_persistent_readers: weakref.WeakKeyDictionary[DataLoader[Any], Any] = weakref.WeakKeyDictionary()
"""Readers with persistent workers. They end with the user's loader, which they do not reference."""


def evaluation_batches(
    user_loader: DataLoader[Any],
    *,
    rank: int,
    world_size: int,
    weights: Sequence[float],
    agree: order.BroadcastIntegers,
    agree_round: order.BroadcastIntegers | None = None,
    seed: int,
    epoch: int,
    device: torch.device,
    keyed_rng: bool = True,
    parts: EvaluationParts | None = None,
    members: EvaluationMembers | None = None,
) -> Generator[Any, None, None]:
    """Yield this rank's batches of a plain DataLoader: equally many on every rank, every sample once over all ranks.

    The loader's sampler, batch_sampler, workers, pin_memory and collate_fn are honoured. The ranks' parts of one round,
    joined by rank, are the samples in the loader's order. Every rank reads an iterable dataset whole (see stream.py).
    `weights` are the relative speeds of the ranks, at least 0, equal on all ranks. `parts` receives the sizes of this rank's
    parts, for `run.gather`. Where ranks are lost in the loop, the others receive the batches of the lost ones, too, as `members`
    knows (not of an iterable dataset). In a loop, `agree_round` returns nothing where the others left it.

    Raises:
        ConfigError: The loader was prepared for training, or is not a DataLoader.
        DataError: The loader can't be split over ranks.
    """
    if isinstance(user_loader, GlobalLoader):
        raise ConfigError(
            "run.batches received a loader that was given to prepare, which is for training; give it a plain "
            "DataLoader that was not prepared"
        )
    checks.check_loader(user_loader)
    if len(weights) != world_size or not all(0 <= weight < math.inf for weight in weights):
        raise ConfigError(f"weights={list(weights)}: expected {world_size} speeds, finite and at least 0")
    pin = bool(user_loader.pin_memory) and device.type == "cuda"
    reader = _reader_of(user_loader, seed, rank, keyed_rng, pin)
    parts = parts or EvaluationParts()
    members = members or EvaluationMembers(tuple(map(str, range(world_size))))
    if isinstance(reader, StreamReader):
        batches = _stream_batches(reader, rank, weights, agree, agree_round or agree, epoch, parts, members)
    else:
        batches = _map_batches(reader, user_loader, rank, weights, agree, seed, epoch, parts, members)
    return (move(batch, device) for batch in batches)


class EvaluationMembers:
    """The workers that evaluate; here they never change."""

    def __init__(self, workers: tuple[str, ...]) -> None:
        self.workers = workers
        """Their ids, by rank, when the loop begins."""

    def end_round(self) -> tuple[str, ...]:
        """Wait until all have used their batches; return those that are left, equal on all; nobody if one left the loop early."""
        return self.workers


def close_persistent_workers() -> None:
    for reader in list(_persistent_readers.values()):
        reader.close()
    _persistent_readers.clear()


def cut_rounds(bounds: Sequence[int], world_size: int) -> list[tuple[int, int]]:
    """See Note [Equally many batches]; `bounds` has the first position of each batch, then the number of samples."""
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
    """Split a round over the ranks in proportion to `weights`, at least one sample each where there are enough.

    A rank of weight 0 gets none, unless all weights are 0.
    """
    members = [rank for rank, weight in enumerate(weights) if weight > 0]
    if 0 < len(members) < len(weights):
        of_members = cut_parts(num_samples, [weights[rank] for rank in members])
        given = dict(zip(members, of_members, strict=True))
        return [given.get(rank, 0) for rank in range(len(weights))]
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


def _num_members(weights: Sequence[float]) -> int:
    return sum(weight > 0 for weight in weights) or len(weights)


def _workers_without(num_samples: int, weights: Sequence[float], members: EvaluationMembers) -> list[str]:
    """Return the workers that receive no batch of an evaluation."""
    parts = cut_parts(min(num_samples, len(weights)), weights)
    return [worker for worker, part in zip(members.workers, parts, strict=True) if not part]


def _part(low: int, high: int, weights: Sequence[float], rank: int) -> tuple[int, int]:
    parts = cut_parts(high - low, weights)
    first = low + sum(parts[:rank])
    return first, first + parts[rank]


def _reader_of(loader: DataLoader[Any], seed: int, rank: int, keyed: bool, pin: bool) -> Prefetcher | StreamReader:
    reader = _persistent_readers.get(loader)
    if reader is None:
        if checks.is_stream(loader):
            reader = StreamReader(loader, seed=seed, keyed=keyed, pin=pin)
        else:
            # A copy of the loader: the prefetcher references it, and must not keep the user's alive.
            reading = read_settings(loader, pinned=pin)
            reader = Prefetcher(copy.copy(loader), seed=seed, rank=rank, keyed=keyed, reading=reading)
        if loader.persistent_workers:
            _persistent_readers[loader] = reader
    return reader


def _map_batches(
    reader: Prefetcher,
    loader: DataLoader[Any],
    rank: int,
    weights: Sequence[float],
    agree: order.BroadcastIntegers,
    seed: int,
    epoch: int,
    parts: EvaluationParts,
    members: EvaluationMembers,
) -> Iterator[Any]:
    drawn = order.draw_order(loader, seed=seed, epoch=epoch, rank=rank, agree=agree)
    rounds = cut_rounds(drawn.bounds, _num_members(weights))
    batches: dict[str, list[Sequence[int]]] = {
        worker: [range(*span) for low, high in rounds if (span := _part(low, high, weights, other))[0] < span[1]]
        for other, worker in enumerate(members.workers)
    }
    parts.begin(_workers_without(drawn.num_samples, weights, members))
    try:
        own = batches[members.workers[rank]]
        while True:
            tasks = [ReadTask(epoch, places[0], tuple(_keys(drawn, places))) for places in own]
            reader.read_ahead(epoch, functools.partial(iter, tasks))
            for task, places in zip(tasks, own, strict=True):
                batch = reader.get(task)
                parts.add(_runs(places))
                yield batch.data if type(batch) is PartialRead else batch
            now = members.end_round()
            if not now or not (lost := [worker for worker in batches if worker not in now]):
                break
            left = [
                places
                for worker in lost
                for number, places in enumerate(batches.pop(worker), 1)
                if not parts.was_gathered(worker, number)
            ]
            most = max(len(parts_of) for parts_of in batches.values())
            cut = dict(zip(now, _cut_again(sorted(itertools.chain(*left)), len(now), max(1, most)), strict=True))
            own = cut[members.workers[rank]]
            for worker, more in cut.items():
                batches.setdefault(worker, []).extend(more)
            parts.go_on([worker for worker, more in cut.items() if not more])
    finally:
        parts.end()
        reader.pause()


def _keys(drawn: order.SampleOrder, places: Sequence[int]) -> list[Any]:
    return [key for low, high in _runs(places) for key in drawn.keys(low, high)]


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the spans of successive positions."""
    if isinstance(places, range):
        return [(places.start, places.stop)]
    ends = [index for index in range(1, len(places)) if places[index] != places[index - 1] + 1]
    return [(places[low], places[high - 1] + 1) for low, high in itertools.pairwise([0, *ends, len(places)])]


def _cut_again(places: Sequence[int], world_size: int, most: int) -> list[list[Sequence[int]]]:
    """Cut positions into at most `most` rounds over the ranks; return the batches of each."""
    num_rounds = max(1, min(most, len(places) // world_size)) if places else 0
    starts = [0, *itertools.accumulate(slice_sizes(len(places), num_rounds))] if num_rounds else [0]
    cut: list[list[Sequence[int]]] = [[] for _ in range(world_size)]
    for low, high in itertools.pairwise(starts):
        for rank, batches in enumerate(cut):
            first, end = _part(low, high, [1.0] * world_size, rank)
            if first < end:
                batches.append(places[first:end])
    return cut


def _stream_batches(
    reader: StreamReader,
    rank: int,
    weights: Sequence[float],
    agree: order.BroadcastIntegers,
    agree_round: order.BroadcastIntegers,
    epoch: int,
    parts: EvaluationParts,
    members: EvaluationMembers,
) -> Iterator[Any]:
    position = 0
    rounds: Iterator[StreamBatch] = iter(())

    def read_first() -> StreamBatch:
        nonlocal rounds
        reader.begin(epoch)
        rounds = _stream_rounds(reader, _num_members(weights))
        return next(rounds, StreamBatch([], 0))

    try:
        batch = read_first()
        # A round has fewer samples than ranks only where the whole stream has.
        parts.begin(_workers_without(len(batch), weights, members))
        batch = check_same_stream(agree, rank, batch, "evaluation", read_first)
        while len(batch):
            low, high = _part(position, position + len(batch), weights, rank)
            position += len(batch)
            if low < high:
                parts.add([(low, high)])
                data = reader.collate(batch.samples(low, high), low)
                yield data.data if type(data) is PartialRead else data
            batch = check_same_stream(agree_round, rank, next(rounds, StreamBatch([], position)), "evaluation")
    finally:
        parts.end()
        reader.pause()


def _stream_rounds(reader: StreamReader, world_size: int) -> Iterator[StreamBatch]:
    """Yield the stream's batches, joining one that has fewer samples than ranks to the previous one."""
    position = 0
    held: StreamBatch | None = None
    while len(batch := reader.next_batch(position)):
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
