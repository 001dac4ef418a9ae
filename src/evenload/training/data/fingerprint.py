"""Detect ranks that were given different data, by a few numbers of each rank's loader.

A rank takes its part of each global batch from its own copy of the dataset, so the copies must be the same. Their lengths
are not enough: a split drawn before `evenload.init`, from generators that differ between processes, has the same length on
every rank, and so do shards of equal size. The numbers cover lengths, the sampler, the indices of subsets and samplers, and
the ends of arrays and lists of samples that the dataset holds. No sample is read: that might open files before the workers start.
"""

from __future__ import annotations

import functools
import math
import sys
import types
import zlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import astuple, dataclass, fields
from os import PathLike
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from evenload.training.data import checks, randomness

_END_VALUES = 1 << 17
"""Values compared at the beginning and at the end of each array."""
_SAME_FLOATS = 1e-3
"""Relative tolerance of the norm: unlike machines round differently when they normalise data."""
_END_ITEMS = 1000
"""Entries compared at the beginning and at the end of a list of samples."""
_NUM_PARTS = 8
"""Parts of an entry, or values of its tensors, that are compared."""
_MAX_LISTED = 8
_SIZES = ("num_samples", "batch_size")
_SHAPES = ("num_steps", "num_keys", "kinds")


@dataclass(frozen=True)
class DatasetFingerprint:
    """One rank's loader in numbers; -1 for those it does not have."""

    num_samples: float
    batch_size: float
    num_steps: float
    num_keys: float
    kinds: float
    indices: float
    """Checksum of the indices that subsets and samplers hold."""
    integers: float
    """Checksum of the integers that the dataset holds in memory."""
    projection: float
    """Floats that the dataset holds in memory, projected on a fixed row of ±1."""
    norm: float


def fingerprint_of(loader: DataLoader[Any]) -> list[float]:
    dataset = loader.dataset
    samplers = [] if checks.is_stream(loader) else checks.samplers_of(loader)
    parts = list(parts_of(dataset))
    integers, projection, norm = _contents(parts)
    found = DatasetFingerprint(
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


def describe_mismatch(rows: Sequence[Sequence[float]]) -> str:
    """Return the error message for ranks whose fingerprints differ; empty where they agree."""
    ranks = [DatasetFingerprint(*row) for row in rows]
    names = [field.name for field in fields(DatasetFingerprint) if len({getattr(one, field.name) for one in ranks}) > 1]
    if any(name in _SIZES for name in names):
        listed = _each([_size(one) for one in ranks])
        shards = ""
        if "num_samples" in names:
            shards = (
                ". Where each machine has only a part of the data, merge the parts for all of them (a shared folder, or a "
                "copy on each): a global batch draws from all samples"
            )
        return (
            f"the loaders differ: {listed}. Give every rank the whole dataset and the same DataLoader; Evenload takes "
            f"each rank's part{shards}"
        )
    if any(name in _SHAPES for name in names):
        listed = _each(
            [f"{_count(one.num_steps)} steps and {_count(one.num_keys)} keys of its sampler" for one in ranks]
        )
        return (
            f"the loaders differ in their sampler, batch_sampler or drop_last: {listed}. Give every rank the same DataLoader "
            "over the whole dataset; Evenload takes each rank's part"
        )
    others = _differing_ranks(ranks)
    if "indices" in names:
        return (
            f"the loaders select different samples on {others} and on rank 0 (the indices of a Subset or sampler differ): "
            "samples would be lost or used twice. A random split drawn before evenload.init differs between processes: draw it "
            "after init, which seeds all ranks alike, or give it its own seed; and let Evenload take each rank's part"
        )
    if "integers" in names or _floats_differ(ranks):
        return (
            f"the dataset holds different values on {others} and on rank 0. Data generated or shuffled before evenload.init "
            "differs between processes: create it after init, which seeds all ranks alike, or give it its own seed; where each "
            "machine has its own data, merge it for all of them"
        )
    return ""


def _floats_differ(ranks: Sequence[DatasetFingerprint]) -> bool:
    first = ranks[0]
    allowed = _SAME_FLOATS * max(one.norm for one in ranks)
    return any(
        abs(one.projection - first.projection) > allowed or abs(one.norm - first.norm) > allowed for one in ranks
    )


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield the dataset and those nested in torch's own wrappers."""
    yield dataset
    if isinstance(dataset, Subset):
        yield from parts_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for one in dataset.datasets:
            yield from parts_of(one)


def _indices(owners: Iterable[Any]) -> float:
    """Return a checksum of the ``indices`` of subsets and samplers, or of a plain list of integers."""
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
    """Return the checksum of integers and shapes, and projection and norm of floats, over the datasets' arrays."""
    exact = 0
    projection = norm = 0.0
    for part in parts:
        values = part.tensors if isinstance(part, TensorDataset) else list(getattr(part, "__dict__", {}).values())
        # What the names in its code stand for: a dataset may read from a variable of the script.
        named = (one for one in randomness.holders(part, 1) if type(one) is types.SimpleNamespace)
        values = [*values, *(value for one in named for value in vars(one).values())]
        for value in (*values, part):
            if type(value) in (list, tuple) and len(value) == _length(part):
                plain, floats = _entries([*value[:_END_ITEMS], *value[-_END_ITEMS:]])
                exact = zlib.crc32(repr(plain).encode(), exact)
                projection += float(floats @ _signs()[: len(floats)])
                norm += float(floats.norm())
            tensor = _as_tensor(value)
            if tensor is None:
                continue
            exact = zlib.crc32(repr((tuple(value.shape), str(tensor.dtype))).encode(), exact)
            if tensor.device.type != "cpu" or tensor.is_complex():
                continue
            ends = _ends(tensor.detach())
            if tensor.is_floating_point():
                wide = ends.double().nan_to_num(0.0, 0.0, 0.0)
                projection += float(wide @ _signs()[: wide.numel()])
                norm += float(wide.norm())
            else:
                exact = zlib.crc32(_bytes(ends), exact)
    return float(exact), projection, norm


@functools.lru_cache(maxsize=1)
def _signs() -> torch.Tensor:
    """Return a fixed row of ±1."""
    bits = torch.randint(0, 2, (2 * _END_VALUES,), generator=torch.Generator().manual_seed(0))
    return bits.double() * 2 - 1


def _ends(values: Any) -> Any:
    """Return the first and last values of a tensor or array, flat: all of it, or at most `_END_VALUES` of each end."""
    if math.prod(values.shape) <= 2 * _END_VALUES:
        return values.reshape(-1)
    join = torch.cat if isinstance(values, torch.Tensor) else sys.modules["numpy"].concatenate
    return join([_end(values, first=True), _end(values, first=False)])


def _end(values: Any, *, first: bool) -> Any:
    # By rows: to flatten a view that is not contiguous copies all of it.
    while len(values.shape) > 1 and math.prod(values.shape[1:]) >= _END_VALUES:
        values = values[0 if first else -1]
    num_rows = max(1, _END_VALUES // max(1, math.prod(values.shape[1:])))
    return (values[:num_rows] if first else values[-num_rows:]).reshape(-1)


def _entries(samples: Sequence[Any]) -> tuple[list[Any], torch.Tensor]:
    """Return what identifies entries of a list of samples: integers and names of files, and the first floats of tensors."""
    plain: list[Any] = []
    floats: list[float] = []
    waiting = list(samples)
    for sample in waiting:  # grows
        if isinstance(sample, str | PathLike):
            plain.append(str(sample).rpartition("/")[2])  # the folder may differ between machines
        elif type(sample) in (list, tuple):
            waiting += sample[:_NUM_PARTS]
        elif isinstance(sample, int):
            plain.append(sample)
        elif type(sample) is torch.Tensor and sample.device.type == "cpu" and sample.layout is torch.strided:
            values = sample.detach().reshape(-1)[:_NUM_PARTS].tolist()
            (floats if sample.is_floating_point() else plain).extend(values)
    return plain, torch.tensor(floats[: 2 * _END_VALUES], dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor, or the ends of an array as one, flat; None for values that are not compared."""
    if type(value) is torch.Tensor:
        return value if value.layout is torch.strided and not value.is_quantized else None
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.kind not in "iufb":
        return None
    try:
        return torch.from_numpy(numpy.array(_ends(value)))  # a copy: the array may be read-only or memory-mapped
    except TypeError:  # a dtype that torch does not have
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


def _size(one: DatasetFingerprint) -> str:
    samples = f"{int(one.num_samples)} samples" if one.num_samples >= 0 else "samples without a length"
    return f"{samples} in batches of {int(one.batch_size)}" if one.batch_size else samples


def _count(number: float) -> str:
    return str(int(number)) if number >= 0 else "an unknown number of"


def _each(texts: Sequence[str]) -> str:
    listed = [f"rank {rank} has {text}" for rank, text in enumerate(texts[:_MAX_LISTED])]
    return ", ".join(listed) + (f" and so on, {len(texts)} ranks" if len(texts) > _MAX_LISTED else "")


def _differing_ranks(ranks: Sequence[DatasetFingerprint]) -> str:
    first = ranks[0]
    found = [
        str(rank)
        for rank, one in enumerate(ranks)
        if (one.indices, one.integers) != (first.indices, first.integers) or _floats_differ([first, one])
    ]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}"
