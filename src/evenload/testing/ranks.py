"""`run_ranks`: run a function on several ranks, each in a process of its own, as the launcher starts it.

The processes are forked from a server that has already imported torch, so they start in milliseconds. Each leads a session, with
which everything it started ends.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from evenload.errors import ConfigError, RankFailedError
from evenload.training.launch.devices import RankDevice, own_cores, plan_workers, read_host
from evenload.training.launch.environment import WORKER_VARIABLE, WorkerSpec, read_spec, write_spec
from evenload.training.launch.failure import is_consequence
from evenload.training.launch.throttle import ThrottleController

Value = TypeVar("Value")

_PRELOAD = ["torch", "torch.distributed", "evenload.testing.ranks", "evenload.training.run"]
_THROTTLE_POLL_S = 0.02
_CAUSE_WAIT_S = 1.0
"""Time after the first failure in which other ranks may report theirs; the earliest is the cause."""


@dataclass(frozen=True)
class _RankResult:
    value: Any = None
    error: str = ""
    traceback: str = ""
    consequence: bool = False
    time_s: float = 0.0


def run_ranks(
    fn: Callable[..., Value], num_ranks: int, *args: Any, timeout_s: float = 60.0, **spec_overrides: Any
) -> list[Value]:
    """Call ``fn(*args)`` on ``num_ranks`` CPU ranks at once, and return their results by rank.

    As under ``evenload run``, `EVENLOAD_WORKER` names each rank's worker file, so `evenload.init` and `detect` find a world of
    ``num_ranks``. The calling process serves the store.

    Args:
        fn: a function at the top of a module, with picklable arguments and a picklable result.
        num_ranks: number of processes.
        *args: arguments for every rank.
        timeout_s: seconds until all ranks are killed; the error then shows the stack of each.
        **spec_overrides: other values for fields of `WorkerSpec`, such as ``settings={"precision": "bf16"}``; the same for all
            ranks, or a function of the rank. ``throttle=[1, 0.5]`` throttles the ranks as the launcher does; they are then bound
            to separate cores if there are enough.

    Raises:
        RankFailedError: a rank raised, died or took too long; the message has the traceback of the first failure.
        ConfigError: an unknown field, or a function that can't be pickled.
    """
    unknown = spec_overrides.keys() - {f.name for f in fields(WorkerSpec)}
    if unknown:
        raise ConfigError(f"run_ranks({', '.join(sorted(unknown))}=...): WorkerSpec has no such field")
    if num_ranks < 1:
        raise ConfigError(f"run_ranks(num_ranks={num_ranks}): expected at least 1")
    try:
        call = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{fn} or its arguments can't be sent to another process ({error}); define it at the top of a module"
        ) from error
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="evenload-ranks-") as folder:
        throttle = _make_throttle(Path(folder), num_ranks, spec_overrides)
        ranks = _Ranks(Path(folder), throttle)
        try:
            for rank in range(num_ranks):
                spec = _spec(rank, num_ranks, f"127.0.0.1:{store.port}", folder, spec_overrides)
                ranks.start(spec, call)
            results = ranks.wait(timeout_s)
        finally:
            ranks.kill()
            if throttle is not None:
                throttle.close()
        return [result.value for result in results]


class _Ranks:
    def __init__(self, folder: Path, throttle: ThrottleController | None) -> None:
        self._folder = folder
        self._throttle = throttle
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._results: dict[int, _RankResult] = {}

    def start(self, spec: WorkerSpec, call: bytes) -> None:
        context = forkserver()
        path = self._folder / f"worker-{spec.rank}.json"
        write_spec(spec, path)
        environment = {**os.environ, WORKER_VARIABLE: str(path)}
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank,
            args=(sender, call, environment, str(Path.cwd()), str(self._stacks(spec.rank))),
            name=f"evenload-rank-{spec.rank}",
        )
        self._pipes.append(receiver)
        process.start()
        self._processes.append(process)
        if self._throttle is not None and process.pid is not None:
            self._throttle.admit(spec.rank, process.pid)
        sender.close()

    def wait(self, timeout_s: float) -> list[_RankResult]:
        """Return the result of every rank; RankFailedError if one failed, or the time limit passed."""
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(self._results) < len(self._pipes):
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in self._results}
            left_s = max(0.0, deadline - time.monotonic())
            ready = wait(list(pending), left_s if self._throttle is None else min(left_s, _THROTTLE_POLL_S))
            if self._throttle is not None:
                self._throttle.poll()
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                self._results[rank] = self._receive(rank)
                if self._results[rank].error and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + _CAUSE_WAIT_S)
            if not ready and time.monotonic() >= deadline:
                break
        if failed:
            self._raise_first()
        if len(self._results) < len(self._pipes):
            self._raise_timeout(timeout_s)
        return [self._results[rank] for rank in range(len(self._pipes))]

    def kill(self) -> None:
        """Kill all processes and everything they started."""
        for process in self._processes:
            _kill_session(process)
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def _receive(self, rank: int) -> _RankResult:
        try:
            result: _RankResult = pickle.loads(self._pipes[rank].recv_bytes())
            return result
        except EOFError:
            process = self._processes[rank]
            process.join(5.0)
            code = process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            return _RankResult(error=f"the process ended with {how} before it returned", time_s=time.time())

    def _raise_first(self) -> None:
        failures = {rank: result for rank, result in self._results.items() if result.error}
        rank = min(failures, key=lambda rank: (failures[rank].consequence, failures[rank].time_s))
        first = failures[rank]
        raise RankFailedError(f"rank {rank} of {len(self._pipes)} failed: {first.error}\n{first.traceback}".rstrip())

    def _raise_timeout(self, timeout_s: float) -> None:
        late = [rank for rank in range(len(self._pipes)) if rank not in self._results]
        for rank in late:
            pid = self._processes[rank].pid
            if pid is not None and self._stacks(rank).exists():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        stacks = [
            f"--- rank {rank} was here:\n{self._stacks(rank).read_text()}"
            for rank in late
            if self._stacks(rank).exists()
        ]
        raise RankFailedError(f"rank {', '.join(map(str, late))} did not end in {timeout_s:g} s\n" + "\n".join(stacks))

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}.txt"


def forkserver() -> ForkServerContext:
    """Return the start method of ranks: forked from a server that has torch and Evenload loaded."""
    context = multiprocessing.get_context("forkserver")
    # The module that holds a rank's function may import pytest.
    context.set_forkserver_preload([*_PRELOAD, *(name for name in ("pytest",) if name in sys.modules)])
    return context


def _spec(rank: int, num_ranks: int, store: str, folder: str, overrides: dict[str, Any]) -> WorkerSpec:
    values: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "world_size": num_ranks,
        "workers": tuple(f"worker-{index}" for index in range(num_ranks)),
        "device": "cpu",
        "device_names": tuple(f"cpu rank {index}" for index in range(num_ranks)),
        "backend": "gloo",
        "store": store,
        "num_threads": 1,
        "launch_dir": folder,
        "origin": "evenload",
    }
    values.update({key: value(rank) if callable(value) else value for key, value in overrides.items()})
    return WorkerSpec(**values)


def _make_throttle(folder: Path, num_ranks: int, overrides: dict[str, Any]) -> ThrottleController | None:
    """Create the throttle for a list of speeds, and replace the list by the ranks' own values."""
    factors = overrides.get("throttle")
    if not isinstance(factors, list | tuple):
        return None
    host = read_host()
    workers = plan_workers([RankDevice("cpu", "CPU")] * num_ranks, host)
    throttle = ThrottleController(folder, factors, own_cores(workers, host), ["cpu"] * num_ranks)
    overrides["throttle"] = throttle.spec_of
    overrides.setdefault("cores", lambda rank: workers[rank].cores)
    return throttle


def _end_with_caller(pipe: int) -> None:
    """Kill this process group when the reader of the pipe is gone: the caller was killed, and the server lives on."""
    caller = select.poll()
    caller.register(pipe, 0)
    caller.poll()
    os.killpg(0, signal.SIGKILL)


def _run_rank(pipe: Connection, call: bytes, environment: dict[str, str], folder: str, stacks: str) -> None:
    """Run one rank in the child; never return."""
    os.setsid()
    gc.freeze()  # what the server imported stays shared memory: no collection, and no search of objects, writes to it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    threading.Thread(target=_end_with_caller, args=(pipe.fileno(),), name="evenload-caller", daemon=True).start()
    # The rank's children, such as a loader's workers, start as under the launcher. With this process's start method each of
    # them would import torch again, which takes seconds.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    # The dump must work while this process hangs, so it keeps the file open.
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w"), all_threads=True)  # noqa: SIM115
    spec = read_spec(Path(environment[WORKER_VARIABLE]))
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    try:
        message = pickle.dumps(_RankResult(value=_call(call)))
    except BaseException as error:
        message = pickle.dumps(
            _RankResult(
                error=f"{type(error).__name__}: {error}",
                traceback="".join(traceback.format_exception(error)),
                consequence=is_consequence(error),
                time_s=time.time(),
            )
        )
    pipe.send_bytes(message)
    sys.stdout.flush()
    sys.stderr.flush()
    # A process that used gloo may crash in its destructors.
    os._exit(0)


def _call(call: bytes) -> Any:
    fn, args = pickle.loads(call)
    return fn(*args)


def _kill_session(process: ForkServerProcess) -> None:
    if process.pid is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
