"""Starts the workers of one host, watches over them, and tells the story of the first that fails, once.

One supervisor a host, one worker process a device. The supervisor listens on the store's port first, starts the
workers, and imports torch for the store while the workers import it too. Each worker is a session of its own: Ctrl-C
reaches the supervisor alone, and ending a worker ends whatever it started. On several machines the supervisors meet first
(meeting/), and stay in touch: why a run ends is decided at the meeting point, and told on all of them.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenload.config import COMMAND_LINE, SPAWN, resolve
from evenload.errors import ConfigError, LaunchError
from evenload.job import EXIT_CODE, grace_left_s
from evenload.rendezvous.peer_monitor import Alone, Cause, Party
from evenload.rendezvous.settings import Terms
from evenload.training.launch import stop_status
from evenload.training.launch.devices import Host, own_cores, parse_devices, plan_workers, read_host
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import Failure, describe_end, read_failure
from evenload.training.launch.output import Outputs, View
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.replicas import as_one_worker, make_throttle, num_parts, throttle_of
from evenload.training.launch.signals import Signals
from evenload.training.launch.stop_status import Stop
from evenload.training.launch.store import Store, listen
from evenload.training.launch.target import check_target
from evenload.training.launch.throttle import Throttle, check_factors

RUN_FOLDER_FILE = "run_folder"
"""Rank 0 writes the path of the run folder into this file of the launch folder."""

_NOT_SAVED = (
    "nothing was saved: the script doesn't call run.resume(model=..., optimizer=...), which lets it save and stop, or it handles "
    "SIGTERM itself"
)
_POLL_S = 0.04
_CAUSE_WAIT_S = 2.0
"""How long ranks that only lost a peer keep us waiting for the rank that is the cause."""
_ELDER_WAIT_S = 0.2
"""How long we wait, with a cause in hand, for an earlier one."""
_VERDICT_WAIT_S = 4.0
"""How long we wait for the meeting point to say why the run ends."""
_TERM_WAIT_S = 3.0
"""What a worker gets for its clean-up before it is killed."""


@dataclass(frozen=True)
class LaunchRequest:
    """What to run, on what, how."""

    arguments: tuple[str, ...]
    """``train.py --its --args``, or ``-m package.module --its --args``; empty where there is a call."""
    devices: str = "auto"
    """As ``-d`` gives it; see `parse_devices`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the command line set, by key of Config."""
    throttle: tuple[float, ...] = ()
    """Relative speeds, one for each rank of this machine; empty: nobody is slowed."""
    port: int = 0
    """TCP port of the store; 0 takes a free one."""
    terms: Terms | None = None
    """With whom: several machines; None: this one alone."""
    mode: str = "train"
    """`WorkerSpec.mode`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`WorkerSpec.options`."""
    call: str = ""
    """`WorkerSpec.call`."""
    view: View | None = None
    """What draws while the workers run."""


def plan(request: LaunchRequest, host: Host | None = None) -> tuple[WorkerSpec, ...]:
    """The workers that `launch` would start here; checks everything that can be known before a process starts.

    With several machines their ranks are numbered as if this one were alone, until the machines have met.

    Raises:
        ConfigError: a setting, a device, or a number of shares or speeds is wrong.
        LaunchError: there is no such script or module.
    """
    if not request.call:
        check_target(request.arguments)
    resolve({}, request.settings, SPAWN if request.call else COMMAND_LINE)
    host = host or read_host()
    # One share for each rank of all machines: counted where they meet.
    own_settings = {key: value for key, value in request.settings.items() if request.terms is None or key != "balance"}
    workers = plan_workers(
        parse_devices(request.devices, host), host, own_settings, mode=request.mode, options=request.options
    )
    workers = as_one_worker(workers, request.settings, several_machines=request.terms is not None)
    workers = tuple(replace(worker, settings=dict(request.settings)) for worker in workers)
    if request.call:
        workers = tuple(replace(worker, origin="spawn", call=request.call) for worker in workers)
    if request.throttle:
        factors = check_factors(request.throttle, num_parts(workers))
        # By which means is known when the control groups have been tried.
        workers = tuple(
            replace(worker, throttle={"factors": factors} if worker.replicas else {"factor": factors[worker.rank]})
            for worker in workers
        )
    if request.port and len(workers) == 1:
        raise ConfigError(f"--port {request.port} has no effect: one rank alone opens no port; leave it out")
    return workers


def print_story(text: str) -> None:
    """Tells on stderr why a launch ended."""
    print(f"evenload: {text}", file=sys.stderr, flush=True)


def launch(request: LaunchRequest, tell: Callable[[str], None] = print_story, leaves: bool = False) -> int:
    """Runs the workers to their end and returns the exit code.

    Where this process `leaves` with that code, a signal after the end of the launch changes nothing any more.

    0: all ended well. 75: asked to stop, all ranks saved and ended. 130 and 143: ended by SIGINT or SIGTERM. Else the code of
    the worker that failed, whose story `tell` has got. Whatever happens, no process, control group or folder of the launch is
    left.

    Raises:
        ConfigError: as `plan`.
        LaunchError: as `plan`, or the port is in use, or the machines don't come together.
    """
    host = read_host()
    workers = plan(request, host)
    folder = Path(tempfile.mkdtemp(prefix="evenload-"))
    supervisor = _Supervisor(request, folder, tell)
    try:
        with supervisor.signals(leaves):
            return supervisor.run(workers, own_cores(workers, host))
    finally:
        supervisor.close()
        shutil.rmtree(folder, ignore_errors=True)


def _command(request: LaunchRequest) -> str:
    """How a person starts this launch again, to go on."""
    if request.call:
        return shlex.join(sys.orig_argv)
    own = sys.argv[1:]
    options = own[: own.index(request.arguments[0])] if request.arguments[0] in own else own
    return shlex.join(["evenload", *(word for word in options if word != "--fresh"), *own[len(options) :]])


def _say(text: str) -> None:
    print(f"evenload: {text}", flush=True)


class _Supervisor:
    """One launch, from the first process to the last."""

    def __init__(self, request: LaunchRequest, folder: Path, tell: Callable[[str], None]) -> None:
        self._request = request
        self._tell = tell
        self._folder = folder
        self._outputs = Outputs()
        self._workers: list[WorkerProcess] = []
        self._listener: socket.socket | None = None
        self._store: Store | None = None
        self._party: Party = Alone()
        self._machine = ""
        """What this one is called among several."""
        self._own_causes: dict[int, Cause] = {}
        self._throttle: Throttle | None = None
        self._view = request.view
        self._following = False
        self._outputs.view = request.view
        self._asked: list[int] = []
        self._passed_on = False
        """Whether the ranks were asked to save and stop."""

    def run(self, specs: Sequence[WorkerSpec], num_cores: Sequence[float]) -> int:
        """Starts the workers and stays until all have ended; the exit code."""
        specs = self._meet(specs)
        if self._asked:
            return self._end_asked()
        if self._request.throttle:
            self._throttle = make_throttle(self._folder, self._request.throttle, specs, num_cores)
        for spec in specs:
            throttle = throttle_of(self._throttle, spec) if self._throttle is not None else {}
            spec = replace(spec, launch_dir=str(self._folder), throttle=throttle, command=_command(self._request))
            worker = WorkerProcess(spec, self._request.arguments, self._outputs)
            self._workers.append(worker)
            if self._throttle is not None:
                self._throttle.admit(spec.local_rank, worker.pid)
            worker.go()
        if self._listener is not None:
            self._store = Store(self._listener, specs[0].world_size)
        while self._goes_on():
            if self._store is not None and self._store.error is not None:
                self._party.end(Cause(f"the store can't be served: {self._store.error}"))
                raise LaunchError(f"the store can't be served: {self._store.error}")
            self._tick()
        if self._is_to_end():
            return self._end_asked()
        if self._party.verdict is not None or self._causes():
            return self._end_failed()
        self._close_output()
        if all(worker.code != EXIT_CODE for worker in self._workers):
            return 0
        if self._workers[0].spec.rank != 0:  # rank 0 tells it where it is
            self._tell("all ranks saved and stopped; start the same command again on all machines to go on")
        return EXIT_CODE

    def signals(self, is_last: bool) -> Signals:
        """While it is entered, SIGINT and SIGTERM ask for the end instead of ending this process.

        The first one is passed on to ranks that can save and stop by themselves; otherwise, and by the second, they are ended.
        """
        return Signals(self._asked.append, is_last)

    def close(self) -> None:
        """Ends whatever still runs and takes everything away; safe at any time."""
        for worker in self._workers:
            worker.kill()
        self._close_output()
        for worker in self._workers:
            worker.close()
        self._party.close()
        if self._store is not None:
            self._store.close()
        if self._listener is not None:
            self._listener.close()
        if self._throttle is not None:
            self._throttle.close()

    def _meet(self, specs: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        """The workers with their place in the world, once all machines are there; the port of the store is open then."""
        terms = self._request.terms
        if terms is None:
            if len(specs) == 1:
                return specs
            self._listener = listen(self._request.port)
            return [replace(spec, store=f"127.0.0.1:{self._listener.getsockname()[1]}") for spec in specs]
        from evenload.rendezvous.rendezvous import Subject, meet
        from evenload.rendezvous.world import join_world

        subject = Subject(self._request.arguments, self._request.settings, specs)
        meeting = meet(terms, subject, lambda: bool(self._asked), _say)
        if meeting is None:
            return specs
        self._party, self._listener = meeting.party, meeting.listener
        self._machine = meeting.world.machines[meeting.node_rank].name
        for line in meeting.world.describe():
            _say(line)
        if meeting.node_rank != 0:
            _say(f"progress is shown on {meeting.world.machines[0].name}, which writes the run folder")
        return join_world(specs, meeting.world, meeting.node_rank, meeting.store)

    def _goes_on(self) -> bool:
        if self._is_to_end() or self._party.verdict is not None or self._causes():
            return False
        if any(worker.poll() is None for worker in self._workers):
            return True
        self._party.tell_ended()
        return not self._party.all_ended

    def _is_to_end(self) -> bool:
        """Whether the ranks are to be ended from here; passes a first request on to ranks that obey it."""
        if not self._asked or len(self._asked) > 1:
            return bool(self._asked)
        means = Stop.LOSES if self._passed_on else self._what_a_stop_means()
        if means in (Stop.SAVES, Stop.ENDS):
            self._passed_on = True
            name = signal.Signals(self._asked[0]).name
            what = "saving and stopping after this step" if means is Stop.SAVES else "the script is at its end already"
            self._outputs.say(f"evenload: {name}: {what}; once more ends it at once")
            for worker in self._workers if means is Stop.SAVES else ():
                worker.ask(self._asked[0])
        return not self._passed_on

    def _what_a_stop_means(self) -> Stop:
        return stop_status.read(self._folder, (worker.spec.rank for worker in self._workers))

    def _tick(self) -> None:
        """Passes on output, or waits for a moment; then everything that is polled."""
        self._outputs.pump(_POLL_S)
        self._party.poll()
        if self._throttle is not None:
            self._throttle.poll()
        if self._view is None:
            return
        if not self._following and (self._folder / RUN_FOLDER_FILE).exists():
            self._following = True
            self._view.follow(Path((self._folder / RUN_FOLDER_FILE).read_text().strip()))
        self._view.poll()

    def _causes(self) -> list[Cause]:
        """What is known of why the run can't go on, here and from other machines, the likeliest cause first."""
        for worker in self._workers:
            rank = worker.spec.rank
            if rank in self._own_causes or (failure := self._failure(worker)) is None:
                continue
            where = worker.spec.device + (f" on {self._machine}" if self._machine else "")
            cause = Cause(failure.story(where), failure.exit_code, failure.consequence, failure.time_s)
            self._own_causes[rank] = cause
            self._party.report(cause)
        return sorted(
            [*self._own_causes.values(), *self._party.causes], key=lambda cause: (cause.consequence, cause.time_s)
        )

    def _failure(self, worker: WorkerProcess) -> Failure | None:
        rank = worker.spec.rank
        told = read_failure(self._folder, rank)
        code = worker.poll()
        if told is not None or not code:
            return told
        if code == EXIT_CODE and not self._left_alone(rank):
            return None  # saved and stopped on request, as all are about to
        # It may have written its story and left between the two looks.
        return read_failure(self._folder, rank) or describe_end(rank, code, worker.ended_s)

    def _left_alone(self, rank: int) -> bool:
        """Whether the other ranks know nothing of this one's end: they only tell that it is gone."""
        others = [cause for other, cause in self._own_causes.items() if other != rank]
        return bool(others) and all(cause.consequence for cause in others)

    def _end_failed(self) -> int:
        """Waits for the true cause, ends the others, and tells the cause once."""
        began, num_asked = time.monotonic(), len(self._asked)
        while len(self._asked) == num_asked and self._party.verdict is None:
            wait_s = _VERDICT_WAIT_S
            if self._party.decides:
                wait_s = _CAUSE_WAIT_S if self._causes()[0].consequence else _ELDER_WAIT_S
            nobody_left = self._request.terms is None and all(worker.poll() is not None for worker in self._workers)
            if time.monotonic() - began > wait_s or nobody_left:
                break
            self._tick()
        verdict = self._party.verdict or self._causes()[0]
        self._party.end(verdict)
        self._end_all()
        self._close_output()
        self._tell(verdict.text)
        return verdict.exit_code

    def _end_asked(self) -> int:
        number = self._asked[0]
        name = signal.Signals(number).name
        on = f" on {self._machine}" if self._machine else ""
        num_ranks = self._workers[0].spec.world_size if self._workers else 0
        count = f"the {num_ranks} ranks" if num_ranks > 1 else "the run"
        code, why = 128 + number, ""
        means = Stop.SAVES if self._passed_on else self._what_a_stop_means()
        if means is Stop.LOSES:
            why = f"; {_NOT_SAVED}"
        elif means is Stop.STARTS and self._request.mode == "train" and grace_left_s() is not None:
            code, why = EXIT_CODE, " before the first step: nothing is lost"
        elif means is Stop.SAVES:
            why = " at once, by the second signal; the next start goes on from the newest checkpoint"
        self._party.end(Cause(f"{name}{on}: {count} ended{why}", code, time_s=time.time()))
        self._end_all()
        self._close_output()
        self._tell(f"{name}: {count} ended{why}")
        return code

    def _end_all(self) -> None:
        """SIGTERM, then SIGKILL for who is still there; a signal to us meanwhile kills at once."""
        patient = len(self._asked) < 2
        num_asked = len(self._asked)
        stop_status.tell_end(self._folder)
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
