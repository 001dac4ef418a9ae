"""Threads of one process that compute side by side, each for one replica, on its own device and cores.

Note [One thread per replica]
  Two replicas under one `.backward()` run one after the other on a CPU; an engine call per thread runs them side by side. So
  forward and backward of a replica run in its thread, and autograd's own device threads are switched off there: code inside
  a backward (a checkpointed forward, the sums of BatchNorm) can still look up its replica.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import torch

from evenload.errors import StepError
from evenload.training.comm.clock import StepClock
from evenload.training.launch.replicas import ReplicaDevice
from evenload.training.parallel.threaded.replica_modules import Replica

Value = TypeVar("Value")
_STOP_TIMEOUT_S = 5.0
"""Time for threads to finish after an interruption, and to end."""


class ReplicaCancelledError(Exception):
    """The work of this replica was cancelled because another replica failed."""


class ReplicaThread:
    """One replica's thread, with the replica's device, modules, clock and generator."""

    def __init__(self, index: int, device: torch.device, cores: tuple[int, ...] = (), num_threads: int = 0) -> None:
        self.index = index
        self.device = device
        self.cores = cores
        self.num_threads = num_threads
        self.replica: Replica | None = None
        """Used in place of the user's modules and parameters, while the replica computes."""
        self.generator: torch.Generator | None = None
        """The replica's own CPU generator (generators.py); None to use the process's."""
        self.clock = StepClock(torch.device("cpu"))
        self.turn: TurnLock | None = None
        self.stage: int | None = 0
        """The stage of the attempt that it computes: a micro-batch."""
        self.idle = False
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._works = queue.SimpleQueue()
        # A daemon, which concurrent.futures doesn't offer: a replica that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._loop, name=f"evenload-replica-{self.index}", daemon=True)
        self._thread.start()
        self.submit(self._set_up).result()

    def submit(self, work: Callable[[], Value]) -> futures.Future[Value]:
        """Run `work` in the thread, in the context variables of the caller."""
        context = contextvars.copy_context()
        future: futures.Future[Value] = futures.Future()

        def run() -> None:
            try:
                future.set_result(context.run(work))
            except BaseException as error:  # every error is raised in the thread that waits for the future
                future.set_exception(error)

        self._works.put(run)
        return future

    def close(self) -> None:
        """End the thread after the work submitted so far."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            thread.join(_STOP_TIMEOUT_S)

    def _loop(self) -> None:
        _local.thread = self
        while (work := self._works.get()) is not None:
            work()
            del work  # free what it references before waiting for the next one

    def _set_up(self) -> None:
        if self.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)  # of this thread, and of those that torch starts from it
        torch.autograd.set_multithreading_enabled(False)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.num_threads:
            # Torch keeps the number per thread, but a thread first reads it from a variable that all share.
            with _num_threads_lock:
                torch.set_num_threads(self.num_threads)
                torch.get_num_threads()


class _Local(threading.local):
    thread: ReplicaThread | None = None


_local = _Local()
_num_threads_lock = threading.Lock()


def current_replica() -> ReplicaThread | None:
    return _local.thread


def this_replica() -> ReplicaThread:
    if _local.thread is None:
        raise RuntimeError("this thread computes for no replica")
    return _local.thread


class TurnLock:
    """A lock that lets replicas compute one at a time; held from the beginning of a replica's work to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self, clock: StepClock) -> Iterator[None]:
        with clock.segment("wait"):
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class ReplicaExchange:
    """Exchange values between the replicas of one micro-batch: the n-th call of each belongs to the n-th of the others.

    `hint` is another remedy, for the error where a replica does not take part.
    """

    def __init__(self, members: Sequence[int], hint: str = "") -> None:
        self._hint = hint
        self.members = tuple(members)
        self._changed = threading.Condition()
        self._values: dict[int, Any] = {}
        self._result: list[Any] = []
        self._round = 0
        self._left: set[int] = set()
        self._failure: Exception | None = None

    def gather(self, index: int, value: Any) -> list[Any]:
        """Return the members' values; StepError if one ended without giving its own."""
        with self._changed:
            number = self._round
            self._values[index] = value
            if len(self._values) == len(self.members):
                self._result = [self._values[member] for member in self.members]
                self._values = {}
                self._round += 1
                self._changed.notify_all()
                return self._result
            self._check_complete()
            while self._round == number and self._failure is None:
                self._changed.wait()
            if self._round == number and self._failure is not None:
                raise self._failure
            # The next round needs this replica too, so the result is still this round's.
            return self._result

    def leave(self, index: int) -> None:
        with self._changed:
            self._left.add(index)
            self._check_complete()

    def cancel(self) -> None:
        self._fail(ReplicaCancelledError())

    def _check_complete(self) -> None:
        if self._values and self._left:
            waiting, left = sorted(self._values), sorted(self._left)
            self._fail(
                StepError(
                    f"replica {', '.join(map(str, waiting))} waits in a BatchNorm for replica {', '.join(map(str, left))}, "
                    "which ended without it: with statistics over all replicas, each must call the same BatchNorm modules "
                    f"equally often{self._hint}"
                )
            )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


class _ThreadState:
    """The caller's values of what torch keeps per thread: grad mode, autocast, CUDA streams."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._streams: list[torch.cuda.Stream] = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(torch.cuda.device_count()):
                if (stream := torch.cuda.current_stream(index)) != torch.cuda.default_stream(index):
                    self._streams.append(stream)

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cache))
            for stream in self._streams:  # of all GPUs in all threads, because replicas exchange tensors
                stack.enter_context(torch.cuda.stream(stream))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            yield


class ReplicaThreads:
    """The replica threads of one process, started at the first work and ended by `close`."""

    def __init__(self, threads: Sequence[ReplicaThread]) -> None:
        self.all = tuple(threads)
        self._pid = 0
        self._cancelled = False

    @classmethod
    def on(cls, places: Sequence[ReplicaDevice]) -> ReplicaThreads:
        return cls([ReplicaThread(i, torch.device(p.device), p.cores, p.num_threads) for i, p in enumerate(places)])

    def __len__(self) -> int:
        return len(self.all)

    def run(
        self, works: Mapping[int, Callable[[], Value]], on_failure: Callable[[], None] = lambda: None
    ) -> dict[int, Value]:
        """Run all works side by side, each in the thread of its replica, and wait for all; raise the first error.

        `on_failure` is called once after the first failure, to wake replicas that wait for the failed one.
        """
        if self._pid != os.getpid():
            self._start()
        self._cancelled = False
        state = _ThreadState()
        running = {
            index: self.all[index].submit(_in_state(self.all[index], work, state)) for index, work in works.items()
        }
        errors: list[BaseException] = []
        try:
            for future in futures.as_completed(running.values()):
                if (error := future.exception()) is None:
                    continue
                errors.append(error)
                if len(errors) == 1:
                    self._cancelled = True
                    on_failure()
        except BaseException:  # a signal to this thread
            self._cancelled = True
            on_failure()
            futures.wait(running.values(), timeout=_STOP_TIMEOUT_S)
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, ReplicaCancelledError)), errors[0])
        return {index: future.result() for index, future in running.items()}

    def check(self) -> None:
        if self._cancelled:
            raise ReplicaCancelledError

    def cancel(self) -> None:
        """Cancel the present work of all replicas, which end at their next `check`."""
        self._cancelled = True

    def close(self) -> None:
        if self._pid == os.getpid():
            for thread in self.all:
                thread.close()
        self._pid = 0

    def _start(self) -> None:
        num_threads = torch.get_num_threads()
        try:
            for thread in self.all:
                thread.start()
        except BaseException:
            for thread in self.all:
                thread.close()
            raise
        torch.set_num_threads(num_threads)  # of this thread, and of those that read it later
        self._pid = os.getpid()  # a forked child has none of these threads


def _in_state(thread: ReplicaThread, work: Callable[[], Value], state: _ThreadState) -> Callable[[], Value]:
    def run() -> Value:
        try:
            with state.entered(thread.device):
                return work()
        except BaseException as error:
            error.add_note(f"(in replica {thread.index}, on {thread.device})")
            raise

    return run
