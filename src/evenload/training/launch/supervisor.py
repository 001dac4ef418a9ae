"""The supervisor of one host: start the workers, monitor them, and report the first failure once.

There is one supervisor per host and one worker process per device. The supervisor opens the store's port, starts the
workers, and imports torch for the store while the workers import it too. Each worker runs in a session of its own: Ctrl-C
reaches only the supervisor, and ending a worker ends everything it started. On several machines the supervisors first run
the rendezvous and stay connected; the coordinator decides the cause of a failure, and every machine reports it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenload.config import COMMAND_LINE, SPAWN, resolve
from evenload.errors import ConfigError, LaunchError
from evenload.job import EXIT_CODE, grace_left_s
from evenload.rendezvous.peer_monitor import FailureCause, PeerMonitor
from evenload.rendezvous.settings import RendezvousConfig
from evenload.training.launch import stop_status
from evenload.training.launch.devices import HostDevices, own_cores, parse_devices, plan_workers, read_host
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import FailureReport, describe_end, read_failure
from evenload.training.launch.output import ProgressView, WorkerOutputs
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.replicas import as_one_worker, make_throttle, num_parts, throttle_of
from evenload.training.launch.server_process import LostWorkers, with_server, with_servers_speed
from evenload.training.launch.stop_status import StopStatus
from evenload.training.launch.store_server import StoreServer, listen
from evenload.training.launch.target import resume_command, target_file
from evenload.training.launch.throttle import ThrottleController, check_factors
from evenload.training.launch.worker import end_process

RUN_FOLDER_FILE = "run_folder"
"""File in the launch folder to which rank 0 writes the path of the run folder."""

_NOT_SAVED = (
    "nothing was saved: the script doesn't call run.resume(model=..., optimizer=...), which lets it save and stop, or it handles "
    "SIGTERM itself"
)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.04
_CAUSE_WAIT_S = 2.0
"""Time to wait for the rank that is the cause when others have only lost a peer."""
_EARLIER_CAUSE_WAIT_S = 0.2
"""Time to wait for an earlier cause when one is known."""
_END_CAUSE_WAIT_S = 4.0
"""Time to wait for the coordinator's decision on the cause."""


@dataclass(frozen=True)
class LaunchRequest:
    arguments: tuple[str, ...]
    """``train.py --its --args``, or ``-m package.module --its --args``; empty for a function call."""
    devices: str = "auto"
    """As given to ``-d``; see `parse_devices`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the command line."""
    throttle: tuple[float, ...] = ()
    """Relative speeds, one for each rank of this machine; empty: full speed."""
    port: int = 0
    """TCP port of the store; 0 takes a free one."""
    rendezvous: RendezvousConfig | None = None
    """Rendezvous of several machines; None: this machine alone."""
    mode: str = "train"
    """`WorkerSpec.mode`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`WorkerSpec.options`."""
    call: str = ""
    """`WorkerSpec.call`."""
    view: ProgressView | None = None


def plan(request: LaunchRequest, host: HostDevices | None = None) -> tuple[WorkerSpec, ...]:
    """Return the workers that `launch` would start here, after all checks that need no process.

    With several machines the ranks are numbered as if this machine were alone, until the rendezvous. ConfigError: a setting,
    a device, or a number of shares or speeds is wrong. LaunchError: there is no such script or module.
    """
    if not request.call:
        target_file(request.arguments)  # raises if there is none
    resolve({}, request.settings, SPAWN if request.call else COMMAND_LINE)
    host = host or read_host()
    # One share for each rank of all machines: counted at the rendezvous.
    own_settings = {k: v for k, v in request.settings.items() if request.rendezvous is None or k != "balance"}
    workers = plan_workers(
        parse_devices(request.devices, host), host, own_settings, mode=request.mode, options=request.options
    )
    workers = as_one_worker(workers, request.settings, several_machines=request.rendezvous is not None)
    workers = tuple(replace(worker, settings=dict(request.settings)) for worker in workers)
    if request.call:
        workers = tuple(replace(worker, origin="spawn", call=request.call) for worker in workers)
    if request.throttle:
        factors = check_factors(request.throttle, num_parts(workers))
        # `ThrottleController` chooses the means when it has tried the control groups.
        workers = tuple(
            replace(worker, throttle={"factors": factors} if worker.replicas else {"factor": factors[worker.rank]})
            for worker in workers
        )
    if request.rendezvous is None:
        workers = with_server(workers, request.settings)
    if request.port and len(workers) == 1:
        raise ConfigError(f"--port {request.port} has no effect: one rank alone opens no port; leave it out")
    return workers


def print_failure(text: str) -> None:
    print(f"evenload: {text}", file=sys.stderr, flush=True)


def launch(
    request: LaunchRequest, report: Callable[[str], None] = print_failure, exits_afterwards: bool = False
) -> int:
    """Run the workers to their end and return the exit code.

    0: all ended well. 75: all ranks saved and ended on request. 130 and 143: ended by SIGINT or SIGTERM. Otherwise the
    code of the worker that failed, after ``report`` received its error. Nothing of the launch is left in any case. With
    ``exits_afterwards`` SIGINT and SIGTERM are ignored from then on. Errors as in `plan`, and LaunchError for the port.
    """
    host = read_host()
    workers = plan(request, host)
    for problem in host.problems:
        _print(problem)
    folder = Path(tempfile.mkdtemp(prefix="evenload-"))
    supervisor = _Supervisor(request, folder, report)
    try:
        with supervisor.stop_signals(exits_afterwards):
            code = supervisor.run(workers, own_cores(workers, host))
    finally:
        supervisor.close()
        shutil.rmtree(folder, ignore_errors=True)
    if exits_afterwards and supervisor.store_is_starting:
        end_process(code)  # the interpreter would wait seconds for the import of torch
    return code


def _print(text: str) -> None:
    print(f"evenload: {text}", flush=True)


class _Supervisor:
    def __init__(self, request: LaunchRequest, folder: Path, report: Callable[[str], None]) -> None:
        self._request = request
        self._report = report
        self._folder = folder
        self._outputs = WorkerOutputs()
        self._lost = LostWorkers(folder, self._outputs.print_line)
        self._workers: list[WorkerProcess] = []
        self._listener: socket.socket | None = None
        self._store: StoreServer | None = None
        self._peers = PeerMonitor()
        self._machine = ""
        self._own_causes: dict[int, FailureCause] = {}
        self._throttle: ThrottleController | None = None
        self._view = request.view
        self._following = False
        self._outputs.view = request.view
        if request.view is not None:
            request.view.before_print = self._outputs.end_open_lines
        self._stop_signals: list[int] = []
        self._stop_forwarded = False

    def run(self, specs: Sequence[WorkerSpec], num_cores: Sequence[float]) -> int:
        """Start the workers, wait until all have ended, and return the exit code."""
        specs = self._join_world(specs)
        if self._stop_signals:
            return self._end_by_signal()
        if self._request.throttle:
            factors = with_servers_speed(self._request.throttle, specs)
            self._throttle = make_throttle(self._folder, factors, specs, num_cores)
        command = resume_command(self._request.arguments, is_call=bool(self._request.call))
        for spec in specs:
            throttle = throttle_of(self._throttle, spec) if self._throttle is not None else {}
            spec = replace(spec, launch_dir=str(self._folder), throttle=throttle, command=command)
            worker = WorkerProcess(spec, self._request.arguments, self._outputs)
            self._workers.append(worker)
            if self._throttle is not None:
                self._throttle.admit(spec.local_rank, worker.pid)
            worker.go()
        if self._listener is not None:
            self._store = StoreServer(self._listener, specs[0].world_size)
        while self._is_running():
            if self._store is not None and self._store.error is not None:
                self._peers.end_run(FailureCause(f"the store can't be served: {self._store.error}"))
                raise LaunchError(f"the store can't be served: {self._store.error}")
            self._tick()
        if self._must_end():
            return self._end_by_signal()
        if self._peers.end_cause is not None or self._causes():
            return self._end_failed()
        self._close_output()
        if all(worker.code != EXIT_CODE for worker in self._workers):
            return 0
        if self._workers[0].spec.rank != 0:  # on rank 0's machine rank 0 reports it
            self._report("all ranks saved and stopped; start the same command again on all machines to go on")
        return EXIT_CODE

    @contextmanager
    def stop_signals(self, ignore_afterwards: bool) -> Iterator[None]:
        """Collect SIGINT and SIGTERM instead of ending this process; has no effect outside the main thread.

        The first signal is forwarded to ranks that can save and stop by themselves. Otherwise, and by a second signal, the
        ranks are ended.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)

        def collect(received: int, _: object) -> None:
            # Python calls this once for several signals that came while a thread kept it busy (an import of torch), but
            # writes a byte for each.
            numbers: list[int] = []
            with suppress(BlockingIOError):
                numbers = [number for number in os.read(reader, 4096) if number in _STOP_SIGNALS]
            self._stop_signals += numbers or [received]

        before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        before = {number: signal.signal(number, collect) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for caught, handler in before.items():
                signal.signal(caught, signal.SIG_IGN if ignore_afterwards else handler)
            signal.set_wakeup_fd(before_fd)
            os.close(reader)
            os.close(writer)

    @property
    def store_is_starting(self) -> bool:
        return self._store is not None and self._store.is_starting

    def close(self) -> None:
        """End all workers and release all resources; safe at any time."""
        for worker in self._workers:
            worker.kill()
        self._close_output()
        for worker in self._workers:
            worker.close()
        self._peers.close()
        if self._store is not None:
            self._store.close()
        if self._listener is not None:
            self._listener.close()
        if self._throttle is not None:
            self._throttle.close()

    def _join_world(self, specs: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        """Open the store's port, on several machines after the rendezvous, and return the workers with their global ranks."""
        config = self._request.rendezvous
        if config is None:
            if len(specs) == 1:
                return specs
            self._listener = listen(self._request.port)
            return [replace(spec, store=f"127.0.0.1:{self._listener.getsockname()[1]}") for spec in specs]
        from evenload.rendezvous.rendezvous import run_rendezvous
        from evenload.training.launch.several_machines import assign, local_launch

        launch = local_launch(self._request.arguments, self._request.settings, specs)
        result = run_rendezvous(config, launch, lambda: bool(self._stop_signals), _print)
        if result is None:
            return specs
        self._peers, self._listener = result.monitor, result.listener
        machines = result.world.machines
        self._machine = machines[result.node_rank].name
        for line in result.world.describe():
            _print(line)
        if result.node_rank != 0:
            _print(f"progress is shown on {machines[0].name}, which writes the run folder")
        return assign(specs, result.assignments())

    def _is_running(self) -> bool:
        if self._must_end() or self._peers.end_cause is not None or self._causes():
            return False
        if any(worker.poll() is None for worker in self._workers):
            return True
        self._peers.report_ended()
        return not self._peers.all_ended

    def _must_end(self) -> bool:
        """Return True when a signal ends the ranks; forward a first signal to ranks that can stop by themselves."""
        if not self._stop_signals or len(self._stop_signals) > 1:
            return bool(self._stop_signals)
        status = StopStatus.CANNOT_SAVE if self._stop_forwarded else self._stop_status()
        if status in (StopStatus.CAN_SAVE, StopStatus.EXITING):
            self._stop_forwarded = True
            name = signal.Signals(self._stop_signals[0]).name
            what = (
                "saving and stopping after this step"
                if status is StopStatus.CAN_SAVE
                else "the script is at its end already"
            )
            self._outputs.print_line(f"evenload: {name}: {what}; once more ends it at once")
            for worker in self._workers if status is StopStatus.CAN_SAVE else ():
                worker.send_signal(self._stop_signals[0])
        return not self._stop_forwarded

    def _stop_status(self) -> StopStatus:
        return stop_status.read(self._folder, (worker.spec.rank for worker in self._workers))

    def _tick(self) -> None:
        """Forward output, or wait for a moment, then poll everything else."""
        self._outputs.pump(_POLL_S)
        if self._throttle is not None:
            self._throttle.poll()
        if self._view is None:
            return
        if not self._following and (self._folder / RUN_FOLDER_FILE).exists():
            self._following = True
            self._view.follow(Path((self._folder / RUN_FOLDER_FILE).read_text().strip()))
        self._view.poll()

    def _causes(self) -> list[FailureCause]:
        """Return the known causes of a failure on all machines, the most likely first."""
        for worker in self._workers:
            rank = worker.spec.rank
            if rank in self._own_causes or (failure := self._failure(worker)) is None:
                continue
            if self._lost.takes(worker, failure):
                continue
            where = worker.spec.device + (f" on {self._machine}" if self._machine else "")
            cause = FailureCause(failure.text(where), failure.exit_code, failure.consequence, failure.time_s)
            self._own_causes[rank] = cause
            self._peers.report_failure(cause)
        return sorted(
            [*self._own_causes.values(), *self._peers.causes], key=lambda cause: (cause.consequence, cause.time_s)
        )

    def _failure(self, worker: WorkerProcess) -> FailureReport | None:
        rank = worker.spec.rank
        report = read_failure(self._folder, rank)
        code = worker.poll()
        if report is not None or not code:
            return report
        if code == EXIT_CODE and not self._ended_unexpectedly(rank):
            return None  # saved and stopped on request, as all are about to
        # It may have written its report and exited after the first read.
        return read_failure(self._folder, rank) or describe_end(rank, code, worker.ended_s)

    def _ended_unexpectedly(self, rank: int) -> bool:
        """Return True if the other ranks did not expect this one to end: they only report a lost peer."""
        others = [cause for other, cause in self._own_causes.items() if other != rank]
        return bool(others) and all(cause.consequence for cause in others)

    def _end_failed(self) -> int:
        """Wait for the earliest cause, end the other ranks, and report the cause once."""
        began, num_signals = time.monotonic(), len(self._stop_signals)
        while len(self._stop_signals) == num_signals and self._peers.end_cause is None:
            wait_s = _END_CAUSE_WAIT_S
            if self._peers.decides:
                wait_s = _CAUSE_WAIT_S if self._causes()[0].consequence else _EARLIER_CAUSE_WAIT_S
            nobody_left = self._request.rendezvous is None and all(
                worker.poll() is not None for worker in self._workers
            )
            if time.monotonic() - began > wait_s or nobody_left:
                break
            self._tick()
        cause = self._peers.end_cause or self._causes()[0]
        self._peers.end_run(cause)
        self._end_all()
        self._close_output()
        self._report(cause.text)
        return cause.exit_code

    def _end_by_signal(self) -> int:
        number = self._stop_signals[0]
        name = signal.Signals(number).name
        on = f" on {self._machine}" if self._machine else ""
        num_ranks = self._workers[0].spec.world_size if self._workers else 0
        count = f"the {num_ranks} ranks" if num_ranks > 1 else "the run"
        code, why = 128 + number, ""
        status = StopStatus.CAN_SAVE if self._stop_forwarded else self._stop_status()
        if status is StopStatus.CANNOT_SAVE:
            why = f"; {_NOT_SAVED}"
        elif status is StopStatus.NOT_STARTED and self._request.mode == "train" and grace_left_s() is not None:
            code, why = EXIT_CODE, " before the first step: nothing is lost"
        elif status is StopStatus.CAN_SAVE:
            why = " at once, by the second signal; the next start goes on from the newest checkpoint"
        self._peers.end_run(FailureCause(f"{name}{on}: {count} ended{why}", code, time_s=time.time()))
        self._end_all()
        self._close_output()
        self._report(f"{name}: {count} ended{why}")
        return code

    def _end_all(self) -> None:
        """Send SIGTERM, then SIGKILL to workers that remain; a further signal to this process kills them at once."""
        num_signals = len(self._stop_signals)
        stop_status.write_abort(self._folder)
        for worker in self._workers:
            worker.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        while any(w.poll() is None and stop_status.has_time(self._folder, w.spec.rank, began_s) for w in self._workers):
            if num_signals >= 2 or len(self._stop_signals) > num_signals:
                break
            self._tick()
        for worker in self._workers:
            worker.kill()

    def _close_output(self) -> None:
        """Forward the remaining output and close the view; a second call does nothing."""
        self._outputs.drain()
        self._outputs.view = None
        view, self._view = self._view, None
        if view is not None:
            view.close()
