"""The global order of an epoch: samples by position, cut into global batches.

Every rank computes the identity and plain shuffling, functions of (seed, epoch), for itself. Rank 0 draws any other sampler
once and broadcasts the order. Plain shuffling is torch.randperm up to `MAX_DRAWN` samples; above it is computed where it is
used (permutation.py), because each rank would hold 8 bytes for each sample. So are more than `MAX_DRAWN` plain draws with
replacement: scripts that count iterations, not epochs, draw 10^10.
"""

from __future__ import annotations

import array
import bisect
import copy
import itertools
import json
import pickle
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from evenload.errors import DataError, PeerLostError
from evenload.training.data import checks, randomness
from evenload.training.data.permutation import KeyedDraws, KeyedPermutation
from evenload.training.data.rank_dependence import MAX_COMPARED, check_sampler

MAX_DRAWN = 1 << 25
"""Most samples of an order that plain shuffling, or plain draws with replacement, draw as a whole: 256 MiB."""
_COMPUTED_KEY = 1
"""Key of orders by `KeyedPermutation` and `KeyedDraws`, as they compute them now."""
MAX_ENDLESS = 10_000_000
"""Keys drawn from a sampler without a length before it counts as endless."""
MAX_KEYS = 1 << 31
"""Most keys that a sampler with a length may draw at once: as Python's integers they take more than 64 GiB."""

BroadcastIntegers = Callable[[Sequence[int] | None], list[int]]
"""Broadcasts rank 0's integers to all ranks; the others pass None."""
_agreed: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
"""By loader the newest epoch for which this rank's sampler drew what rank 0's did; -2 after it drew something else."""


@dataclass(frozen=True)
class SampleOrder:
    """One epoch's samples by global position.

    Step s takes the positions ``[bounds[s], bounds[s + 1])``; the last bound is the number of samples.
    """

    source: range | torch.Tensor | KeyedPermutation | KeyedDraws | list[Any]
    bounds: Sequence[int]
    generators_before: tuple[str, ...] = ()
    """States of the sampler's own generators before it was drawn, to draw the same again."""
    key: int = -1
    """Checksum of an order drawn from the user's sampler; -1 or `_COMPUTED_KEY` for a function of seed and epoch."""

    @property
    def num_steps(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_samples(self) -> int:
        return self.bounds[-1]

    def in_batches_of(self, size: int, loader: DataLoader[Any], step: int, position: int) -> SampleOrder:
        """Return the same order in batches of `size` samples from `position` on, where its `step` begins."""
        return replace(self, bounds=regular_bounds(len(self.source), loader, size, step, position))

    def keys(self, low: int, high: int) -> list[Any]:
        """Return the dataset's keys at the positions ``[low, high)``."""
        part = self.source[low:high]
        return part.tolist() if isinstance(part, torch.Tensor | np.ndarray) else list(part)

    def index(self, low: int, high: int) -> torch.Tensor | None:
        """Return the same keys as a tensor of integers, without a Python object for each; None where they are not one."""
        return self.source[low:high] if isinstance(self.source, torch.Tensor) else None

    def step_at(self, position: int) -> int:
        """Return the step that begins at a position; DataError if none does, because the batches have changed."""
        step = bisect.bisect_left(self.bounds, position)
        if step == len(self.bounds) or self.bounds[step] != position:
            raise DataError(
                f"the checkpoint is at sample {position} of its epoch, where no step of this loader begins "
                f"({self.num_steps} steps, {self.num_samples} samples): its batch_size, drop_last or sampler "
                f"changed; set them as they were, leave the rest of the epoch out with --override, or start anew with --fresh"
            )
        return step


def draw_order(
    loader: DataLoader[Any],
    *,
    seed: int,
    epoch: int,
    rank: int,
    agree: BroadcastIntegers,
    own_key: int | None = None,
) -> SampleOrder:
    """Return the order of one epoch; a collective call where the sampler is the user's.

    The user's sampler draws from global generators keyed by (seed, epoch), and from its own generators, whose states stay
    equal on all ranks. A `set_epoch` method is called. With `own_key` the sampler's own
    generators are seeded by (own_key, seed, epoch), so that the order does not depend on the epochs drawn before.

    Raises:
        DataError: The sampler has no end, or its keys can't be sent to other ranks.
        PeerLostError: Rank 0 could not draw the order.
    """
    if not is_function_of_seed(loader):
        return _share_order(loader, seed, epoch, rank, agree, own_key)
    num_samples = len(loader.sampler)  # type: ignore[arg-type]
    source: range | torch.Tensor | KeyedPermutation | KeyedDraws = range(num_samples)
    order_key = -1
    if type(loader.sampler) is RandomSampler:
        key = randomness.mix(seed, epoch, randomness.ORDER)
        if loader.sampler.replacement:
            source, order_key = KeyedDraws(len(loader.sampler.data_source), num_samples, key), _COMPUTED_KEY
        elif num_samples > MAX_DRAWN:
            source, order_key = KeyedPermutation(num_samples, key), _COMPUTED_KEY
        else:
            source = torch.randperm(num_samples, generator=torch.Generator().manual_seed(key))
    return SampleOrder(source, regular_bounds(num_samples, loader), key=order_key)


class RegularBounds(Sequence[int]):
    """The first position of each batch of `size` samples, then the number of samples; computed, not stored.

    The batches begin at `position` with step `first`. Of earlier steps, in batches of other sizes, only the order is right.
    """

    def __init__(self, num_samples: int, size: int, first: int = 0, position: int = 0) -> None:
        self._positions = range(position, num_samples, size)
        self._num_samples = num_samples
        self._first, self._position = first, position
        self._len = first + len(self._positions) + 1

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._len))]
        index += self._len if index < 0 else 0
        if 0 <= index < self._first:
            return self._position * index // self._first
        if index == self._len - 1:
            return self._num_samples
        return self._positions[index - self._first if index >= 0 else self._len]


def regular_bounds(
    num_samples: int, loader: DataLoader[Any], batch_size: int | None = None, first: int = 0, position: int = 0
) -> RegularBounds:
    """Return the bounds of batches of `batch_size` (default: the loader's), without a short last one if it is dropped.

    See `RegularBounds` for `first` and `position`.
    """
    size = batch_size or loader.batch_size or 1
    num_dropped = (num_samples - position) % size if loader.drop_last else 0
    return RegularBounds(num_samples - num_dropped, size, first, position)


def is_function_of_seed(loader: DataLoader[Any]) -> bool:
    """Return True if every rank computes the order for itself: the identity, plain shuffling, or many plain draws."""
    return checks.has_plain_batches(loader) and (
        type(loader.sampler) is SequentialSampler
        or checks.is_plain_shuffle(loader.sampler)
        or (checks.is_plain_draws(loader.sampler) and len(loader.sampler) > MAX_DRAWN)  # type: ignore[arg-type]
    )


def is_computed(loader: DataLoader[Any]) -> bool:
    """Return True if the loader's order is computed where it is used, not drawn as a whole."""
    return is_function_of_seed(loader) and type(loader.sampler) is RandomSampler and len(loader.sampler) > MAX_DRAWN


def _share_order(
    loader: DataLoader[Any],
    seed: int,
    epoch: int,
    rank: int,
    agree: BroadcastIntegers,
    own_key: int | None,
) -> SampleOrder:
    samplers = checks.samplers_of(loader)
    generators = randomness.find_generators(samplers)
    for sampler in samplers:
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
    if rank == 0:
        try:
            if own_key is not None:
                randomness.seed_generators(generators, own_key, seed, epoch, randomness.DRAW)
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
        _compare(loader, generators, header, keys, seed, epoch, rank)
        # Any rank can then take over from rank 0, and all cursors are equal.
        randomness.load_generators(generators, header["after"])
    source: torch.Tensor | list[Any] = torch.tensor(keys, dtype=torch.int64)
    if header["keys"] is not None:
        source = header["keys"]
    bounds: Sequence[int]
    if header["lengths"] is None:
        bounds = regular_bounds(len(source), loader)
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
        keys = _draw_keys(_sampler_of(loader))
        if not checks.has_plain_batches(loader):
            lists = list(map(list, keys))
            if not all(lists):
                raise DataError(f"batch {lists.index([])} of the batch_sampler is empty; leave empty batches out")
            lengths = list(map(len, lists))
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


def _compare(
    loader: DataLoader[Any],
    generators: list[Any],
    header: dict[str, Any],
    keys: list[int],
    seed: int,
    epoch: int,
    rank: int,
) -> None:
    """Draw as rank 0 did, with this rank's own sampler; raise DataError if it certainly selects other samples."""
    firsts = keys if header["keys"] is None else header["keys"]
    last = _agreed.get(loader, -1)
    agreed_before = 0 <= last >= epoch - 1  # a rank that was away for an epoch may have missed a change
    if len(firsts) > MAX_COMPARED or not (agreed_before or loader not in _agreed):
        return
    sampler = _sampler_of(loader)
    before = copy.copy(sampler)
    # The first draw changes the sampler, as on rank 0: it may count its epochs.
    samplers = itertools.chain([sampler], iter(lambda: copy.copy(before), None))

    def draw() -> list[Any]:
        randomness.load_generators(generators, header["before"])
        with randomness.forked():
            randomness.reseed(randomness.mix(seed, epoch, randomness.DRAW))
            if checks.has_plain_batches(loader):
                return list(itertools.islice(next(samplers), len(firsts) + 1))
            batches = itertools.islice(next(samplers), len(header["lengths"]) + 1)
            return list(itertools.chain.from_iterable(batches))

    _agreed[loader] = epoch if check_sampler(sampler, rank, firsts, draw, agreed_before=agreed_before) else -2


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if checks.has_plain_batches(loader) else loader.batch_sampler


def _draw_keys(sampler: Any) -> list[Any]:
    num_keys = _num_keys(sampler)
    if num_keys is not None and num_keys > MAX_KEYS:
        raise DataError(
            f"{type(sampler).__qualname__} has {num_keys:,} keys, and all of an epoch are drawn when it begins, at most "
            f"{MAX_KEYS:,}: let an epoch have fewer (num_samples), and loop over epochs. shuffle=True, and "
            "sampler=RandomSampler(dataset, replacement=True, num_samples=...) without a generator, may have any number"
        )
    keys = list(itertools.islice(sampler, MAX_ENDLESS + 1)) if num_keys is None else list(sampler)
    if len(keys) > MAX_ENDLESS and num_keys is None:
        raise DataError(
            f"{type(sampler).__qualname__} has no __len__ and yielded more than {MAX_ENDLESS:,} keys: an epoch needs an "
            f"end; add a __len__, or end it with itertools.islice"
        )
    return keys


def _num_keys(sampler: Any) -> int | None:
    """Return about how many keys a sampler will draw; None if it has no length."""
    try:
        num_keys = len(sampler)
    except TypeError:  # torch's BatchSampler has the method also where the sampler in it has none
        return None
    return num_keys * (sampler.batch_size if type(sampler) is BatchSampler else 1)


def _pack(header: dict[str, Any], keys: list[int]) -> list[int]:
    data = pickle.dumps(header)
    words = array.array("q", data + bytes(-len(data) % 8)).tolist()
    return [len(data), len(words), *words, *keys]


def _unpack(message: list[int]) -> tuple[dict[str, Any], list[int]]:
    num_bytes, num_words = message[:2]
    data = array.array("q", message[2 : 2 + num_words]).tobytes()[:num_bytes]
    return pickle.loads(data), message[2 + num_words :]
