"""Starts the workers of one host, watches over them, and tells the story of the first that fails, once.

One supervisor a host, one worker process a device. The supervisor listens on the store's port first, starts the
workers, and imports torch for the store while the workers import it too. Each worker is a session of its own: Ctrl-C
reaches the supervisor alone, and ending a worker ends whatever it started.
"""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from evenload.config import resolve
from evenload.errors import ConfigError, LaunchError
from evenload.training.launch.devices import Host, own_cores, parse_devices, plan_workers, read_host
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import Failure, read_failure
from evenload.training.launch.output import Outputs, View
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.target import check_target
from evenload.training.launch.throttle import Throttle, check_factors

RUN_FOLDER_FILE = "run_folder"
"""Rank 0 writes the path of the run folder into this file of the launch folder."""

_POLL_S = 0.04
_CAUSE_WAIT_S = 2.0
"""How long ranks that only lost a peer keep us waiting for the rank that is the cause."""
_ELDER_WAIT_S = 0.2
"""How long we wait, with a cause in hand, for an earlier one."""
_TERM_WAIT_S = 3.0
"""What a worker gets for its clean-up before it is killed."""


@dataclass(frozen=True)
class LaunchRequest:
    """What to run, on what, how."""

    arguments: tuple[str, ...]
    """``train.py --its --args``, or ``-m package.module --its --args``."""
    devices: str = "auto"
    """As ``-d`` gives it; see `parse_devices`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the command line set, by key of Config."""
    throttle: tuple[float, ...] = ()
    """Relative speeds, one for each rank; empty: nobody is slowed."""
    port: int = 0
    """TCP port of the store; 0 takes a free one."""
    mode: str = "train"
    """`WorkerSpec.mode`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`WorkerSpec.options`."""
    view: View | None = None
    """What draws while the workers run."""


def plan(request: LaunchRequest, host: Host | None = None) -> tuple[WorkerSpec, ...]:
    """The workers that `launch` would start; checks everything that can be known before a process starts.

    Raises:
        ConfigError: a setting, a device, or a number of shares or speeds is wrong.
        LaunchError: there is no such script or module.
    """
    check_target(request.arguments)
    resolve({}, request.settings)
    host = host or read_host()
    workers = plan_workers(
        parse_devices(request.devices, host), host, request.settings, mode=request.mode, options=request.options
    )
    if request.throttle:
        factors = check_factors(request.throttle, len(workers))
        # By which means is known when the control groups have been tried.
        workers = tuple(replace(worker, throttle={"factor": factors[worker.rank]}) for worker in workers)
    if request.port and len(workers) == 1:
        raise ConfigError(f"--port {request.port} has no effect: one rank alone opens no port; leave it out")
    return workers


def launch(request: LaunchRequest) -> int:
    """Runs the workers to their end and returns the exit code.

    0: all ended well. 130 and 143: ended by SIGINT or SIGTERM. Else the code of the worker that failed, whose story has
    been printed. Whatever happens, no process, control group or folder of the launch is left.

    Raises:
        ConfigError: as `plan`.
        LaunchError: as `plan`, or the port is in use.
    """
    host = read_host()
    workers = plan(request, host)
    listener = _listen(request.port) if len(workers) > 1 else None
    folder = Path(tempfile.mkdtemp(prefix="evenload-"))
    supervisor = _Supervisor(request, folder)
    try:
        with supervisor.signals():
            return supervisor.run(workers, own_cores(workers, host), listener)
    finally:
        supervisor.close()
        if listener is not None:
            listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def _listen(port: int) -> socket.socket:
    """Holds the store's port from now on; the store itself comes when torch is there."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"--port {port} can't be opened ({error.strerror}); choose another, or leave --port out for a free one"
        ) from None
    return listener


class _Store:
    """The TCPStore that the workers meet at, served by a thread of its own making."""

    def __init__(self, listener: socket.socket, world_size: int) -> None:
        self.error: Exception | None = None
        self._store: Any = None
        self._port = listener.getsockname()[1]
        self._descriptor = listener.detach()
        # Importing torch takes seconds; the supervisor must see a worker fail meanwhile.
        self._thread = threading.Thread(target=self._serve, args=(world_size,), name="evenload-store")
        self._thread.start()

    def _serve(self, world_size: int) -> None:
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self._store = TCPStore(
                "127.0.0.1",
                self._port,
                world_size,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self._descriptor,
            )
        except Exception as error:
            self.error = error

    def close(self) -> None:
        """Ends the service; the workers have ended."""
        self._thread.join()
        self._store = None


class _Supervisor:
    """One launch, from the first process to the last."""

    def __init__(self, request: LaunchRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._outputs = Outputs()
        self._workers: list[WorkerProcess] = []
        self._store: _Store | None = None
        self._throttle: Throttle | None = None
        self._view = request.view
        self._following = False
        self._outputs.view = request.view
        self._asked: list[int] = []

    def run(self, specs: Sequence[WorkerSpec], num_cores: Sequence[float], listener: socket.socket | None) -> int:
        """Starts the workers and stays until all have ended; the exit code."""
        if self._request.throttle:
            self._throttle = Throttle(self._folder, self._request.throttle, num_cores, [spec.device for spec in specs])
        store = f"127.0.0.1:{listener.getsockname()[1]}" if listener is not None else ""
        for spec in specs:
            throttle = self._throttle.spec_of(spec.rank) if self._throttle is not None else {}
            spec = replace(spec, store=store, launch_dir=str(self._folder), throttle=throttle)
            worker = WorkerProcess(spec, self._request.arguments, self._outputs)
            self._workers.append(worker)
            if self._throttle is not None:
                self._throttle.admit(spec.rank, worker.pid)
            worker.go()
        if listener is not None:
            self._store = _Store(listener, len(specs))
        while not self._asked and not self._failures() and any(worker.poll() is None for worker in self._workers):
            if self._store is not None and self._store.error is not None:
                raise LaunchError(f"the store can't be served: {self._store.error}")
            self._tick()
        if self._asked:
            return self._end_asked()
        if self._failures():
            return self._end_failed()
        self._close_output()
        return 0

    def signals(self) -> _Signals:
        """While it is entered, SIGINT and SIGTERM ask for the end instead of ending this process."""
        return _Signals(self._asked.append)

    def close(self) -> None:
        """Ends whatever still runs and takes everything away; safe at any time."""
        for worker in self._workers:
            worker.kill()
        self._close_output()
        for worker in self._workers:
            worker.close()
        if self._store is not None:
            self._store.close()
        if self._throttle is not None:
            self._throttle.close()

    def _tick(self) -> None:
        """Passes on output, or waits for a moment; then everything that is polled."""
        self._outputs.pump(_POLL_S)
        if self._throttle is not None:
            self._throttle.poll()
        if self._view is None:
            return
        if not self._following and (self._folder / RUN_FOLDER_FILE).exists():
            self._following = True
            self._view.follow(Path((self._folder / RUN_FOLDER_FILE).read_text().strip()))
        self._view.poll()

    def _failures(self) -> list[Failure]:
        """What is known of ranks that failed, the likeliest cause first."""
        failures = [failure for worker in self._workers if (failure := self._failure(worker)) is not None]
        return sorted(failures, key=lambda failure: (failure.consequence, failure.time_s))

    def _failure(self, worker: WorkerProcess) -> Failure | None:
        rank = worker.spec.rank
        told = read_failure(self._folder, rank)
        code = worker.poll()
        if told is not None or not code:
            return told
        # It may have written its story and left between the two looks.
        return read_failure(self._folder, rank) or _describe_end(rank, code, worker.ended_s)

    def _end_failed(self) -> int:
        """Waits for the true cause, ends the others, and tells the cause once."""
        began = time.monotonic()
        while not self._asked:
            wait_s = _CAUSE_WAIT_S if self._failures()[0].consequence else _ELDER_WAIT_S
            if time.monotonic() - began > wait_s or all(worker.poll() is not None for worker in self._workers):
                break
            self._tick()
        cause = self._failures()[0]
        self._end_all()
        self._close_output()
        device = self._workers[cause.rank].spec.device
        print(f"evenload: {cause.story(device)}", file=sys.stderr, flush=True)
        return cause.exit_code

    def _end_asked(self) -> int:
        number = self._asked[0]
        self._end_all()
        self._close_output()
        count = f"the {len(self._workers)} ranks" if len(self._workers) > 1 else "the run"
        print(f"evenload: {signal.Signals(number).name}: {count} ended", file=sys.stderr, flush=True)
        return 128 + number

    def _end_all(self) -> None:
        """SIGTERM, then SIGKILL for who is still there; a signal to us meanwhile kills at once."""
        patient = len(self._asked) < 2
        num_asked = len(self._asked)
        for worker in self._workers:
            worker.terminate()
        deadline = time.monotonic() + _TERM_WAIT_S
        while any(worker.poll() is None for worker in self._workers):
            if time.monotonic() > deadline or not patient or len(self._asked) > num_asked:
                break
            self._tick()
        for worker in self._workers:
            worker.kill()

    def _close_output(self) -> None:
        """Passes on the last output and lets the view draw for the last time; once."""
        self._outputs.drain()
        self._outputs.view = None
        view, self._view = self._view, None
        if view is not None:
            view.close()


class _Signals:
    """Hands SIGINT and SIGTERM to a function; in a thread other than the first it does nothing."""

    def __init__(self, take: Callable[[int], None]) -> None:
        self._take = take
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._take(number)


def _describe_end(rank: int, code: int, ended_s: float) -> Failure:
    """The story of a worker that left none."""
    if code > 0:
        return Failure(rank, f"it ended with exit code {code}", "", exit_code=code, time_s=ended_s)
    name = signal.Signals(-code).name
    message = _SIGNAL_HINTS.get(name, "")
    # gloo aborts healthy processes when a peer goes away: seldom the cause.
    return Failure(
        rank, f"killed by {name}", message, exit_code=128 - code, time_s=ended_s, consequence=name == "SIGABRT"
    )


_SIGNAL_HINTS = {
    "SIGKILL": "from outside; the system does so when memory runs out",
    "SIGSEGV": "a crash in native code; run with `python -X faulthandler` to see where",
    "SIGBUS": "often a full /dev/shm; give it more, or use fewer loader workers",
}
