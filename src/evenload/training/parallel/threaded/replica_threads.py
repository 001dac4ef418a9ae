"""Lanes: the threads of one process that compute side by side, each for one replica, on a device and cores of its own.

Note [One thread a replica]
  Two replicas under one `.backward()` run one after the other on a CPU; an engine call per thread runs them side by side. So
  forward and backward of a replica belong to its lane, and autograd's own device threads are switched off there: whatever
  runs inside a backward (a checkpointed forward, the sums of BatchNorm) still knows whose it is.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from evenload.errors import StepError
from evenload.training.comm.clock import StepClock

Result = TypeVar("Result")
_LEAVE_WAIT_S = 5.0
"""After an interruption: what lanes get to come to the end of what they compute."""


class LaneStoppedError(Exception):
    """What a lane was doing is not wanted any more: another one failed."""


class Twins(Protocol):
    """What a lane finds in place of the user's modules and parameters (replica_modules.py)."""

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """By id of the user's module."""

    @property
    def parameters(self) -> Mapping[int, torch.Tensor]:
        """By id of the user's parameter."""


class Lane:
    """One replica's thread, and what code in it finds: its device, its twins, its clock, its random numbers."""

    def __init__(self, index: int, device: torch.device, cores: tuple[int, ...] = (), num_threads: int = 0) -> None:
        self.index = index
        self.device = device
        self.cores = cores
        self.num_threads = num_threads
        self.twins: Twins | None = None
        self.generator: torch.Generator | None = None
        """The CPU generator of this lane's own (random_draws.py); None: the one of the process."""
        self.clock = StepClock(torch.device("cpu"))
        self.turn: Turn | None = None
        self.micro_index = 0
        self.idle = False
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, and returns when it stands on its cores."""
        ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._works = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._live, args=(ready,), name=f"evenload-replica-{self.index}", daemon=True
        )
        self._thread.start()
        if (error := ready.get()) is not None:
            raise error

    def submit(self, work: Callable[[], None]) -> None:
        """Hands the thread something to do, in the context variables of the caller; it must not raise."""
        context = contextvars.copy_context()
        self._works.put(lambda: context.run(work))

    def close(self) -> None:
        """Ends the thread, once it has done what it was given."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            thread.join(_LEAVE_WAIT_S)

    def _live(self, ready: queue.SimpleQueue[BaseException | None]) -> None:
        _here.lane = self
        try:
            self._settle()
        except BaseException as error:  # told by `start`, in the thread that waits there
            ready.put(error)
            return
        ready.put(None)
        while (work := self._works.get()) is not None:
            work()
            del work  # what it held must not live until the next one comes

    def _settle(self) -> None:
        if self.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)  # of this thread, and of those that torch starts from it
        torch.autograd.set_multithreading_enabled(False)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.num_threads:
            # The number is kept for each thread, but a thread takes it from a place they share when it first asks.
            with _threads_lock:
                torch.set_num_threads(self.num_threads)
                torch.get_num_threads()


class _Here(threading.local):
    lane: Lane | None = None


_here = _Here()
_threads_lock = threading.Lock()


def here() -> Lane | None:
    """The lane whose thread this is; None in every other thread."""
    return _here.lane


class Turn:
    """In turns: only the lane that holds it computes; held from the beginning of a lane's work to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self, clock: StepClock) -> Iterator[None]:
        """Waits for the turn, and gives it on at the end."""
        with clock.segment("wait"):
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def given_on(self) -> Iterator[None]:
        """While the body waits for other lanes, one of them has the turn."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class Meeting:
    """Where the lanes of one micro-batch exchange values: the n-th call of each lane belongs to the n-th of the others."""

    def __init__(self, members: Sequence[int], hint: str = "") -> None:
        """Args:
        members: the lanes that meet.
        hint: what else could be done, for the message where they don't.
        """
        self._hint = hint
        self.members = tuple(members)
        self._changed = threading.Condition()
        self._values: dict[int, Any] = {}
        self._result: list[Any] = []
        self._round = 0
        self._left: set[int] = set()
        self._failure: Exception | None = None

    def exchange(self, index: int, value: Any) -> list[Any]:
        """The values of all members, in their order.

        Raises:
            StepError: another lane came to its end without this exchange.
            LaneStoppedError: what this lane does is not wanted any more.
        """
        with self._changed:
            number = self._round
            self._values[index] = value
            if len(self._values) == len(self.members):
                self._result = [self._values[member] for member in self.members]
                self._values = {}
                self._round += 1
                self._changed.notify_all()
                return self._result
            self._look_for_missing()
            while self._round == number and self._failure is None:
                self._changed.wait()
            if self._round == number and self._failure is not None:
                raise self._failure
            # Nobody can complete the next round before this lane has come to it, so the result is still this round's.
            return self._result

    def leave(self, index: int) -> None:
        """A lane has done its part of the micro-batch."""
        with self._changed:
            self._left.add(index)
            self._look_for_missing()

    def stop(self) -> None:
        """Nobody need wait here any more."""
        self._fail(LaneStoppedError())

    def _look_for_missing(self) -> None:
        if self._values and self._left:
            waiting, gone = sorted(self._values), sorted(self._left)
            self._fail(
                StepError(
                    f"replica {', '.join(map(str, waiting))} waits in a BatchNorm for replica {', '.join(map(str, gone))}, "
                    "which has come to its end without it: with statistics over all replicas each of them must call the same "
                    f"BatchNorm modules equally often{self._hint}"
                )
            )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


class _Surroundings:
    """What torch keeps for each thread (grad mode, autocast, CUDA streams), as the caller has it."""

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
        """In a lane's thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cache))
            for stream in self._streams:  # of all GPUs in all lanes, for values go from lane to lane
                stack.enter_context(torch.cuda.stream(stream))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            yield


@dataclass(frozen=True)
class _Ended:
    index: int
    value: Any = None
    error: BaseException | None = None


class Lanes:
    """The lanes of one process; threads are started at the first work and end with `close`."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.all = tuple(lanes)
        self._pid = 0
        self._stopped = False

    def __len__(self) -> int:
        return len(self.all)

    def run(
        self, works: Mapping[int, Callable[[], Result]], on_failure: Callable[[], None] = lambda: None
    ) -> dict[int, Result]:
        """Does all works side by side, each in the thread of its lane, and waits for the end of all.

        Args:
            works: by index of the lane.
            on_failure: called once when one failed, so that nobody waits for it.

        Raises:
            BaseException: the first error of a work, whatever it is; `LaneStoppedError` only where there is no other.
        """
        if self._pid != os.getpid():
            self._start()
        self._stopped = False
        ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        surroundings = _Surroundings()
        for index, work in works.items():
            self.all[index].submit(_reporting(self.all[index], work, ended, surroundings))
        results: dict[int, Result] = {}
        failures: list[BaseException] = []
        try:
            for _ in works:
                one = ended.get()
                if one.error is None:
                    results[one.index] = one.value
                    continue
                failures.append(one.error)
                if len(failures) == 1:
                    self._stopped = True
                    on_failure()
        except BaseException:  # a signal to this thread: what lanes compute is not wanted any more
            self._stopped = True
            on_failure()
            self._drain(ended, len(works) - len(results) - len(failures))
            raise
        if failures:
            raise next((error for error in failures if not isinstance(error, LaneStoppedError)), failures[0])
        return results

    def check(self) -> None:
        """Raises LaneStoppedError where another lane has failed; asked between micro-batches."""
        if self._stopped:
            raise LaneStoppedError

    def stop(self) -> None:
        """What lanes do now is not wanted: they end at the next `check`."""
        self._stopped = True

    def close(self) -> None:
        """Ends the threads."""
        if self._pid == os.getpid():
            for lane in self.all:
                lane.close()
        self._pid = 0

    def _start(self) -> None:
        num_threads = torch.get_num_threads()
        try:
            for lane in self.all:
                lane.start()
        except BaseException:
            for lane in self.all:
                lane.close()
            raise
        torch.set_num_threads(num_threads)  # of this thread, and of those that ask later
        self._pid = os.getpid()  # a forked child has none of these threads

    def _drain(self, ended: queue.SimpleQueue[_Ended], count: int) -> None:
        deadline = time.monotonic() + _LEAVE_WAIT_S
        for _ in range(count):
            with contextlib.suppress(queue.Empty):
                ended.get(timeout=max(0.01, deadline - time.monotonic()))


def _reporting(
    lane: Lane, work: Callable[[], Any], ended: queue.SimpleQueue[_Ended], surroundings: _Surroundings
) -> Callable[[], None]:
    def report() -> None:
        try:
            with surroundings.entered(lane.device):
                value = work()
            ended.put(_Ended(lane.index, value))
        except BaseException as error:  # every error belongs to the thread that waits for it
            error.add_note(f"(in replica {lane.index}, on {lane.device})")
            ended.put(_Ended(lane.index, error=error))

    return report
