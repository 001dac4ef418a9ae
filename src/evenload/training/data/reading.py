"""What a loader worker does: read the samples of one task, each with randomness of its own, and collate them."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from evenload.training.data import randomness
from evenload.training.data.tuning import Reading

_WORKER_NICENESS = 10


@dataclass(frozen=True, slots=True)
class Task:
    """Samples to be read and collated together."""

    epoch: int
    low: int
    """Global position of the first sample; the others follow."""
    keys: tuple[Any, ...]
    """The dataset's keys; none: nothing is to be read."""
    serial: int = -1
    """Number in the order of sending; -1 where it isn't sent through a queue."""

    @property
    def span(self) -> tuple[int, int]:
        """Global positions ``[low, high)``."""
        return self.low, self.low + len(self.keys)


_WORKER_INFO = ("id", "num_workers", "seed", "dataset")


class Skipped:
    """Stands for a task that was called off, or was empty."""


class TaskReader(Dataset[Any]):
    """The user's dataset behind a door that takes tasks; lives in every worker.

    Keyed randomness: before each sample the global generators are seeded by (seed, epoch, global position), before
    collation by the position of the first sample. A dataset with ``__getitems__`` reads a whole task in one call, so it
    is seeded once, by the task's first position: its random draws depend on how the batch is split.

    Args:
        cancelled: shared flags by ``serial % len``; a task whose flag is up is left, between two samples at the latest.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        *,
        seed: int,
        keyed: bool,
        cancelled: Any = None,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._seed = seed
        self._keyed = keyed and not (draws_nothing(dataset) and collate_fn is default_collate)
        self._cancelled = cancelled
        self._cuts = collate_fn is default_collate and _has_columns(dataset)

    def __getitems__(self, task: Task) -> Any:
        """Reads and collates; torch's fetcher passes whatever the batch sampler gave."""
        if not self._keyed or get_worker_info() is not None:
            return self._read(task)
        with randomness.forked():
            return self._read(task)

    def _read(self, task: Task) -> Any:
        flags, flag = self._cancelled, -1
        if flags is not None and task.serial >= 0:
            flag = task.serial % len(flags)
        if not task.keys or (flag >= 0 and flags[flag]):
            return Skipped()
        if self._cuts and (found := _cut(self.dataset, task.keys)) is not None:
            return found
        seed = randomness.mix(self._seed, task.epoch, randomness.SAMPLE)
        if reads_in_batches(self.dataset):
            if self._keyed:
                randomness.reseed(randomness.mix(seed, task.low))
            samples = self.dataset.__getitems__(list(task.keys))
        else:
            samples = []
            for position, key in enumerate(task.keys, start=task.low):
                if flag >= 0 and flags[flag]:
                    return Skipped()
                if self._keyed:
                    randomness.reseed(randomness.mix(seed, position))
                samples.append(self.dataset[key])
        if self._keyed:
            randomness.reseed(randomness.mix(self._seed, task.epoch, randomness.COLLATE, task.low))
        return self.collate_fn(samples)


def reads_in_batches(dataset: Any) -> bool:
    """Whether ``__getitems__`` is the dataset's own; torch's Subset has one that may only loop."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def draws_nothing(dataset: Any) -> bool:
    """Whether reading surely draws no random number, so that seeding for each sample would be for nothing."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor)


def _has_columns(dataset: Any) -> bool:
    """Whether this is a TensorDataset, below any Subset: it is cut for a whole task at once, not sample by sample."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return False
    return all(type(column) is torch.Tensor and column.layout is torch.strided for column in dataset.tensors)


def _cut(dataset: Any, keys: Sequence[Any]) -> list[torch.Tensor] | None:
    """What default_collate makes of these samples, bit for bit; None for keys that are no integers."""
    while type(dataset) is Subset:
        keys = [dataset.indices[key] for key in keys]
        dataset = dataset.dataset
    if set(map(type, keys)) != {int}:
        return None
    index = torch.tensor(keys)
    return [column[index] for column in dataset.tensors]


def as_read(data: Any) -> Any:
    """The inner loader's collate_fn: the reader has collated already."""
    return data


class WorkerInit:
    """Shows the user's worker_init_fn, and the dataset, the user's own dataset in `get_worker_info().dataset`."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn
        # Asked here, not in the worker: CUDA can't be looked at after a fork.
        self._gives_way = not torch.cuda.is_available()

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker, before it reads."""
        if self._gives_way:
            # Ranks that compute on the same cores go first: reading ahead fills the gaps, and their times stay comparable.
            os.nice(_WORKER_NICENESS)
        info: Any = get_worker_info()
        own = info.dataset.dataset
        # Before torch 2.13 it was no dataclass; these four are all it held.
        known = [field.name for field in dataclasses.fields(info)] if dataclasses.is_dataclass(info) else _WORKER_INFO
        shown = {name: getattr(info, name) for name in known}
        torch_worker._worker_info = type(info)(**{**shown, "dataset": own})
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def reading_of(loader: DataLoader[Any], *, pinned: bool) -> Reading:
    """What the user's loader asks for."""
    return Reading(loader.num_workers, (loader.prefetch_factor or 0) if loader.num_workers else 0, pinned)


def inner_loader(loader: DataLoader[Any], dataset: Any, reading: Reading, **batching: Any) -> DataLoader[Any]:
    """A torch DataLoader over `dataset` with the settings of the user's loader.

    Args:
        loader: the user's.
        dataset: what the workers read.
        reading: how many workers there are, how far ahead they read, and whether torch pins what they give.
        batching: batch_sampler, batch_size, drop_last, collate_fn of the inner loader.
    """
    workers: dict[str, Any] = {}
    if reading.num_workers > 0:
        workers = {
            "prefetch_factor": reading.prefetch,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": WorkerInit(loader.worker_init_fn),
            "timeout": loader.timeout,
        }
    with quiet():
        return DataLoader(
            dataset,
            num_workers=reading.num_workers,
            pin_memory=reading.pinned,
            generator=torch.Generator(),
            **workers,
            **batching,
        )


def seed_workers(inner: DataLoader[Any], generator: torch.Generator | None, *parts: int) -> None:
    """Fixes the base seed of the workers that `inner` starts next; a generator the user gave counts in."""
    own = 0 if generator is None else generator.initial_seed()
    inner.generator.manual_seed(randomness.mix(randomness.WORKERS, own, *parts))


@contextmanager
def quiet() -> Iterator[None]:
    """Torch has told the user once that there are more workers than cores; the inner loader need not repeat it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def end_workers(iterator: Any) -> None:
    """Ends the worker processes of a DataLoader's iterator now, not when it is garbage-collected."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is None:
        return
    shutdown()
    for queue in getattr(iterator, "_index_queues", ()):
        if (thread := getattr(queue, "_thread", None)) is not None:
            thread.join(timeout=0.5)  # it has nothing more to send; torch leaves it to end some time
