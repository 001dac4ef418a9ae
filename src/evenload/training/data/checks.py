"""What kind of loader the user gave, and a clear error for what can't be honoured."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe, RandomSampler, Sampler

from evenload.errors import ConfigError, DataError

_MOST_INSIDE = 100
"""Of a list that a sampler holds so many are looked at: one of samplers is short, one of indices long."""


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether the dataset is iterable: it can't be asked for a sample by key."""
    return isinstance(loader.dataset, IterableDataset)


def check_loader(loader: Any) -> None:
    """Refuses what can't be exact or can't be honoured.

    Raises:
        ConfigError: not a DataLoader, or a setting of it that would have no effect.
        DataError: a dataset, sampler or batch size that can't be split over ranks.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"expected a torch.utils.data.DataLoader, got {type(loader).__module__}.{type(loader).__qualname__}; "
            f"build a DataLoader whose batch_size is the global batch"
        )
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if own_iteration and not type(loader).__module__.startswith("torchdata."):
        raise DataError(
            f"{type(loader).__qualname__} has an __iter__ of its own, which can't be split over ranks; give a plain "
            f"DataLoader, with what it does in the dataset, the sampler or the collate_fn"
        )
    if getattr(loader, "in_order", True) is False:
        raise ConfigError("DataLoader(in_order=False) has no effect: steps come in their exact order; remove it")
    if loader.num_workers > 0 and not loader.prefetch_factor:
        raise ConfigError("DataLoader(prefetch_factor=0) can't deliver anything; set 1 or more, or leave it out")
    _check_samplers(loader)
    if is_stream(loader):
        _check_stream(loader)
    else:
        _check_map(loader)


def has_plain_batches(loader: DataLoader[Any]) -> bool:
    """Whether batches are `batch_size` keys of the sampler, not lists of the user's batch_sampler."""
    return loader.batch_size is not None


def is_plain_shuffle(sampler: Any) -> bool:
    """Whether this is what ``shuffle=True`` makes, with nothing of the user's in it."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.generator is None
        and sampler.num_samples == len(sampler.data_source)
    )


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """The sampler, the batch sampler and the samplers that these hold, at any depth, each once."""
    found: list[Any] = []
    waiting = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is None or any(sampler is other for other in found):
            continue
        found.append(sampler)
        for value in getattr(sampler, "__dict__", {}).values():
            inside = value if isinstance(value, list | tuple) else [value]
            waiting += [one for one in inside[:_MOST_INSIDE] if isinstance(one, Sampler)]
    return found


def _check_samplers(loader: DataLoader[Any]) -> None:
    for sampler in samplers_of(loader):
        # Those of other libraries that split the data over ranks are spelled like torch's own.
        parts = getattr(sampler, "num_replicas", 1)
        given = sampler is loader.sampler or sampler is getattr(loader.batch_sampler, "sampler", None)
        if (isinstance(parts, int) and parts > 1) or (given and isinstance(sampler, DistributedSampler)):
            shuffle = getattr(sampler, "shuffle", True)
            raise DataError(
                f"the loader has a {type(sampler).__qualname__}, which gives each rank a part of the data; Evenload "
                f"splits each global batch itself: remove it and set shuffle={bool(shuffle)} (batch_size is the global batch); "
                "calls of its set_epoch go too"
            )


def _check_stream(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterDataPipe):
        raise DataError(
            "the dataset is an IterDataPipe, which shards itself over ranks behind the loader's back; make it an "
            "IterableDataset (an object with __iter__ that subclasses it)"
        )
    if loader.batch_size is None:
        raise DataError(
            "DataLoader(batch_size=None) over an iterable dataset: it gives whole batches, which can't be split over "
            "ranks; let it give samples, and set batch_size to the global batch"
        )


def _check_map(loader: DataLoader[Any]) -> None:
    if loader.batch_sampler is None:
        raise DataError(
            "DataLoader(batch_size=None) has no batches to split over ranks; set batch_size to the global batch"
        )
    if not hasattr(loader.dataset, "__getitem__") and not hasattr(loader.dataset, "__getitems__"):
        raise DataError(
            f"the dataset, {type(loader.dataset).__qualname__}, has neither __getitem__ nor is it an IterableDataset"
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
            f"batch_size={loader.batch_size} with drop_last=True and {num_samples} samples makes no step at all; set "
            f"a batch_size of at most {num_samples}, or drop_last=False"
        )
