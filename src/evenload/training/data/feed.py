"""Reading ahead: the queue between a rank and its loader workers, in which plans may change.

Note [ The queue ]
~~~~~~~~~~~~~~~~~~
Torch's DataLoader keeps ``prefetch_factor * num_workers`` tasks outstanding: one is sent for each that is taken, and
they are taken in the order of sending. We let it pull an endless sampler, so its queue always stays full:

- what is asked for at once (a changed cut of the present step) goes first,
- then the tasks of the next micro-batches under the plans known now,
- and where nothing is left to be read ahead, an empty task.

When a decision changes a plan, tasks sent that nobody will ask for are called off: a flag in shared memory makes a
worker leave such a task before its next sample, its result is dropped, and as soon as it stands at the head of the
queue it is replaced. So at most the one sample a worker is in the middle of is ever waited for.

Without workers there is no queue: the rank reads a task where it is asked for.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from torch.utils.data import DataLoader

from evenload.errors import DataError
from evenload.training.data.batches import pin as pin_batch
from evenload.training.data.reading import (
    Task,
    TaskReader,
    as_read,
    end_workers,
    inner_loader,
    quiet,
    seed_workers,
)
from evenload.training.data.tuning import How, Reading

Span = tuple[int, int]
_EMPTY = Task(epoch=0, low=0, keys=())


class _Failure:
    """An error of a task read ahead; raised when the task is asked for."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Endless:
    """The inner loader's batch sampler: asks the feed what to send next."""

    def __init__(self, following: Callable[[], Task]) -> None:
        self._following = following

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        return self._following()


class TaskFeed:
    """Gives collated samples for tasks, reading ahead where there are workers.

    Args:
        loader: the user's, map-style.
        rank: part of the workers' base seed, which differs by rank.
        keyed: whether randomness inside the dataset is keyed by global position.
        reading: the workers.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int, keyed: bool, reading: Reading) -> None:
        self._loader = loader
        self._seed, self._rank, self._keyed = seed, rank, keyed
        self.reading: Reading
        self._here = TaskReader(loader.dataset, loader.collate_fn, seed=seed, keyed=keyed)
        self._iterator: Any = None
        self._open = False
        self._source: Iterator[Task] = iter(())  # what will be asked for, in order
        self._peeked: Task | None = None  # the first of it, looked at and not yet sent
        self._urgent: deque[Task] = deque()
        self._overtaken: set[Span] = set()  # asked for before their turn; the source still names them
        self._num_sent = 0
        self._queue: deque[tuple[int, Span]] = deque()  # outstanding, in the order of sending: serial and span
        self._live: dict[Span, int] = {}  # sent and wanted, whether outstanding or ready: the serial
        self._ready: dict[Span, Any] = {}
        self._set(reading)

    def change(self, reading: Reading) -> bool:
        """Other workers from now on; what the old ones had read ahead is read again, which by key is the same.

        Returns:
            Whether there is anything to be read ahead anew.
        """
        if reading == dataclasses.replace(self.reading, how=reading.how):
            self.reading = reading
            return False
        for span in list(self._live):
            self._call_off(span)
        self.close()
        self._set(reading)
        return True

    def read_ahead(self, epoch: int, wanted: Callable[[], Iterator[Task]]) -> None:
        """Sets what will be asked for, in order, and calls off what was sent and isn't in it.

        Args:
            epoch: part of the base seed of workers started now.
            wanted: gives the tasks from now to the end of the epoch, positions rising; called anew each time.
        """
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
                self._call_off(span)
        self._source, self._peeked = wanted(), None
        self._overtaken.clear()
        try:
            self._start(epoch)
            self._refill()
        except Exception as error:
            if self.reading.how is How.GIVEN:
                raise
            self._refuse(error)

    def get(self, task: Task) -> Any:
        """The collated samples of a task; reads them now where they weren't read ahead.

        Raises:
            Exception: whatever the dataset, the collate_fn or a worker raised.
        """
        if not self._depth or self.refused:
            return self._read_here(task)
        try:
            return self._receive(task)
        except Exception as error:
            if self.reading.how is How.GIVEN:
                raise
            data = self._read_here(task)  # raises what is wrong with the dataset itself
            self._refuse(error)
            return data

    def pause(self) -> None:
        """The epoch is over, or was left: nothing more is wanted. Workers end unless they are persistent."""
        for span in list(self._live):
            self._call_off(span)
        self._urgent.clear()
        self._source, self._peeked = iter(()), None
        self._open = False
        if not self._loader.persistent_workers:
            self.close()

    def close(self) -> None:
        """Ends the workers."""
        iterator, self._iterator = self._iterator, None
        self._source, self._peeked = iter(()), None
        for held in (self._urgent, self._queue, self._live, self._ready):
            held.clear()
        if iterator is not None:
            end_workers(iterator)

    def _set(self, reading: Reading) -> None:
        self.reading = reading
        self.refused = False
        """Whether workers that nobody asked for failed."""
        self._depth = reading.depth
        # A shared byte for each task outstanding, and some to spare.
        self._cancelled = multiprocessing.RawArray("B", max(1024, 4 * self._depth)) if self._depth else None
        self._inner: DataLoader[Any] | None = None
        if self._depth:
            reader = TaskReader(
                self._loader.dataset,
                self._loader.collate_fn,
                seed=self._seed,
                keyed=self._keyed,
                cancelled=self._cancelled,
            )
            self._inner = inner_loader(
                self._loader, reader, reading, batch_sampler=_Endless(self._following), collate_fn=as_read
            )

    def _refuse(self, error: Exception) -> None:
        """Nobody asked for these workers: where the rank can do without them, it does."""
        self.refused = True
        warnings.warn(
            f"num_workers='auto': a loader worker failed with {type(error).__name__} where the rank itself reads the same "
            "samples; there are no workers from now on",
            stacklevel=2,
        )

    def _read_here(self, task: Task) -> Any:
        data = self._here.__getitems__(task)
        # Workers pin beside the step; here it would take as long as it saves.
        return pin_batch(data) if self.reading.pinned and self.reading.how is How.GIVEN else data

    def _receive(self, task: Task) -> Any:
        span = task.span
        if span not in self._live:
            self._urgent.append(task)
            self._overtaken.add(span)
            self._start(task.epoch)
        while span not in self._ready:
            self._take()
        result = self._ready.pop(span)
        del self._live[span]
        if self._open:
            self._refill()
        else:  # a batch kept after its loop was left
            self.pause()
        if isinstance(result, _Failure):
            raise result.error
        return result

    def _start(self, epoch: int) -> None:
        if self._iterator is None and self._inner is not None:
            seed_workers(self._inner, self._loader.generator, self._seed, epoch, self._rank)
            with quiet():
                self._iterator = iter(self._inner)  # starts the workers and fills the queue

    def _call_off(self, span: Span) -> None:
        serial = self._live.pop(span)
        if span in self._ready:
            del self._ready[span]
        elif self._cancelled is not None:
            self._cancelled[serial % len(self._cancelled)] = 1

    def _following(self) -> Task:
        """What is sent next: something urgent, something ahead, or an empty task that keeps the queue full."""
        task = self._urgent.popleft() if self._urgent else self._pop_ahead()
        serial = self._num_sent
        self._num_sent += 1
        self._queue.append((serial, task.span))
        if task.keys:
            self._live[task.span] = serial
        if self._cancelled is not None:
            self._cancelled[serial % len(self._cancelled)] = 0
        return dataclasses.replace(task, serial=serial)

    def _pop_ahead(self) -> Task:
        task = self._peek() or _EMPTY
        self._peeked = None
        return task

    def _is_sent(self, task: Task) -> bool:
        return task.span in self._live or task.span in self._overtaken

    def _peek(self) -> Task | None:
        # One more than the depth: a task is sent just before the one taken for it leaves `_live`.
        if self._peeked is not None and self._is_sent(self._peeked):
            self._peeked = None
        if self._peeked is None and len(self._live) <= self._depth:
            self._peeked = next((task for task in self._source if not self._is_sent(task)), None)
        return self._peeked

    def _refill(self) -> None:
        """Replaces called-off and empty tasks at the head of the queue by what is wanted."""
        for _ in range(len(self._queue)):
            serial, span = self._queue[0]
            if self._live.get(span) == serial or self._peek() is None:
                return
            self._take()

    def _take(self) -> None:
        """Takes one result from the queue, which sends one task; keeps it if it is wanted."""
        num_sent = self._num_sent
        try:
            data = next(self._iterator)
        except StopIteration as stop:
            raise DataError("the loader's workers ended although samples are still wanted") from stop
        except Exception as error:
            if self._num_sent == num_sent:
                # Not of a task: a worker died, or the time is over.
                if told := _tell_dead_workers(self._iterator, error):
                    raise DataError(told) from None
                raise
            data = _Failure(error)
        serial, span = self._queue.popleft()
        if self._live.get(span) == serial:
            self._ready[span] = data


def _tell_dead_workers(iterator: Any, error: Exception) -> str:
    """Why the workers can't give any more, where it is that one is dead; torch may say only that a socket was closed."""
    workers = getattr(iterator, "_workers", ())
    if workers and isinstance(error, OSError | EOFError):
        gone = connection.wait([worker.sentinel for worker in workers], timeout=5.0)
        for worker in workers:
            if worker.sentinel in gone:
                worker.join(timeout=5.0)  # its files are closed a moment before its exit code is there
    for index, worker in enumerate(workers):
        code = worker.exitcode
        if code is not None:
            where = f"DataLoader worker {index} of this rank (pid {worker.pid})"
            if code >= 0:
                return f"{where} ended by itself, with exit code {code}; look for what calls exit in the dataset"
            return (
                f"{where} was killed by {signal.Signals(-code).name}: SIGKILL usually means that memory ran out, SIGBUS that "
                "/dev/shm is full; use fewer loader workers or a smaller prefetch_factor"
            )
    return ""
