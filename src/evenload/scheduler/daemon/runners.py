"""The runners of a queue: started, adopted after a restart of the daemon, requested to stop, cleaned up after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from evenload.errors import QueueError
from evenload.job.processes import ProcessIdentity, all_stats, boot_id, is_alive, send_signal, signal_all
from evenload.job.protocol import ProgressReport, RunnerContract, read_report
from evenload.scheduler import paths
from evenload.scheduler.client import daemon_environment
from evenload.scheduler.clock import QueueClock
from evenload.scheduler.runner import files, processes
from evenload.scheduler.runner.files import AttemptSpec, RunnerRequest, RunnerResult
from evenload.scheduler.store.ledger import AttemptRecord, Fence

_COMMAND = (sys.executable, "-P", "-m", "evenload.scheduler.runner")
_RUNNER_LOG = "runner.log"
_OLDEST_REPORT_S = 3600.0
"""A report that claims to be older when it is first read has another clock."""


@dataclass(eq=False)
class LiveAttempt:
    fence: Fence
    folder: Path
    terms: RunnerContract
    learns: bool
    """Its first report means that it can be preempted."""
    done_before: float
    began_s: float = -math.inf
    """When its runner was admitted, by the monotonic clock; -inf for an adopted one."""
    identity: ProcessIdentity | None = None
    measures: bool = False
    """The cost of a restart is measured."""
    requested: str = ""
    requested_s: float | None = None
    """When it was requested to stop, by the queue's clock."""
    requested_step: float = 0.0
    """Its step then."""
    resizing_since_s: float | None = None
    """Since when its program is to change its devices without a stop, by the monotonic clock; None if it isn't."""
    resized_since_boot_s: float = 0.0
    """When it last did so, in seconds since the machine was booted: speeds reported before are those on other devices."""
    first: ProgressReport | None = None
    """The first report with more progress than before the attempt."""
    first_s: float = 0.0
    """When that was written, by the queue's clock."""
    report: ProgressReport | None = None
    reported_s: float = 0.0
    """When the last report was written, by the queue's clock."""
    recorded_s: float = 0.0
    """When a report of it was last recorded, by the monotonic clock; 0 for never."""
    has_speed: bool = False
    """The recorded report has a speed."""
    peak_bytes: int = 0
    """Measured peak of its memory on a device that it may share."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Device → when it was last seen in use, by the queue's clock."""
    idle_s: dict[str, float] = field(default_factory=dict)
    """Device → for how long it has been idle."""
    idle_end_s: float | None = None
    """The job ends once all of its devices have been idle for so long."""
    has_idle_note: bool = False
    """Its log says that a device is idle."""
    cpu_use: tuple[float, int] | None = None
    """When its CPU time was last read, by the monotonic clock, and that time in ticks."""
    is_gone: bool = False
    was_gone: bool = False
    """It had ended before this daemon looked for it."""
    swept: bool = False
    """Nothing of an attempt whose runner was killed still runs."""
    _spawned: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _pidfds: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    live: LiveAttempt
    result: RunnerResult | None
    """None where the runner was killed, and with it all its processes."""
    reason: str


class Runners:
    def __init__(self, folder: Path, wake: Callable[[], None], clock: QueueClock) -> None:
        """`wake` is called when a runner has ended; the event loop of this thread watches for it."""
        self._folder, self._wake, self._clock = folder, wake, clock
        self._loop = asyncio.get_running_loop()
        self.live: dict[str, LiveAttempt] = {}

    def launch(self, attempt: AttemptRecord, spec: AttemptSpec, *, learns: bool, measures: bool, done: float) -> None:
        """Start a runner for an attempt that has none. If this raises an `OSError`, the attempt is as before."""
        live = self._take(attempt, spec.grace_s, learns, measures, done)
        try:
            self._spawn(live, spec)
        except BaseException:
            del self.live[attempt.fence.job]
            raise

    def _spawn(self, live: LiveAttempt, spec: AttemptSpec) -> None:
        live.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        live.folder.chmod(0o711)
        with contextlib.suppress(FileNotFoundError):
            (live.folder / files.RESULT).unlink()
        files.write_spec(live.folder, spec)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(live.folder / _RUNNER_LOG, flags, 0o600)
        try:
            process = subprocess.Popen(
                [*_COMMAND, str(live.folder)],
                cwd="/",
                env=daemon_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        live._spawned[process.pid] = process
        self._watch(live, process.pid)

    def adopt(self, attempt: AttemptRecord, *, grace_s: float, learns: bool, measures: bool, done: float) -> bool:
        """Adopt a runner that an earlier daemon recorded; return False where it has ended."""
        live = self._take(attempt, grace_s, learns, measures, done)
        facts = attempt.runner or {}
        identity = ProcessIdentity(int(facts["pid"]), int(facts["start_ticks"]), str(facts["boot_id"]))
        live.identity = identity
        if identity.boot_id != boot_id():
            live.is_gone = live.was_gone = live.swept = True  # the machine was rebooted: none of its processes is left
            return False
        if self._watch(live, identity.pid) and is_alive(identity):
            return True
        self._unwatch(live)
        live.is_gone = live.was_gone = True
        return False

    def _take(self, attempt: AttemptRecord, grace_s: float, learns: bool, measures: bool, done: float) -> LiveAttempt:
        fence = attempt.runner_fence
        folder = paths.attempt_folder(self._folder, fence.job, fence.attempt)
        terms = files.terms_in(folder, fence.job, fence.attempt, grace_s)
        live = self.live[fence.job] = LiveAttempt(fence, folder, terms, learns, done, measures=measures)
        return live

    def register(self, job: str, identity: ProcessIdentity) -> bool:
        """Register a runner; return False where another one registered before."""
        live = self.live[job]
        if live.identity is not None:
            return live.identity == identity
        live.identity = identity
        if identity.pid not in live._pidfds:
            self._watch(live, identity.pid)
        if not is_alive(identity):
            live.is_gone = True
        return True

    def request(self, job: str, request: RunnerRequest) -> None:
        """Have a runner stop or kill its program. Repeating a request has no effect."""
        live = self.live[job]
        if live.identity is None or live.requested in (request.kind, "kill") or live.is_gone:
            return
        files.write_request(live.folder, request)
        live.requested = request.kind
        if live.requested_s is None:
            live.requested_s = now_s = self._clock.now_s()
            if live.report is not None:
                live.requested_step = live.report.step + live.report.steps_per_s * max(0.0, now_s - live.reported_s)
        send_signal(live.identity.pid, signal.SIGUSR1, live.identity.start_ticks)

    def note(self, job: str, text: str) -> None:
        """Have a runner write a line to its job's log; a full disk loses it."""
        live = self.live[job]
        if live.identity is not None and not live.is_gone:
            with contextlib.suppress(OSError):
                files.write_note(live.folder, text)

    def collect(self) -> list[EndedAttempt]:
        """Return the attempts that have ended, each until `forget`. None of their processes runs any more."""
        found = []
        for live in self.live.values():
            if not live.is_gone:
                continue
            result = files.read_result(live.folder, live.fence.number)
            if result is None and not live.swept:
                live.swept = not _sweep(live)
            if result is not None or live.swept:
                found.append(EndedAttempt(live, result, "" if result is not None else self._why(live)))
        return found

    @property
    def is_sweeping(self) -> bool:
        """True while processes of a killed runner still run."""
        return any(live.is_gone and not live.swept for live in self.live.values())

    def forget(self, live: LiveAttempt) -> None:
        """Remove the files of an attempt whose end is on disk."""
        self._unwatch(live)
        for process in live._spawned.values():
            process.poll()
        if self.live.get(live.fence.job) is live:
            del self.live[live.fence.job]
        cgroup = files.read_markers(live.folder).cgroup or processes.cgroup_of(live.folder)
        processes.remove_cgroup(str(cgroup or ""))  # the runner may have been killed before it wrote the markers
        shutil.rmtree(live.folder, ignore_errors=True)  # follows no links that the program may have left

    def read_reports(self) -> list[LiveAttempt]:
        """Read the programs' reports; return the attempts with a new one."""
        changed = []
        for live in self.live.values():
            if live.identity is None:
                continue
            with contextlib.suppress(QueueError):  # the program's own file: it may hold anything
                report = read_report(live.terms)
                if report is not None and report.since_boot_s < live.resized_since_boot_s:
                    report = replace(report, steps_per_s=0.0, costs=None)
                if report is not None and report != live.report:
                    live.report, live.reported_s = report, self._written_s(live, report)
                    if live.first is None and report.step > live.done_before and report.state == "running":
                        live.first, live.first_s = report, live.reported_s
                    changed.append(live)
        return changed

    def _written_s(self, live: LiveAttempt, report: ProgressReport) -> float:
        """Return when a report was written: by its own word unless that can't be, or comes from another machine's clock."""
        now_s = self._clock.now_s()
        boot = boot_id() if live.identity is None else live.identity.boot_id
        written_s = self._clock.at(boot, report.since_boot_s) if report.since_boot_s else None
        if written_s is None or written_s > now_s or (written_s < now_s - _OLDEST_REPORT_S and not live.was_gone):
            return now_s
        return written_s

    def pids(self) -> tuple[int, ...]:
        return tuple(live.identity.pid for live in self.live.values() if live.identity is not None)

    def _why(self, live: LiveAttempt) -> str:
        last = ""
        with contextlib.suppress(OSError):
            lines = (live.folder / _RUNNER_LOG).read_text(errors="replace").split("\n")
            last = next((line[:200] for line in reversed(lines) if line.strip()), "")
        if live.identity is None:
            return f"its runner ended before {f'the program began: {last}' if last else 'it began'}"
        if live.identity.boot_id != boot_id():
            return "the machine was rebooted"
        return f"its runner was killed; its last line: {last}" if last else "its runner was killed"

    def _watch(self, live: LiveAttempt, pid: int) -> bool:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        live._pidfds[pid] = descriptor
        self._loop.add_reader(descriptor, self._ended, live, pid)
        return True

    def _ended(self, live: LiveAttempt, pid: int) -> None:
        """Handle the end of a runner: the attempt's own, or one that came too late."""
        descriptor = live._pidfds.pop(pid, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        if (process := live._spawned.get(pid)) is not None:
            process.wait()
        is_own = live.identity is not None and live.identity.pid == pid
        if is_own or (live.identity is None and not live._pidfds):
            live.is_gone = True
        self._wake()

    def _unwatch(self, live: LiveAttempt) -> None:
        for descriptor in live._pidfds.values():
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        live._pidfds.clear()

    def close(self) -> None:
        """Stop watching; the runners go on without the daemon."""
        for live in self.live.values():
            self._unwatch(live)


def _sweep(live: LiveAttempt) -> bool:
    """Kill what a killed runner left; return whether there was anything."""
    markers = files.read_markers(live.folder)
    stats = all_stats()
    left: Iterable[int] = processes.members(markers, stats)
    processes.kill_cgroup(markers.cgroup)
    signal_all(left, stats)
    return bool(left)
