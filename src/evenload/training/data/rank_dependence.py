"""Find samplers and streams that give each rank another part of the data, which Evenload would split once more.

The evidence is certain where a rank gets the same each time that it draws or reads, and other samples than rank 0. What draws
from unseeded generators of its own differs between ranks too, but also from itself. Each loader is looked at once.
"""

from __future__ import annotations

import json
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from evenload.errors import DataError

MAX_COMPARED = 1 << 22
"""Most keys of a sampler that are compared; to draw them takes a second."""
_NUM_DRAWS = 3
"""Draws that must equal a rank's first one: a few keys of a random sampler may be equal by chance."""
_MOST_SHARED = 0.05
"""Largest part of their keys that the shards of two ranks have in common: some are padded to equal length. With more in common,
each rank drew a random subset of its own, which is fine: rank 0's is used on all ranks."""
_MOST_ROUNDED = 0.1
"""Largest part of the keys that differ where unlike devices round the weights of a sampler differently."""
_NUM_SHOWN = 4
_NUM_SAMPLES, _NUM_VALUES = 8, 4096
"""Samples of a stream that are compared, and values of each array in them."""
_NUM_PROJECTIONS = 4
_SAME = 0.05
"""Distance of the projections of two rows of norm 1 that counts as rounding: unlike machines decode images differently."""


def check_sampler(
    sampler: Any, rank: int, firsts: Sequence[Any], draw: Callable[[], Sequence[Any]], *, agreed_before: bool = False
) -> bool:
    """Return whether this rank's sampler draws as rank 0's; DataError if it certainly selects other samples.

    Args:
        sampler: named in the error.
        rank: this rank, not 0.
        firsts: the keys that rank 0 drew.
        draw: draws this rank's keys; each time from the states of generators that rank 0 drew from.
        agreed_before: it drew as rank 0's for the epoch before, so only a change of its state explains a difference.
    """
    agrees = is_certain = False
    # Code of the user's that fails on this rank alone, and keys that can't be compared, show nothing.
    with suppress(Exception):
        own = draw()
        if own == firsts:
            return True  # as nearly always, and fast
        agrees, is_certain = _compare_keys(own, firsts, draw, agreed_before)
    if not is_certain:
        return agrees
    name, shown, first = type(sampler).__qualname__, _shown(own), _shown(firsts)
    if agreed_before:
        raise DataError(
            f"{name} drew the same samples on all ranks before, and now others on rank {rank} ({shown}) than on rank 0 "
            f"({first}): something on one rank alone changed it, such as losses that loss_fn found for its own part of each "
            "batch. Those of rank 0 would count for all data. Change it in the loop body from what all ranks know "
            "(docs/data-loading.md#a-sampler-whose-weights-follow-the-losses)"
        )
    raise DataError(
        f"{name} selects other samples on rank {rank} ({shown}) than on rank 0 ({first}): it depends on the rank, or on "
        "something drawn before evenload.init. Those of rank 0 would be used on all ranks, the rest never. Evenload splits "
        "each global batch over the ranks itself: remove the sampler and set shuffle=True, or give every rank the same "
        "sampler, over the whole dataset"
    )


def _compare_keys(
    own: Sequence[Any], firsts: Sequence[Any], draw: Callable[[], Sequence[Any]], agreed_before: bool
) -> tuple[bool, bool]:
    """Return whether keys are nearly those of rank 0, and whether they certainly are not (the same at each draw)."""
    num_others = sum(_plain(a) != _plain(b) for a, b in zip(own, firsts, strict=False)) + abs(len(own) - len(firsts))
    if num_others <= _MOST_ROUNDED * len(firsts):
        return True, False
    selected = _comparable(own)
    if not agreed_before:
        mine, others = set(selected), set(_comparable(firsts))
        if len(mine & others) > _MOST_SHARED * min(len(mine), len(others)):
            return False, False
        return False, all(_comparable(draw()) == selected for _ in range(_NUM_DRAWS))
    return False, all(list(draw()) == list(own) for _ in range(_NUM_DRAWS))


def _comparable(keys: Iterable[Any]) -> list[Any]:
    """Return the keys in an order of their own; TypeError for those that are not made of numbers and text."""
    found = [_plain(key) for key in keys]
    return sorted(found) if all(type(key) is int for key in found) else sorted(map(json.dumps, found))


def _plain(key: Any) -> Any:
    try:
        return operator.index(key)  # also of numpy and torch
    except TypeError:
        return key


def _shown(keys: Sequence[Any]) -> str:
    shown = ", ".join(repr(_plain(key)) for key in keys[:_NUM_SHOWN])
    return f"{shown}, ...: {len(keys)}" if len(keys) > _NUM_SHOWN else shown


def stream_row(samples: Sequence[Any]) -> list[int]:
    """Return a few integers of the first samples of a batch, for `differs`: equal for equal samples, up to rounding.

    They are a checksum of labels and keys, how many samples differ in those, the number of arrays, their norms and projections.
    """
    keys, count, log_norm, sums = [], 0, 0.0, np.zeros(_NUM_PROJECTIONS)
    for index in range(min(_NUM_SAMPLES, len(samples))):
        key = 0
        for leaf in tree_leaves(samples[index]):
            if isinstance(leaf, str | bytes | int):
                # The folder of a file may differ between machines.
                key = zlib.crc32(repr(leaf.rpartition("/")[2] if isinstance(leaf, str) else leaf).encode(), key)
            elif (values := _values(leaf)) is None:
                continue
            elif values.dtype.kind == "b" or (values.dtype.kind in "iu" and values.dtype.itemsize > 2):
                key = zlib.crc32(values.tobytes(), key)  # smaller integers are those of images and sound
            elif norm := float(
                np.linalg.norm(wide := np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0))
            ):
                count += 1
                log_norm += math.log2(norm)
                signs = np.random.RandomState(count).randint(0, 2, (_NUM_PROJECTIONS, len(wide))) * 2 - 1
                sums += signs @ (wide / norm)
        keys.append(key)
    return [
        zlib.crc32(repr(keys).encode()),
        len(set(keys)),
        count,
        *(round(value * 1e6) for value in (log_norm, *sums)),
    ]


def differs(row: Sequence[int], other: Sequence[int]) -> bool:
    """Return True for rows of different samples: of other labels or keys, or of other values where labels are all alike."""
    if row[0] == other[0] and row[1] > 1:
        return False  # other values are those of an augmentation that a rank draws by itself
    allowed = 1e6 * _SAME * math.sqrt(row[2])
    return (
        row[0] != other[0]
        or row[2] != other[2]
        or any(abs(a - b) > allowed for a, b in zip(row[3:], other[3:], strict=True))
    )


def sharded_stream(where: str, rank: int) -> DataError:
    return DataError(
        f"{where}: rank {rank} read other samples of the iterable dataset than rank 0, and the same when it read them again: "
        "the dataset shards itself by rank, so each rank would use a part of its own part, and the rest would never be "
        "used. Let it yield all samples on every rank (without run.rank, RANK and dist.get_rank(); sharding over workers by "
        "get_worker_info is right): Evenload takes each rank's part"
    )


def _values(leaf: Any) -> Any:
    """Return an array, flat and cut, of a tensor, an array or a number; None of anything else."""
    if (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and leaf.device.type == "cpu"
        and not leaf.is_quantized
    ):
        flat = leaf.detach().flatten()[:_NUM_VALUES]
        leaf = (
            (flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat)
            .resolve_neg()
            .resolve_conj()
            .numpy()
        )
    if isinstance(leaf, float | np.ndarray | np.generic):
        flat_values = np.asarray(leaf).reshape(-1)[:_NUM_VALUES]
        return flat_values if flat_values.dtype.kind in "iubf" else None
    return None
