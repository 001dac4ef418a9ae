"""Classify the user's DataLoader and refuse what Evenload can't honour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from evenload.errors import ConfigError, DataError

_MAX_VALUES_SEARCHED = 100
"""Search only the start of a list that a sampler holds: a list of samplers is short, one of indices is long."""


def is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def check_loader(loader: Any) -> None:
    """Refuse a loader that can't be split exactly (DataError), or a setting that would have no effect (ConfigError)."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"expected a torch.utils.data.DataLoader, got {type(loader).__module__}.{type(loader).__qualname__}; "
            f"build a DataLoader whose batch_size is the global batch"
        )
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if own_iteration and not type(loader).__module__.startswith("torchdata."):
        raise DataError(
            f"{type(loader).__qualname__} overrides __iter__, which Evenload can't split over ranks; give a plain "
            f"DataLoader and move the override into the dataset, the sampler or the collate_fn"
        )
    if getattr(loader, "in_order", True) is False:
        raise ConfigError("DataLoader(in_order=False) has no effect: steps are always in order; remove it")
    if loader.num_workers > 0 and not loader.prefetch_factor:
        raise ConfigError("DataLoader(prefetch_factor=0) can't prefetch anything; set 1 or more, or leave it out")
    _check_samplers(loader)
    if is_stream(loader):
        _check_stream(loader)
    else:
        _check_map(loader)


def check_tuple(loaders: Sequence[Any]) -> None:
    """Refuse loaders that can't be read together in units, besides what `check_loader` refuses of each."""
    if not loaders:
        raise ConfigError("run.prepare received an empty tuple; give it DataLoaders: (labeled, unlabeled)")
    for index, loader in enumerate(loaders):
        check_loader(loader)
        if any(loader is other for other in loaders[:index]):
            raise ConfigError(
                f"loader {index} of the tuple is in it twice; build a DataLoader for each place (the dataset may be the same)"
            )
        if is_stream(loader):
            raise DataError(
                f"loader {index} of the tuple has an iterable dataset, which can't be read in units: every loader of a tuple "
                "needs a map-style dataset"
            )
        if not has_plain_batches(loader):
            raise DataError(
                f"loader {index} of the tuple has a batch_sampler, so its batches have no fixed size: give it a batch_size, and "
                "a sampler if need be"
            )
        if index:
            _check_restarting(loader, index)
    units = _units_of(loaders)
    sampler = loaders[0].sampler
    if isinstance(sampler, Sized) and not loaders[0].drop_last:
        check_whole_units(len(sampler), units)


def check_whole_units(num_samples: int, units: Sequence[int]) -> None:
    """Raise DataError if the first loader of a tuple ends within a unit; `units` are the samples of each loader in one."""
    if rest := num_samples % units[0]:
        raise DataError(
            f"the first loader of the tuple has {num_samples} samples, and its last batch ends within a unit of "
            f"{' + '.join(map(str, units))} samples ({rest} of {units[0]} are there): set drop_last=True, or batch sizes with "
            "another common divisor"
        )


def _units_of(loaders: Sequence[DataLoader[Any]]) -> tuple[int, ...]:
    sizes = [loader.batch_size or 1 for loader in loaders]
    return tuple(size // math.gcd(*sizes) for size in sizes)


def _check_restarting(loader: DataLoader[Any], index: int) -> None:
    if not isinstance(loader.sampler, Sized):
        raise DataError(
            f"loader {index} of the tuple restarts when it ends, and its sampler, {type(loader.sampler).__qualname__}, has no "
            "__len__ that tells when; add one"
        )
    if len(loader.sampler) < (loader.batch_size or 1):
        raise DataError(
            f"loader {index} of the tuple restarts when it ends and yields whole batches only, and its {len(loader.sampler)} "
            f"samples are no batch of {loader.batch_size}; set a smaller batch_size"
        )


def has_plain_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is not None


def is_plain_shuffle(sampler: Any) -> bool:
    """Return True for the sampler that ``shuffle=True`` creates, without a generator of the user's."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.generator is None
        and sampler.num_samples == len(sampler.data_source)
    )


def is_plain_draws(sampler: Any) -> bool:
    """Return True for torch's sampler with replacement, without a generator of the user's."""
    return type(sampler) is RandomSampler and sampler.replacement and sampler.generator is None


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    found: list[Any] = []
    waiting = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is None or any(sampler is other for other in found):
            continue
        found.append(sampler)
        for value in getattr(sampler, "__dict__", {}).values():
            inside = value if isinstance(value, list | tuple) else [value]
            waiting += [one for one in inside[:_MAX_VALUES_SEARCHED] if isinstance(one, Sampler)]
    return found


def _check_samplers(loader: DataLoader[Any]) -> None:
    for sampler in samplers_of(loader):
        # Other libraries' distributed samplers name the attribute as torch does.
        parts = getattr(sampler, "num_replicas", 1)
        given = sampler is loader.sampler or sampler is getattr(loader.batch_sampler, "sampler", None)
        if (isinstance(parts, int) and parts > 1) or (given and isinstance(sampler, DistributedSampler)):
            shuffle = getattr(sampler, "shuffle", True)
            raise DataError(
                f"the loader has a {type(sampler).__qualname__}, which gives each rank a part of the data, but Evenload "
                f"splits each global batch itself: remove the sampler and its set_epoch calls, and set "
                f"shuffle={bool(shuffle)} (batch_size is the global batch)"
            )


def _check_stream(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterDataPipe):
        raise DataError(
            "the dataset is an IterDataPipe, which shards itself over ranks on its own; make it an IterableDataset (a "
            "subclass with __iter__)"
        )
    if loader.batch_size is None:
        raise DataError(
            "DataLoader(batch_size=None) over an iterable dataset yields whole batches, which can't be split over ranks; "
            "let the dataset yield samples, and set batch_size to the global batch"
        )


def _check_map(loader: DataLoader[Any]) -> None:
    if loader.batch_sampler is None:
        raise DataError(
            "DataLoader(batch_size=None) has no batches to split over ranks; set batch_size to the global batch"
        )
    dataset: Any = loader.dataset
    is_odd = isinstance(dataset, str | bytes) or (
        isinstance(dataset, Mapping)
        and isinstance(loader.sampler, SequentialSampler | RandomSampler)
        and 0 not in dataset
    )
    if is_odd or (not hasattr(loader.dataset, "__getitem__") and not hasattr(loader.dataset, "__getitems__")):
        raise DataError(
            f"the dataset, {type(loader.dataset).__qualname__}, {'is no dataset' if is_odd else 'has no __getitem__'}: give the "
            "DataLoader an object with __getitem__(index) and __len__ (a list of samples is one), or an IterableDataset"
        )
    if isinstance(loader.sampler, BatchSampler) and has_plain_batches(loader):
        raise DataError(
            "the loader has a sampler that yields batches, of which it would make batches: give it as batch_sampler=, without "
            "batch_size, shuffle and drop_last"
        )
    if isinstance(loader.dataset, Sized) and len(loader.dataset) == 0:
        raise DataError(f"the dataset, {type(loader.dataset).__qualname__}, is empty; give at least one sample")
    if not has_plain_batches(loader) or not isinstance(loader.sampler, Sized):
        return
    num_samples = len(loader.sampler)
    if num_samples == 0:
        raise DataError(f"the sampler, {type(loader.sampler).__qualname__}, is empty; give at least one sample")
    if loader.drop_last and loader.batch_size is not None and num_samples < loader.batch_size:
        raise DataError(
            f"batch_size={loader.batch_size} with drop_last=True and {num_samples} samples leaves no step; set "
            f"a batch_size of at most {num_samples}, or drop_last=False"
        )
