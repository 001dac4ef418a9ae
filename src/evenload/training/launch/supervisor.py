"""The supervisor of one host: start the workers, monitor them, and report the first failure once.

There is one supervisor per host and one worker process per device. The supervisor opens the store's port, starts the
workers, and imports torch for the store while the workers import it too. Each worker runs in a session of its own: Ctrl-C
reaches only the supervisor, and ending a worker ends everything it started. On several machines the supervisors first run
the rendezvous and stay connected; the coordinator decides the cause of a failure, and every machine reports it.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenload.errors import LaunchError
from evenload.job import EXIT_CODE
from evenload.rendezvous.peer_monitor import FailureCause, PeerMonitor, Takeover, cause_of_loss
from evenload.training.launch import stop_status
from evenload.training.launch.changeable_members import ChangeableMembers
from evenload.training.launch.device_changes import change_devices
from evenload.training.launch.devices import own_cores, read_host
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import FailureReport, describe_end
from evenload.training.launch.host_workers import HostWorkers, can_change, open_files_named
from evenload.training.launch.launch_folder import launch_folder
from evenload.training.launch.output import WorkerOutputs
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.queue_devices import QueueDevices
from evenload.training.launch.relayed_members import RelayedMembers
from evenload.training.launch.remote_workers import RemoteWorker
from evenload.training.launch.replicas import make_throttle
from evenload.training.launch.request import LaunchRequest, plan
from evenload.training.launch.restarts import cause_of, restart, wait_before
from evenload.training.launch.run_control import RunControl, read_run_folder
from evenload.training.launch.run_members import RunMembers
from evenload.training.launch.server_process import LostWorkers, with_servers_speed
from evenload.training.launch.stalls import STOPPED_S
from evenload.training.launch.stop_signals import collect_stop_signals
from evenload.training.launch.stop_status import StopStatus
from evenload.training.launch.store_server import StoreServer, listen
from evenload.training.launch.throttle import ThrottleController
from evenload.training.launch.worker import end_process

if TYPE_CHECKING:
    from evenload.rendezvous.settings import RendezvousConfig
    from evenload.rendezvous.world import World
_SAVES = "saving and stopping after this step, or at the end of the script"
_POLL_S = 0.04
_CAUSE_WAIT_S = 2.0
"""Time to wait for the rank that is the cause when others have only lost a peer."""
_EARLIER_CAUSE_WAIT_S = 0.2
"""Time to wait for an earlier cause when one is known."""
_AGAIN_S = 60.0
"""Time in which a machine that lost the coordinator tries to reach it."""
_END_CAUSE_WAIT_S = 4.0
"""Time to wait for the coordinator's decision on the cause."""


def print_failure(text: str) -> None:
    print(f"evenload: {text}", file=sys.stderr, flush=True)


def launch(
    request: LaunchRequest, report: Callable[[str], None] = print_failure, exits_afterwards: bool = False
) -> int:
    """Run the workers to their end and return the exit code.

    0: all ended well. 75: all ranks saved and ended on request. 130 and 143: ended by SIGINT or SIGTERM. Otherwise the
    code of the worker that failed, after ``report`` received its error. Nothing of the launch is left in any case. With
    ``exits_afterwards`` SIGINT and SIGTERM are ignored from then on. Errors as in `plan`, and LaunchError for the port.
    A run that can't go on without a rank that was lost may start again (`restarts`).
    """
    received: list[int] = []
    following: LaunchRequest | None = request
    with collect_stop_signals(received, exits_afterwards), open_files_named(), ExitStack() as at_end:
        while following is not None:
            wait_before(following, received)
            host = read_host()
            workers = plan(following, host)
            for problem in host.problems:
                _print(problem)
            with launch_folder() as folder:
                supervisor = _Supervisor(following, folder, report)
                supervisor.received_signals = received
                if supervisor.control is not None:
                    at_end.callback(supervisor.control.retract)
                try:
                    code = supervisor.run(workers, own_cores(workers, host))
                finally:
                    supervisor.close()
            following = supervisor.following
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
        self._host = HostWorkers(request, folder, self._outputs)
        self._num_ranks = 0
        self.control = RunControl(folder) if request.mode == "train" and request.rendezvous is None else None
        self._queue_devices = QueueDevices.of_this_program(request.settings) if self.control is not None else None
        self._run_folder: Path | None = None
        self._lost = LostWorkers(folder, self._outputs.print_line)
        self._listener: socket.socket | None = None
        self._store: StoreServer | None = None
        self._store_address = ""
        self._peers = PeerMonitor()
        self._members: RunMembers | RelayedMembers = ChangeableMembers(self._host, self._peers, self._open_store)
        self._world: World | None = None
        self._machine = ""
        self._causes_by_worker: dict[str, FailureCause] = {}
        self._throttle: ThrottleController | None = None
        self._view = request.view
        self._outputs.view = request.view
        if request.view is not None:
            request.view.before_print = self._outputs.end_open_lines
        self.following: LaunchRequest | None = None
        self.received_signals: list[int] = []
        """SIGINT and SIGTERM. The first is forwarded to ranks that can save and stop by themselves; otherwise, and by a second
        one, the ranks are ended."""
        self._stop_forwarded = False

    def run(self, specs: Sequence[WorkerSpec], num_cores: Sequence[float]) -> int:
        """Start the workers, wait until all have ended, and return the exit code."""
        planned, specs = specs, self._join_world(specs)
        if self.received_signals:
            return self._end_by_signal()
        if self._request.throttle:
            factors = with_servers_speed(self._request.throttle, specs)
            self._throttle = self._host.throttle = make_throttle(self._folder, factors, specs, num_cores)
        self._num_ranks = specs[0].world_size
        self._members.start(specs, self._world)
        if self._listener is not None:
            self._open_store()
        while self._is_running() or self._joins_again(planned):
            if self._store is not None and self._store.error is not None:
                self._peers.end_run(FailureCause(f"the store can't be served: {self._store.error}"))
                raise LaunchError(f"the store can't be served: {self._store.error}")
            self._tick()
        if self._must_end():
            return self._end_by_signal()
        if self._peers.end_cause is not None or self._causes():
            return self._end_failed()
        self._close_output()
        code = self._peers.end_code or 0
        if code and all(self._members.rank_of(worker.spec.worker) for worker in self._members.own_workers):
            # On rank 0's machine rank 0 reports it.
            self._report("all ranks saved and stopped; start the same command again on all machines to go on")
        return code

    @property
    def store_is_starting(self) -> bool:
        return self._store is not None and self._store.is_starting

    def close(self) -> None:
        """End all workers and release all resources; safe at any time."""
        self._host.kill()
        self._close_output()
        self._host.close()
        if self.control is not None:
            self.control.close()
        self._peers.close()
        self._close_store()
        if self._throttle is not None:
            self._throttle.close()

    def _join_world(
        self, specs: Sequence[WorkerSpec], config: RendezvousConfig | None = None, others: Sequence[str] = ()
    ) -> Sequence[WorkerSpec]:
        """Open the store's port, on several machines after the rendezvous, and return the workers with their global ranks."""
        config = config or self._request.rendezvous
        if config is None:
            if len(specs) == 1:
                return specs
            self._listener = listen(self._request.port)
            return [replace(spec, store=f"127.0.0.1:{self._listener.getsockname()[1]}") for spec in specs]
        from evenload.rendezvous.rendezvous import run_rendezvous
        from evenload.training.launch.several_machines import assign, local_launch

        may_change = can_change(self._request, specs[0])
        launch = local_launch(self._request.arguments, self._request.settings, specs, may_change)
        result = run_rendezvous(config, launch, lambda: bool(self.received_signals), _print, others)
        if result is None:
            return specs
        self._peers, self._listener = result.monitor, result.listener
        machines = result.world.machines
        if self._peers.coordinates:
            self._members = RunMembers(self._host, self._peers, self._open_store, result.node_rank)
        else:
            self._members = RelayedMembers(self._host, self._peers, result.store, result.is_late)
        self._world = result.world
        self._machine = machines[result.node_rank].name
        for line in result.world.describe() if not result.is_late else ():
            _print(line)
        if result.is_late:
            _print(f"the run on {result.coordinator} is in progress; the devices here join at the end of a step")
        elif result.node_rank != 0:
            _print(f"progress is shown on {machines[0].name}, which writes the run folder")
        return assign(specs, result.assignments())

    def _joins_again(self, planned: Sequence[WorkerSpec]) -> bool:
        """Join the run again, at one of the other machines, where this one was cut off; the ranks begin anew.

        LaunchError: no coordinator answers in time, or it refuses.
        """
        lost, config = self._peers.cut_off, self._request.rendezvous
        if lost is None or config is None or not lost.is_silent or self.received_signals:
            return False
        wait_s, others = max(_AGAIN_S, config.connect_wait_s), self._peers.endpoints
        self._outputs.print_line(
            f"evenload: {lost.name} is gone: {lost.reason}. The ranks here have ended; this machine tries for {wait_s:.0f} s to "
            "join again"
        )
        self._host.forget()
        self._peers.close()
        self._close_store()
        self._peers, self._causes_by_worker = PeerMonitor(), {}
        specs = self._join_world(planned, replace(config, wait_s=wait_s), others)
        if self._listener is None:  # a signal has come
            return False
        self._members.start(specs, self._world)
        self._open_store()
        return True

    def _take_over(self, takeover: Takeover) -> None:
        """Coordinate the run from now on: its coordinator is lost."""
        from evenload.training.launch.taken_over import TakenOverMembers

        if isinstance(self._members, RelayedMembers):
            specs, said, self._peers = self._members.specs, [*self._members.said.values()], takeover.monitor
            self._members = TakenOverMembers(self._host, self._peers, self._open_store, specs, takeover, said)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        if self._listener is not None:
            self._listener.close()
        self._store = self._listener = None

    def _open_store(self) -> str:
        """Return the store's address; open it first if a run of one rank has none."""
        if self._store is None:
            listener = self._listener or listen(0)
            host, port = listener.getsockname()[:2]
            self._store_address = f"{host}:{port}"
            self._store = StoreServer(listener, max(2, self._num_ranks))
        return self._store_address

    def _is_running(self) -> bool:
        if self._must_end() or self._peers.end_cause is not None or self._causes():
            return False
        if isinstance(self._members, RunMembers):
            workers = self._members.workers
            if all(worker.poll() is not None for worker in workers) and not self._members.ends_late():
                self._peers.report_ended(EXIT_CODE if any(worker.code == EXIT_CODE for worker in workers) else 0)
        return self._peers.end_code is None

    def _must_end(self) -> bool:
        """Return True when a signal ends the ranks; forward a first signal to ranks that can stop by themselves."""
        if not self.received_signals or len(self.received_signals) > 1:
            return bool(self.received_signals)
        status = StopStatus.CANNOT_SAVE if self._stop_forwarded else self._stop_status()
        if status in (StopStatus.CAN_SAVE, StopStatus.EXITING):
            self._stop_forwarded = True
            name = signal.Signals(self.received_signals[0]).name
            saves = status is StopStatus.CAN_SAVE
            what = _SAVES if saves else "the script is at its end already"
            self._outputs.print_line(f"evenload: {name}: {what}; once more ends it at once")
            self._members.stop_joins()
            for worker in self._members.own_workers if saves else ():
                worker.send_signal(self.received_signals[0])
        return not self._stop_forwarded

    def _stop_status(self) -> StopStatus:
        return stop_status.read(self._folder, (worker.spec.worker for worker in self._members.own_workers))

    def _tick(self) -> None:
        """Forward output, or wait for a moment, then poll everything else."""
        self._outputs.pump(_POLL_S)
        if (takeover := self._peers.takeover) is not None:
            self._take_over(takeover)
        self._members.poll()
        if self._throttle is not None:
            self._throttle.poll()
        self._run_folder = self._run_folder or read_run_folder(self._folder)
        if self.control is not None and isinstance(self._members, ChangeableMembers):
            members, settings = self._members, self._request.settings
            self.control.poll(lambda text: change_devices(members, text, settings), members.changes)
            if self._queue_devices is not None:
                self._queue_devices.poll(members)
            if self._run_folder is not None and not self.received_signals:
                self.control.announce(self._run_folder, self._members.describe())
        if self._view is not None:
            if self._run_folder is not None:
                self._view.follow(self._run_folder)
            self._view.poll()

    def _causes(self) -> list[FailureCause]:
        """Return the known causes of a failure on all machines, the most likely first; on a member, that it is cut off."""
        if (cut_off := self._peers.cut_off) is not None:
            return [cause_of_loss(cut_off)]
        if not isinstance(self._members, RunMembers):
            return []
        workers = {worker.spec.worker: worker for worker in self._members.workers}
        self._lost.end_hanging(workers.values())
        failures = {
            name: failure
            for name, worker in workers.items()
            if not self._members.has_left(name)
            and worker.spec.worker not in self._causes_by_worker
            and (failure := self._failure(worker)) is not None
        }
        rest = self._members.absorb(failures)
        if rest is None:
            failures, rest = {}, ""
        for name, failure in failures.items():
            if self._lost.takes(workers[name], failure):
                continue
            self._causes_by_worker[name] = cause_of(failure, failure.text(self._members.where(name)) + rest)
        lost_members = [self._members.end_cause] if self._members.end_cause is not None else []
        causes = [*self._causes_by_worker.values(), *lost_members]
        return sorted(causes, key=lambda cause: (cause.consequence, cause.time_s))

    def _failure(self, worker: WorkerProcess | RemoteWorker) -> FailureReport | None:
        name, rank = worker.spec.worker, self._members.rank_of(worker.spec.worker)
        report = worker.read_failure()
        code = worker.poll()
        if report is None and code and (code != EXIT_CODE or self._ended_unexpectedly(name)):
            # It may have written its report and exited after the first read.
            report = worker.read_failure() or describe_end(rank, code, worker.ended_s)
        # With exit code 75 it saved and stopped on request, as all are about to.
        return None if report is None else replace(report, rank=rank)

    def _ended_unexpectedly(self, worker: str) -> bool:
        """Return True if the other ranks did not expect this one to end: they only report a lost peer."""
        others = [cause for other, cause in self._causes_by_worker.items() if other != worker]
        return bool(others) and all(cause.consequence for cause in others)

    def _end_failed(self) -> int:
        """Wait for the earliest cause, end the other ranks, and report the cause once."""
        began, num_signals = time.monotonic(), len(self.received_signals)
        while len(self.received_signals) == num_signals and self._peers.end_cause is None:
            wait_s = _END_CAUSE_WAIT_S
            if self._peers.coordinates or self._peers.cut_off is not None:
                wait_s = _CAUSE_WAIT_S if self._causes()[0].consequence else _EARLIER_CAUSE_WAIT_S
            nobody_left = self._request.rendezvous is None and all(
                worker.poll() is not None for worker in self._members.own_workers
            )
            if time.monotonic() - began > wait_s or nobody_left:
                break
            self._tick()
        cause = self._peers.end_cause or self._causes()[0]
        text, members = cause.text, self._members
        before = members.for_restart() if cause.lost and isinstance(members, ChangeableMembers) else None
        self._peers.end_run(cause)
        self._end_all()
        if before is not None and not self.received_signals:
            folder, print_line = read_run_folder(self._folder), self._outputs.print_line
            self.following, text = restart(self._request, text, folder, self._host.began_s, before, print_line)
        self._close_output()
        if self.following is None:
            self._report(text)
        return cause.exit_code

    def _end_by_signal(self) -> int:
        number = self.received_signals[0]
        name = signal.Signals(number).name
        on = f" on {self._machine}" if self._machine else ""
        num_ranks = len(self._members.workers) if isinstance(self._members, RunMembers) else self._num_ranks
        count = f"the {num_ranks} ranks" if num_ranks > 1 else "the run"
        status = StopStatus.CAN_SAVE if self._stop_forwarded else self._stop_status()
        code, why = stop_status.end_by_signal(status, number, self._request.mode == "train")
        self._peers.end_run(FailureCause(f"{name}{on}: {count} ended{why}", code, time_s=time.time()))
        self._end_all()
        self._close_output()
        self._report(f"{name}: {count} ended{why}")
        return code

    def _end_all(self) -> None:
        """Send SIGTERM, then SIGKILL to workers that remain; a further signal to this process kills them at once."""
        num_signals = len(self.received_signals)
        stop_status.write_abort(self._folder)
        self._members.stop_joins()
        for worker in (workers := self._members.own_workers):
            worker.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        while any(worker.poll() is None and self._has_time(worker, began_s) for worker in workers):
            if num_signals >= 2 or len(self.received_signals) > num_signals:
                break
            self._tick()
        for worker in workers:
            worker.kill()

    def _has_time(self, worker: WorkerProcess, began_s: float) -> bool:
        name = worker.spec.worker
        has_time = stop_status.has_time(self._folder, name, self._members.rank_of(name) == 0, began_s)
        return has_time and worker.stopped_s() < STOPPED_S

    def _close_output(self) -> None:
        """Forward the remaining output and close the view; a second call does nothing."""
        self._outputs.drain()
        self._outputs.view = None
        view, self._view = self._view, None
        if view is not None and self.following is None:
            view.close()
