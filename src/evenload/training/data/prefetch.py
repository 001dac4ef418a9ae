"""Prefetch samples through a queue to the loader's workers, with plans that may change.

Note [The queue]
  Torch's DataLoader keeps ``prefetch_factor * num_workers`` tasks outstanding: it sends one for each that it receives, in
  order. It pulls them from an endless sampler here, so its queue always stays full:

  - tasks requested at once (a changed share of the present step) go first,
  - then the tasks of the next micro-batches under the plans known now,
  - and an empty task where nothing is left to prefetch.

  When a decision changes a plan, sent tasks that are no longer needed are cancelled: a flag in shared memory makes a worker
  leave such a task before its next sample, its result is dropped, and it is replaced as soon as it is at the head of the
  queue. So the rank waits for at most the one sample that a worker is reading.

  Without workers there is no queue: the rank reads a task when it is requested.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenload.errors import DataError
from evenload.training.data.batches import pin as pin_batch
from evenload.training.data.killed_workers import WorkerKilledError, await_workers, find_dead_worker, iterate
from evenload.training.data.reading import (
    ReadTask,
    TaskDataset,
    ignore_worker_warnings,
    inner_loader,
    pass_through,
    seed_workers,
    shut_down_workers,
)
from evenload.training.data.tuning import ReadSettings, SettingsOrigin
from evenload.training.launch.print_once import warn_once

Span = tuple[int, int]
_EMPTY = ReadTask(epoch=0, low=0, keys=())
_MOST_RESTARTS = 3
"""Times in an epoch that workers are started again, of which one was killed."""


class _FailedRead:
    def __init__(self, error: Exception) -> None:
        self.error = error


class Prefetcher:
    """Return collated samples for tasks, prefetched where there are workers. `rank` counts in the workers' base seed."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int, keyed: bool, reading: ReadSettings) -> None:
        self._loader = loader
        self._seed, self._rank, self._keyed = seed, rank, keyed
        self.reading: ReadSettings
        self.rows: Callable[[torch.Tensor], list[torch.Tensor]] | None = None
        """Reads the samples of an index at once; None where samples are read by tasks."""
        self._local_reader = TaskDataset(loader.dataset, loader.collate_fn, seed=seed, keyed=keyed)
        self._iterator: Any = None
        self._open = False
        self._num_restarts = 0
        self._wanted: Callable[[], Iterator[ReadTask]] = lambda: iter(())
        self._source: Iterator[ReadTask] = iter(())  # tasks that will be requested, in order
        self._peeked: ReadTask | None = None  # the first task of the source, not yet sent
        self._urgent: deque[ReadTask] = deque()
        self._overtaken: set[Span] = set()  # requested early; the source still contains them
        self._num_sent = 0
        self._queue: deque[tuple[int, Span]] = deque()  # outstanding, in the order of sending: serial and span
        self._live: dict[Span, int] = {}  # serials of tasks sent and not cancelled, outstanding or ready
        self._ready: dict[Span, Any] = {}
        self._set(reading)

    def change(self, reading: ReadSettings) -> bool:
        """Switch to other workers and return True if tasks must be prefetched again; keyed samples are the same."""
        if reading == dataclasses.replace(self.reading, origin=reading.origin):
            self.reading = reading
            return False
        for span in list(self._live):
            self._cancel(span)
        self.close()
        self._set(reading)
        return True

    def read_ahead(self, epoch: int, wanted: Callable[[], Iterator[ReadTask]]) -> None:
        """Prefetch the tasks that each call of `wanted` yields, in order; cancel sent tasks that are not among them."""
        self._open = True
        if not self._depth:
            return
        if self._live:
            last = max(low for low, _ in self._live)
            still: set[Span] = set()
            for task in wanted():
                if task.low > last:
                    break
                still.add(task.span)
            for span in [span for span in self._live if span not in still]:
                self._cancel(span)
        self._wanted = wanted
        self._source, self._peeked = wanted(), None
        self._overtaken.clear()
        try:
            self._start(epoch)
            self._refill()
        except WorkerKilledError as error:
            self._start_again(error)
        except Exception as error:
            if self.reading.origin is SettingsOrigin.USER:
                raise
            self._disable_workers(error)

    def get(self, task: ReadTask) -> Any:
        """Return the collated samples of a task, reading them now where they were not prefetched; raise the dataset's errors."""
        if not self._depth or self.workers_failed:
            return self._read_locally(task)
        try:
            return self._receive(task)
        except WorkerKilledError as error:
            self._start_again(error)
            return self.get(task)
        except Exception as error:
            if self.reading.origin is SettingsOrigin.USER:
                raise
            data = self._read_locally(task)  # raises the dataset's own error
            self._disable_workers(error)
            return data

    def pause(self) -> None:
        """End or leave the epoch: cancel all tasks, and shut down workers that are not persistent."""
        for span in list(self._live):
            self._cancel(span)
        self._urgent.clear()
        self._source, self._peeked = iter(()), None
        self._open = False
        self._num_restarts = 0
        if not self._loader.persistent_workers:
            self.close()

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        self._source, self._peeked = iter(()), None
        for held in (self._urgent, self._queue, self._live, self._ready):
            held.clear()
        if iterator is not None:
            shut_down_workers(iterator)

    def _set(self, reading: ReadSettings) -> None:
        self.reading = reading
        self.workers_failed = False  # only of workers that the user did not set
        self._depth = reading.depth
        self.rows = None if self._depth or reading.pinned else self._local_reader.rows
        # A shared byte for each task outstanding, and some to spare.
        self._cancelled = multiprocessing.RawArray("B", max(1024, 4 * self._depth)) if self._depth else None
        self._inner: DataLoader[Any] | None = None
        if self._depth:
            reader = TaskDataset(
                self._loader.dataset,
                self._loader.collate_fn,
                seed=self._seed,
                keyed=self._keyed,
                cancelled=self._cancelled,
            )
            self._inner = inner_loader(
                self._loader, reader, reading, batch_sampler=iter(self._next_task, None), collate_fn=pass_through
            )

    def _start_again(self, error: WorkerKilledError) -> None:
        """Discard the workers, of which one was killed; new ones start with the next read. Raise if that happens often."""
        if self.reading.origin is not SettingsOrigin.USER:
            self.close()
            self._disable_workers(error)
            return
        if self._num_restarts == _MOST_RESTARTS:
            raise DataError(f"{error}. The workers of this epoch were started again {_MOST_RESTARTS} times") from None
        self._num_restarts += 1
        warnings.warn(f"{error}. The workers start again ({self._num_restarts} of {_MOST_RESTARTS})", stacklevel=2)
        self.close()
        self._set(self.reading)  # torch would use persistent workers again
        self._source = self._wanted()
        self._overtaken.clear()

    def _disable_workers(self, error: Exception) -> None:
        """Continue without workers that the user did not ask for."""
        self.workers_failed = True
        warn_once(
            f"num_workers='auto': a loader worker failed with {type(error).__name__}, but the rank itself can read the same "
            "samples; continuing without workers"
        )

    def _read_locally(self, task: ReadTask) -> Any:
        data = self._local_reader.__getitems__(task)
        # Workers pin in parallel with the step; pinning here would take as long as it saves.
        return pin_batch(data) if self.reading.pinned and self.reading.origin is SettingsOrigin.USER else data

    def _receive(self, task: ReadTask) -> Any:
        span = task.span
        if span not in self._live:
            self._urgent.append(task)
            self._overtaken.add(span)
            self._start(task.epoch)
        while span not in self._ready:
            self._pop_result()
        result = self._ready.pop(span)
        del self._live[span]
        if self._open:
            self._refill()
        else:  # a batch requested after its loop was left
            self.pause()
        if isinstance(result, _FailedRead):
            raise result.error
        return result

    def _start(self, epoch: int) -> None:
        if self._iterator is None and self._inner is not None:
            seed_workers(self._inner, self._loader.generator, self._seed, epoch, self._rank)
            with ignore_worker_warnings():
                self._iterator = iterate(self._inner)  # starts the workers and fills the queue

    def _cancel(self, span: Span) -> None:
        serial = self._live.pop(span)
        if span in self._ready:
            del self._ready[span]
        elif self._cancelled is not None:
            self._cancelled[serial % len(self._cancelled)] = 1

    def _next_task(self) -> ReadTask:
        """Return the next task to send: an urgent one, one to prefetch, or an empty task that keeps the queue full."""
        task = self._urgent.popleft() if self._urgent else self._pop_ahead()
        serial = self._num_sent
        self._num_sent += 1
        self._queue.append((serial, task.span))
        if task.keys:
            self._live[task.span] = serial
        if self._cancelled is not None:
            self._cancelled[serial % len(self._cancelled)] = 0
        return task._replace(serial=serial)

    def _pop_ahead(self) -> ReadTask:
        task = self._peek() or _EMPTY
        self._peeked = None
        return task

    def _is_sent(self, task: ReadTask) -> bool:
        return task.span in self._live or task.span in self._overtaken

    def _peek(self) -> ReadTask | None:
        # One more than the depth: a task is sent just before the one taken for it leaves `_live`.
        if self._peeked is not None and self._is_sent(self._peeked):
            self._peeked = None
        if self._peeked is None and len(self._live) <= self._depth:
            self._peeked = next((task for task in self._source if not self._is_sent(task)), None)
        return self._peeked

    def _refill(self) -> None:
        """Replace cancelled and empty tasks at the head of the queue."""
        for _ in range(len(self._queue)):
            serial, span = self._queue[0]
            if self._live.get(span) == serial or self._peek() is None:
                return
            self._pop_result()

    def _pop_result(self) -> None:
        num_sent = self._num_sent
        try:
            with await_workers(self._iterator):
                data = next(self._iterator)
        except StopIteration as stop:
            raise DataError("the loader's workers ended although samples are still wanted") from stop
        except WorkerKilledError:
            raise
        except Exception as error:
            if self._num_sent == num_sent:
                # Not an error of the task: a worker died or timed out.
                if (dead := find_dead_worker(self._iterator, error)) is not None:
                    raise dead from None
                raise
            data = _FailedRead(error)
        serial, span = self._queue.popleft()
        if self._live.get(span) == serial:
            self._ready[span] = data
