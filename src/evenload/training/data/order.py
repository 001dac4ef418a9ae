"""The global order of an epoch: samples by position, cut into global batches.

Every rank computes the identity and plain shuffling, functions of (seed, epoch), for itself. Rank 0 draws any other sampler
once and broadcasts the order.
"""

from __future__ import annotations

import array
import bisect
import itertools
import json
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler

from evenload.errors import DataError, PeerLostError
from evenload.training.data import checks, randomness

MAX_ENDLESS = 10_000_000
"""Keys drawn from a sampler without a length before it counts as endless."""

BroadcastIntegers = Callable[[Sequence[int] | None], list[int]]
"""Broadcasts rank 0's integers to all ranks; the others pass None."""


@dataclass(frozen=True)
class SampleOrder:
    """One epoch's samples by global position.

    Step s takes the positions ``[bounds[s], bounds[s + 1])``; the last bound is the number of samples.
    """

    source: range | torch.Tensor | list[Any]
    bounds: Sequence[int]
    generators_before: tuple[str, ...] = ()
    """States of the sampler's own generators before it was drawn, to draw the same again."""
    key: int = -1
    """Checksum of an order drawn from the user's sampler; -1 for one that is a function of seed and epoch."""

    @property
    def num_steps(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_samples(self) -> int:
        return self.bounds[-1]

    def keys(self, low: int, high: int) -> list[Any]:
        """Return the dataset's keys at the positions ``[low, high)``."""
        part = self.source[low:high]
        return part.tolist() if isinstance(part, torch.Tensor) else list(part)

    def step_at(self, position: int) -> int:
        """Return the step that begins at a position; DataError if none does, because the batches have changed."""
        step = bisect.bisect_left(self.bounds, position)
        if step == len(self.bounds) or self.bounds[step] != position:
            raise DataError(
                f"the checkpoint is at sample {position} of its epoch, where no step of this loader begins "
                f"({self.num_steps} steps, {self.num_samples} samples): its batch_size, drop_last or sampler "
                f"changed; set them as they were, or start anew with --fresh"
            )
        return step


def draw_order(
    loader: DataLoader[Any],
    *,
    seed: int,
    epoch: int,
    rank: int,
    agree: BroadcastIntegers,
    batch_size: int | None = None,
) -> SampleOrder:
    """Return the order of one epoch; a collective call where the sampler is the user's.

    The user's sampler draws from global generators keyed by (seed, epoch), and from its own generators, whose states stay
    equal on all ranks. A `set_epoch` method is called. `batch_size` replaces the loader's.

    Raises:
        DataError: The sampler has no end, or its keys can't be sent to other ranks.
        PeerLostError: Rank 0 could not draw the order.
    """
    sampler = loader.sampler
    if checks.has_plain_batches(loader):
        plain: range | torch.Tensor | None = None
        if type(sampler) is SequentialSampler:
            plain = range(len(sampler))
        elif checks.is_plain_shuffle(sampler):
            generator = torch.Generator().manual_seed(randomness.mix(seed, epoch, randomness.ORDER))
            plain = torch.randperm(len(sampler), generator=generator)  # type: ignore[arg-type]
        if plain is not None:
            return SampleOrder(plain, regular_bounds(len(plain), loader, batch_size))
    return _share_order(loader, seed, epoch, rank, agree, batch_size)


def regular_bounds(num_samples: int, loader: DataLoader[Any], batch_size: int | None = None) -> list[int]:
    """Return the first position of each batch of `batch_size` (default: the loader's), then the end."""
    size = batch_size or loader.batch_size or 1
    bounds = list(range(0, num_samples, size))
    if num_samples % size == 0 or not loader.drop_last:
        bounds.append(num_samples)
    return bounds or [0]


def _share_order(
    loader: DataLoader[Any], seed: int, epoch: int, rank: int, agree: BroadcastIntegers, batch_size: int | None
) -> SampleOrder:
    samplers = checks.samplers_of(loader)
    generators = randomness.find_generators(samplers)
    for sampler in samplers:
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
    if rank == 0:
        try:
            message = _draw(loader, generators, seed, epoch)
        except Exception as error:
            # The other ranks wait for the order: send them the error before raising it here.
            agree(_pack({"error": f"{type(error).__name__}: {error}"}, []))
            raise
        header, keys = _unpack(agree(message))
    else:
        header, keys = _unpack(agree(None))
        if "error" in header:
            raise PeerLostError(f"rank 0 could not draw the order of epoch {epoch}: {header['error']}")
        # Any rank can then take over from rank 0, and all cursors are equal.
        randomness.load_generators(generators, header["after"])
    source: torch.Tensor | list[Any] = torch.tensor(keys, dtype=torch.int64)
    if header["keys"] is not None:
        source = header["keys"]
    if header["lengths"] is None:
        bounds = regular_bounds(len(source), loader, batch_size)
    else:
        bounds = [0, *itertools.accumulate(header["lengths"])]
    return SampleOrder(
        source, bounds, header["before"], _key_of(keys if header["keys"] is None else header["keys"], bounds)
    )


def _key_of(keys: Sequence[Any], bounds: Sequence[int]) -> int:
    """Return a checksum of a drawn order; -1 for keys that can't be serialised as integers or JSON."""
    key = zlib.crc32(array.array("q", bounds).tobytes())
    try:
        return zlib.crc32(array.array("q", keys).tobytes(), key)
    except (TypeError, OverflowError):
        pass
    try:
        return zlib.crc32(json.dumps(keys).encode(), key)
    except (TypeError, ValueError):
        return -1


def _draw(loader: DataLoader[Any], generators: list[Any], seed: int, epoch: int) -> list[int]:
    before = randomness.save_generators(generators)
    lengths: list[int] | None = None
    with randomness.forked():
        randomness.reseed(randomness.mix(seed, epoch, randomness.DRAW))
        if checks.has_plain_batches(loader):
            keys = _draw_keys(loader.sampler)
        else:
            lists = [list(keys) for keys in _draw_keys(loader.batch_sampler)]
            if not all(lists):
                raise DataError(f"batch {lists.index([])} of the batch_sampler is empty; leave empty batches out")
            lengths = [len(keys) for keys in lists]
            keys = list(itertools.chain.from_iterable(lists))
    plain = all(type(key) is int and -(1 << 63) <= key < 1 << 63 for key in keys)
    header = {
        "keys": None if plain else keys,
        "lengths": lengths,
        "before": before,
        "after": randomness.save_generators(generators),
    }
    try:
        return _pack(header, keys if plain else [])
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DataError(
            f"the sampler yields keys of type {type(keys[0]).__qualname__}, which can't be sent to the other ranks "
            f"({error}); let it yield integers, strings or tuples of them"
        ) from error


def _draw_keys(sampler: Any) -> list[Any]:
    keys = list(itertools.islice(sampler, MAX_ENDLESS + 1)) if not hasattr(sampler, "__len__") else list(sampler)
    if len(keys) > MAX_ENDLESS and not hasattr(sampler, "__len__"):
        raise DataError(
            f"{type(sampler).__qualname__} has no __len__ and yielded more than {MAX_ENDLESS:,} keys: an epoch needs an "
            f"end; add a __len__, or end it with itertools.islice"
        )
    return keys


def _pack(header: dict[str, Any], keys: list[int]) -> list[int]:
    data = pickle.dumps(header)
    words = array.array("q", data + bytes(-len(data) % 8)).tolist()
    return [len(data), len(words), *words, *keys]


def _unpack(message: list[int]) -> tuple[dict[str, Any], list[int]]:
    num_bytes, num_words = message[:2]
    data = array.array("q", message[2 : 2 + num_words]).tobytes()[:num_bytes]
    return pickle.loads(data), message[2 + num_words :]
