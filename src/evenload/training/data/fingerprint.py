"""Whether all ranks were given the same data: a few numbers of each rank's loader, and what to say where they differ.

A rank takes its part of each global batch from its own copy of the dataset, so the copies must be the same. Their lengths
alone don't tell: a split drawn before `evenload.init`, from generators that differ between processes, is as long on every
rank, and so is a shard that each machine has for itself. Looked at are lengths, the sampler, the indices of subsets and
samplers, and numbers that the dataset holds as arrays (the ends of each). No sample is asked for: that might open files
before the workers start.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from evenload.training.data import checks

_END_VALUES = 1 << 17
"""Of each array so many values from its beginning and its end are looked at."""
_SAME_FLOATS = 1e-3
"""Machines that are not alike round differently when they normalise data: so much of the norm is no difference."""
_MAX_TOLD = 8
_SIZES = ("num_samples", "batch_size")
_SHAPES = ("num_steps", "num_keys", "kinds")


@dataclass(frozen=True)
class Traits:
    """One rank's loader in numbers; -1 where it has none."""

    num_samples: float
    batch_size: float
    num_steps: float
    num_keys: float
    """Of the sampler."""
    kinds: float
    """Checksum of the classes of dataset and sampler."""
    indices: float
    """Checksum of the indices that subsets and samplers hold."""
    integers: float
    """Checksum of what the dataset holds in memory, floats left out."""
    projection: float
    """Of the floats that the dataset holds in memory, on a fixed row of ±1."""
    norm: float
    """Of these floats."""


def traits(loader: DataLoader[Any]) -> list[float]:
    """What to compare of this rank's loader."""
    dataset = loader.dataset
    samplers = [] if checks.is_stream(loader) else checks.samplers_of(loader)
    parts = list(_parts(dataset))
    integers, projection, norm = _contents(parts)
    found = Traits(
        num_samples=_length(dataset),
        batch_size=float(loader.batch_size or 0),
        num_steps=-1.0 if checks.is_stream(loader) else _length(loader),
        num_keys=_length(samplers[0]) if samplers else -1.0,
        kinds=_crc(repr([type(one).__qualname__ for one in (*parts, *samplers)]).encode()),
        indices=_indices([*(part for part in parts if isinstance(part, Subset)), *samplers]),
        integers=integers,
        projection=projection,
        norm=norm,
    )
    return [float(value) for value in astuple(found)]


def difference(rows: Sequence[Sequence[float]]) -> str:
    """What to tell where the ranks' traits differ; empty where they don't."""
    ranks = [Traits(*row) for row in rows]
    names = [field.name for field in fields(Traits) if len({getattr(one, field.name) for one in ranks}) > 1]
    if any(name in _SIZES for name in names):
        told = _each([_size(one) for one in ranks])
        shards = ""
        if "num_samples" in names:
            shards = (
                ". Where each machine holds a part of the data only, put the parts together for all of them (a shared folder, "
                "or a copy on each): a global batch draws from all samples alike"
            )
        return (
            f"the loaders differ: {told}. Give every rank the whole dataset and the same DataLoader; Evenload takes each rank's "
            f"part{shards}"
        )
    if any(name in _SHAPES for name in names):
        told = _each([f"{_count(one.num_steps)} steps and {_count(one.num_keys)} keys of its sampler" for one in ranks])
        return (
            f"the loaders differ in their sampler, batch_sampler or drop_last: {told}. Give every rank the same DataLoader over "
            "the whole dataset; Evenload takes each rank's part"
        )
    others = _others(ranks)
    if "indices" in names:
        return (
            f"the loaders name other samples on {others} than on rank 0 (the indices of a Subset or sampler differ): samples "
            "would be lost or used twice. A split drawn at random before evenload.init differs between processes: draw it after "
            "init, which seeds all ranks alike, or give it a seed of its own; and leave it to Evenload to take each rank's part"
        )
    if "integers" in names or _floats_differ(ranks):
        return (
            f"the dataset holds other values on {others} than on rank 0. Data made or shuffled at random before evenload.init "
            "differs between processes: make it after init, which seeds all ranks alike, or give it a seed of its own; where "
            "each machine holds data of its own, put it together for all of them"
        )
    return ""


def _floats_differ(ranks: Sequence[Traits]) -> bool:
    first = ranks[0]
    allowed = _SAME_FLOATS * max(one.norm for one in ranks)
    return any(
        abs(one.projection - first.projection) > allowed or abs(one.norm - first.norm) > allowed for one in ranks
    )


def _parts(dataset: Any) -> Iterator[Any]:
    """The dataset and those inside it, as torch's own wrappers hold them."""
    yield dataset
    if isinstance(dataset, Subset):
        yield from _parts(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for one in dataset.datasets:
            yield from _parts(one)


def _indices(owners: Iterable[Any]) -> float:
    """What subsets and samplers say about which samples there are: their ``indices``, or a plain list."""
    found = 0
    for owner in owners:
        plain = owner if isinstance(owner, list | tuple | range) and all(type(key) is int for key in owner) else None
        for values in (plain, getattr(owner, "indices", None)):
            if isinstance(values, torch.Tensor) and values.device.type == "cpu":
                found = zlib.crc32(_bytes(values), found)
            elif isinstance(values, list | tuple | range):
                found = zlib.crc32(repr(list(values)).encode(), found)
    return float(found)


def _contents(parts: Iterable[Any]) -> tuple[float, float, float]:
    """Checksum of integers and shapes, projection and norm of floats: of the arrays that datasets hold as attributes."""
    exact = 0
    projection = norm = 0.0
    for part in parts:
        values = part.tensors if isinstance(part, TensorDataset) else list(getattr(part, "__dict__", {}).values())
        for value in values:
            tensor = _as_tensor(value)
            if tensor is None:
                continue
            exact = zlib.crc32(repr((tuple(tensor.shape), str(tensor.dtype))).encode(), exact)
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_complex():
                continue
            flat = tensor.detach().reshape(-1)
            ends = flat if flat.numel() <= 2 * _END_VALUES else torch.cat([flat[:_END_VALUES], flat[-_END_VALUES:]])
            if tensor.is_floating_point():
                wide = ends.double().nan_to_num(0.0, 0.0, 0.0)
                projection += float(wide @ _signs()[: wide.numel()])
                norm += float(wide.norm())
            else:
                exact = zlib.crc32(_bytes(ends), exact)
    return float(exact), projection, norm


@functools.lru_cache(maxsize=1)
def _signs() -> torch.Tensor:
    """A fixed row of ±1."""
    bits = torch.randint(0, 2, (2 * _END_VALUES,), generator=torch.Generator().manual_seed(0))
    return bits.double() * 2 - 1


def _as_tensor(value: Any) -> torch.Tensor | None:
    """A plain tensor or array of numbers; None of anything else."""
    if type(value) is torch.Tensor:
        return value if value.layout is torch.strided and not value.is_quantized else None
    numpy = sys.modules.get("numpy")
    if (
        numpy is None
        or not isinstance(value, numpy.ndarray)
        or value.dtype.kind not in "iufb"
        or not value.flags.c_contiguous
    ):
        return None
    flat = value.reshape(-1)
    ends = flat if flat.size <= 2 * _END_VALUES else numpy.concatenate([flat[:_END_VALUES], flat[-_END_VALUES:]])
    try:
        return torch.from_numpy(numpy.array(ends))  # a copy: the array may be read-only, or lie on a disk
    except TypeError:  # a width that torch doesn't know
        return None


def _bytes(tensor: torch.Tensor) -> bytes:
    found: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def _length(value: Any) -> float:
    if not isinstance(value, Sized):
        return -1.0
    try:
        return float(len(value))
    except (TypeError, NotImplementedError):
        return -1.0


def _crc(data: bytes) -> float:
    return float(zlib.crc32(data))


def _size(one: Traits) -> str:
    samples = f"{int(one.num_samples)} samples" if one.num_samples >= 0 else "samples without a length"
    return f"{samples} in batches of {int(one.batch_size)}" if one.batch_size else samples


def _count(number: float) -> str:
    return str(int(number)) if number >= 0 else "an unknown number of"


def _each(texts: Sequence[str]) -> str:
    told = [f"rank {rank} has {text}" for rank, text in enumerate(texts[:_MAX_TOLD])]
    return ", ".join(told) + (f" and so on, {len(texts)} ranks" if len(texts) > _MAX_TOLD else "")


def _others(ranks: Sequence[Traits]) -> str:
    """The ranks whose data is another than rank 0's."""
    first = ranks[0]
    found = [
        str(rank)
        for rank, one in enumerate(ranks)
        if (one.indices, one.integers) != (first.indices, first.integers) or _floats_differ([first, one])
    ]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}"
