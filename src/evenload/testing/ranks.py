"""Runs a function on several ranks, each a process of its own, as the launcher would start it.

A process comes from a server that has imported torch already, so that it starts in milliseconds. It runs in a session
of its own; whatever it started ends with it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from evenload.errors import ConfigError, RankFailedError
from evenload.training.launch.devices import RankDevice, own_cores, plan_workers, read_host
from evenload.training.launch.environment import WORKER_VARIABLE, WorkerSpec, read_spec, write_spec
from evenload.training.launch.failure import is_consequence
from evenload.training.launch.throttle import ThrottleController

Result = TypeVar("Result")

_PRELOAD = ["torch", "torch.distributed", "evenload.training.run"]
_THROTTLE_POLL_S = 0.02
_CAUSE_WAIT_S = 1.0
"""After the first failure, how long ranks that fail in its wake may still tell theirs; the earliest is the cause."""


@dataclass(frozen=True)
class _Outcome:
    """What one rank sends back."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    consequence: bool = False
    time_s: float = 0.0


def run_ranks(
    fn: Callable[..., Result], num_ranks: int, *args: Any, timeout_s: float = 60.0, **spec_overrides: Any
) -> list[Result]:
    """Calls ``fn(*args)`` on ``num_ranks`` CPU ranks at once and returns what each returned, by rank.

    Each rank finds a worker's file named by `EVENLOAD_WORKER`, as under ``evenload run``; `evenload.init` and
    `detect` see a job of ``num_ranks``. The calling process serves the store.

    Args:
        fn: a function at the top of a module, with picklable arguments and a picklable result.
        num_ranks: how many processes.
        *args: passed to every rank.
        timeout_s: seconds until all ranks are killed; the error then shows where each one was.
        **spec_overrides: fields of `WorkerSpec` to set otherwise, the same for all ranks, or a function of the rank;
            ``settings={"precision": "bf16"}`` for example. ``throttle=[1, 0.5]`` slows the ranks as the launcher does;
            they are then bound to cores of their own, where there are enough.

    Raises:
        RankFailedError: a rank raised, died or took too long; it holds the traceback of the first that failed.
        ConfigError: an unknown field, or a function that another process can't find.
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
            outcomes = ranks.wait(timeout_s)
        finally:
            ranks.kill()
            if throttle is not None:
                throttle.close()
        return [outcome.value for outcome in outcomes]


class _Ranks:
    """The processes of one call, from start to end."""

    def __init__(self, folder: Path, throttle: ThrottleController | None) -> None:
        self._folder = folder
        self._throttle = throttle
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._outcomes: dict[int, _Outcome] = {}

    def start(self, spec: WorkerSpec, call: bytes) -> None:
        """Writes the rank's file and starts its process."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        path = self._folder / f"worker-{spec.rank}.json"
        write_spec(spec, path)
        environment = {**os.environ, WORKER_VARIABLE: str(path)}
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank,
            args=(theirs, call, environment, str(Path.cwd()), str(self._stacks(spec.rank))),
            name=f"evenload-rank-{spec.rank}",
        )
        self._pipes.append(ours)
        process.start()
        self._processes.append(process)
        if self._throttle is not None and process.pid is not None:
            self._throttle.admit(spec.rank, process.pid)
        theirs.close()

    def wait(self, timeout_s: float) -> list[_Outcome]:
        """What every rank returned.

        Raises:
            RankFailedError: one failed, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(self._outcomes) < len(self._pipes):
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in self._outcomes}
            left_s = max(0.0, deadline - time.monotonic())
            ready = wait(list(pending), left_s if self._throttle is None else min(left_s, _THROTTLE_POLL_S))
            if self._throttle is not None:
                self._throttle.poll()
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                self._outcomes[rank] = self._receive(rank)
                if self._outcomes[rank].error and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + _CAUSE_WAIT_S)
            if not ready and time.monotonic() >= deadline:
                break
        if failed:
            self._raise_first()
        if len(self._outcomes) < len(self._pipes):
            self._raise_timeout(timeout_s)
        return [self._outcomes[rank] for rank in range(len(self._pipes))]

    def kill(self) -> None:
        """Ends all processes and what they started."""
        for process in self._processes:
            _kill_session(process)
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def _receive(self, rank: int) -> _Outcome:
        try:
            outcome: _Outcome = pickle.loads(self._pipes[rank].recv_bytes())
            return outcome
        except EOFError:
            process = self._processes[rank]
            process.join(5.0)
            code = process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            return _Outcome(error=f"the process ended with {how} before it returned", time_s=time.time())

    def _raise_first(self) -> None:
        failures = {rank: outcome for rank, outcome in self._outcomes.items() if outcome.error}
        rank = min(failures, key=lambda rank: (failures[rank].consequence, failures[rank].time_s))
        first = failures[rank]
        raise RankFailedError(f"rank {rank} of {len(self._pipes)} failed: {first.error}\n{first.traceback}".rstrip())

    def _raise_timeout(self, timeout_s: float) -> None:
        late = [rank for rank in range(len(self._pipes)) if rank not in self._outcomes]
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
    """Takes a list of speeds out of the overrides and puts in what the ranks need to know."""
    factors = overrides.get("throttle")
    if not isinstance(factors, list | tuple):
        return None
    host = read_host()
    workers = plan_workers([RankDevice("cpu", "CPU")] * num_ranks, host)
    throttle = ThrottleController(folder, factors, own_cores(workers, host), ["cpu"] * num_ranks)
    overrides["throttle"] = throttle.spec_of
    overrides.setdefault("cores", lambda rank: workers[rank].cores)
    return throttle


def _run_rank(pipe: Connection, call: bytes, environment: dict[str, str], folder: str, stacks: str) -> None:
    """The life of one rank: runs in the child, and never returns."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # The rank's own children, a loader's workers above all, start as they do under the launcher. Inherited, the way in which
    # this process started would make each of them import torch anew: seconds.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    # Kept open by the dump itself: it must work while this process hangs.
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w"), all_threads=True)  # noqa: SIM115
    spec = read_spec(Path(environment[WORKER_VARIABLE]))
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    try:
        message = pickle.dumps(_Outcome(value=_call(call)))
    except BaseException as error:
        message = pickle.dumps(
            _Outcome(
                error=f"{type(error).__name__}: {error}",
                traceback="".join(traceback.format_exception(error)),
                consequence=is_consequence(error),
                time_s=time.time(),
            )
        )
    pipe.send_bytes(message)
    sys.stdout.flush()
    sys.stderr.flush()
    # A process that used gloo may die in its destructors, after its work.
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
