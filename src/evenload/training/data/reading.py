"""Read and collate one task's samples, with keyed randomness; the code that loader workers run."""

from __future__ import annotations

import dataclasses
import operator
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from evenload.errors import ConfigError, DataError
from evenload.hardware import temporary_path_problem
from evenload.training.data import randomness
from evenload.training.data.batches import leaves_of
from evenload.training.data.fingerprint import parts_of
from evenload.training.data.tuning import ReadSettings

_WORKER_NICENESS = 10


class ReadTask(NamedTuple):
    """Samples to read and collate together."""

    epoch: int
    low: int
    """Global position of the first sample; the others follow."""
    keys: tuple[Any, ...]
    """Empty where nothing is to be read."""
    serial: int = -1
    """Position in the order of sending; -1 outside a queue."""

    @property
    def span(self) -> tuple[int, int]:
        return self.low, self.low + len(self.keys)


_WORKER_INFO = ("id", "num_workers", "seed", "dataset")


class SkippedRead:
    """The result of a task that was cancelled or empty."""


class PartialRead(NamedTuple):
    """The result of a task where the dataset returned None for some samples, which `collate_fn` left out."""

    data: Any
    num_samples: int


class TaskDataset(Dataset[Any]):
    """The user's dataset, indexed by tasks; each worker has one.

    Keyed randomness: the global generators, and those that the dataset and `collate_fn` hold or name, are seeded by (seed,
    epoch, global position) before each sample, and by the position of the first sample before collation. A dataset with
    ``__getitems__`` reads a whole task in one call while it draws nothing from these generators. Its first draw is discarded,
    and it reads one sample at a time from then on.

    `cancelled` has shared flags by ``serial % len``; a task whose flag is set is left before its next sample.
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
        self._keyed = keyed and not (is_deterministic(dataset) and collate_fn is default_collate)
        self._cancelled = cancelled
        self._found: tuple[int, list[Any]] = -1, []
        """Generators of the script's own, as found in an epoch."""
        self._is_tabular = collate_fn is default_collate and _has_columns(dataset)
        self._reads_in_batches = reads_in_batches(dataset)
        self.rows = partial(_take_rows, dataset) if self._is_tabular and type(dataset) is TensorDataset else None
        """Reads and collates the samples of an index; None where samples must be read by tasks."""

    def __getitems__(self, task: ReadTask) -> Any:
        """Read and collate; torch's fetcher passes on whatever the batch sampler yields."""
        if not self._keyed or get_worker_info() is not None:
            return self._read(task)
        with randomness.forked(self._own(task.epoch)):
            return self._read(task)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": (-1, [])}  # another process has its own

    def _own(self, epoch: int) -> list[Any]:
        """Return the generators of the script's own; left alone each rank would draw the same numbers, for other samples."""
        if self._found[0] != epoch:
            owners = (*parts_of(self.dataset), self.collate_fn) if self._keyed else ()
            holders = (one for owner in owners for one in randomness.holders(owner))
            self._found = epoch, randomness.find_generators(holders)
        return self._found[1]

    def _read(self, task: ReadTask) -> Any:
        flags, flag = self._cancelled, -1
        if flags is not None and task.serial >= 0:
            flag = task.serial % len(flags)
        if not task.keys or (flag >= 0 and flags[flag]):
            return SkippedRead()
        if self._is_tabular and (found := _index_columns(self.dataset, task.keys)) is not None:
            return found
        own = self._own(task.epoch)
        samples = self._read_in_batch(task, own) if self._reads_in_batches else None
        if samples is None:
            samples = []
            seed = randomness.mix(self._seed, task.epoch, randomness.SAMPLE)
            by_list = reads_in_batches(self.dataset)
            for position, key in enumerate(task.keys, start=task.low):
                if flag >= 0 and flags[flag]:
                    return SkippedRead()
                if self._keyed:
                    randomness.reseed(randomness.mix(seed, position), own)
                samples.append(self.dataset.__getitems__([key])[0] if by_list else self.dataset[key])
        if self._keyed:
            randomness.reseed(randomness.mix(self._seed, task.epoch, randomness.COLLATE, task.low), own)
        return collate(self.collate_fn, samples, task.keys[0])

    def _read_in_batch(self, task: ReadTask, own: list[Any]) -> Any:
        """Return the samples from one call; None if that drew random numbers, which would depend on the split."""
        if self._keyed:
            randomness.reseed(randomness.mix(self._seed, task.epoch, randomness.SAMPLE, task.low), own)
            before = randomness.comparable_state(own)
        samples = self.dataset.__getitems__(list(task.keys))
        # Anything but a list is a whole batch for the user's own collate_fn, which can't be joined from single samples.
        if not self._keyed or not isinstance(samples, list):
            return samples
        if randomness.comparable_state(own) == before:
            return samples
        self._reads_in_batches = False
        return None


def collate(collate_fn: Callable[[list[Any]], Any], samples: Any, first: Any) -> Any:
    """Return the batch, or a `PartialRead` where `collate_fn` left out the samples that are None; `first` names the first."""
    if not isinstance(samples, list) or (num_left := sum(sample is not None for sample in samples)) == len(samples):
        return collate_fn(samples)
    try:
        data = collate_fn(samples)
    except Exception as error:
        if num_left:
            raise
        raise DataError(
            f"the dataset returned None for all {len(samples)} samples of a device's part of a batch (the first is {first!r}), "
            "and collate_fn failed: is its return missing? If these are no samples, leave them out before training: "
            "Subset(dataset, good_indices)"
        ) from error
    sizes = [leaf.size(0) for leaf in leaves_of(data) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    # Zeros or noise may stand for them: then a batch has the rows of all samples.
    has_all = sizes.count(len(samples)) > sizes.count(num_left) or not (num_left or 0 in sizes)
    return data if has_all else PartialRead(data, num_left)


def reads_in_batches(dataset: Any) -> bool:
    """Return True if ``__getitems__`` is the dataset's own: torch's Subset has one that may only loop."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def is_deterministic(dataset: Any) -> bool:
    """Return True if reading draws no random numbers, so that seeding each sample is needless."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor)


def _has_columns(dataset: Any) -> bool:
    """Return True for a TensorDataset, below any Subset, which is indexed by a whole task at once."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return False
    return all(type(column) is torch.Tensor and column.layout is torch.strided for column in dataset.tensors)


def _index_columns(dataset: Any, keys: Sequence[Any]) -> list[torch.Tensor] | None:
    """Return exactly what default_collate makes of these samples; None for keys that are not integers."""
    while type(dataset) is Subset:
        keys = [dataset.indices[key] for key in keys]
        dataset = dataset.dataset
    if set(map(type, keys)) != {int}:
        return None
    return _take_rows(dataset, torch.from_numpy(np.array(keys, dtype=np.int64)))  # a list takes three times as long


def _take_rows(dataset: TensorDataset, index: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of each column, collated."""
    try:
        return list(map(operator.methodcaller("index_select", 0, index), dataset.tensors))  # twice as fast
    except (IndexError, RuntimeError):  # keys below 0, or columns on a GPU
        return [column[index] for column in dataset.tensors]


def pass_through(data: Any) -> Any:
    """Collate nothing: `TaskDataset` has collated already."""
    return data


class WorkerInit:
    """Run the user's worker_init_fn with the user's own dataset in `get_worker_info().dataset`."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn
        # Checked here, not in the worker: CUDA can't be queried after a fork.
        self._lowers_priority = not torch.cuda.is_available()

    def __call__(self, worker_id: int) -> None:
        if self._lowers_priority:
            # Ranks that compute on the same cores go first: prefetching fills the gaps, and their times stay comparable.
            os.nice(_WORKER_NICENESS)
        info: Any = get_worker_info()
        own = info.dataset.dataset
        # Before torch 2.13 it was no dataclass; these four were all its fields.
        known = [field.name for field in dataclasses.fields(info)] if dataclasses.is_dataclass(info) else _WORKER_INFO
        shown = {name: getattr(info, name) for name in known}
        torch_worker._worker_info = type(info)(**{**shown, "dataset": own})
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def read_settings(loader: DataLoader[Any], *, pinned: bool) -> ReadSettings:
    return ReadSettings(loader.num_workers, (loader.prefetch_factor or 0) if loader.num_workers else 0, pinned)


def inner_loader(loader: DataLoader[Any], dataset: Any, reading: ReadSettings, **batching: Any) -> DataLoader[Any]:
    """Return a torch DataLoader over `dataset` with the settings of the user's loader, `reading` and `batching`.

    ConfigError: workers could not send what they read, because the path of the temporary folder is too long.
    """
    workers: dict[str, Any] = {}
    if reading.num_workers > 0:
        if problem := temporary_path_problem(tempfile.gettempdir()):
            raise ConfigError(f"num_workers={reading.num_workers}: {problem}")
        workers = {
            "prefetch_factor": reading.prefetch,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": WorkerInit(loader.worker_init_fn),
            "timeout": loader.timeout,
        }
    with ignore_worker_warnings():
        return DataLoader(
            dataset,
            num_workers=reading.num_workers,
            pin_memory=reading.pinned,
            generator=torch.Generator(),
            **workers,
            **batching,
        )


def seed_workers(inner: DataLoader[Any], generator: torch.Generator | None, *parts: int) -> None:
    """Fix the base seed of the workers that `inner` starts next; the user's generator counts in."""
    own = 0 if generator is None else generator.initial_seed()
    inner.generator.manual_seed(randomness.mix(randomness.WORKERS, own, *parts))


@contextmanager
def ignore_worker_warnings() -> Iterator[None]:
    """Suppress the warning about more workers than cores, which torch gave for the user's loader already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def shut_down_workers(iterator: Any) -> None:
    """Shut down the workers of a DataLoader's iterator now, not when it is garbage-collected."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is None:
        return
    shutdown()
    for queue in getattr(iterator, "_index_queues", ()):
        if (thread := getattr(queue, "_thread", None)) is not None:
            thread.join(timeout=0.5)  # it has nothing left to send; torch does not wait for it
