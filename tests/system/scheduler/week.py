"""A queue that nobody looks after, in faked time: jobs of minutes to days, a daemon that is killed daily, a disk that is full
twice, a machine that starts anew, the end of summer time.

The daemon, its runners and the programs are real; `machine` moves their clocks from one event to the next. Each program
notes when it began and ended, so that a job that is lost, an attempt that ran twice, and a wrong bill all leave a trace.

``python -m tests.system.scheduler.week HOURS SEED RATE`` prints what it found as JSON; root mounts the disk that is full.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from evenload.errors import EvenloadError, QueueError
from evenload.scheduler import presence
from evenload.scheduler.core.states import JobState
from evenload.scheduler.paths import log_path
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.backup import backups
from evenload.scheduler.store.reader import Reader
from tests.system.scheduler.daemons import Box, box, kill, until
from tests.system.scheduler.machine import Machine, fill, free, small_disk

HOUR_S, DAY_S = 3600.0, 86400.0
ZONE = "CET-1CEST,M3.5.0,M10.5.0/3"
FRIDAY = (2026, 10, 23, 0)
"""Its first hour; the clocks go back on Sunday at three."""
_SLOTS = 4
_OPEN = (JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING, JobState.RESIZING)
_QUEUE = f"[cpu]\nslots = {_SLOTS}\n[settings]\nmax_lost = 1000\n"
_RESERVED = (("day", 2, 30), ("weekday", 9, 0))
_PATIENT_S = 240.0
_TICK_S = 1.2
"""More than the daemon's."""
_BACKUP_S = 5.0
"""True time that a backup which is due may take, before the test moves the clocks again."""


@dataclass
class _Submitted:
    kind: str
    outcome: str
    """Part of what must be the job's state and reason."""


@dataclass
class Findings:
    jobs: int = 0
    attempts: int = 0
    kills: int = 0
    started_by_runners: int = 0
    full_disks: int = 0
    reboots: int = 0
    clocks_set: int = 0
    refused: int = 0
    """Submits that the daemon answered by an error, because the disk was full; they are repeated."""
    lost: list[str] = field(default_factory=list)
    """Jobs that are missing, or ended in another way than they must."""
    run_twice: list[str] = field(default_factory=list)
    at_once: list[str] = field(default_factory=list)
    bills_off_s: list[float] = field(default_factory=list)
    """Of each job: billed seconds less those that its programs ran."""
    bills_wrong: list[str] = field(default_factory=list)
    """Where that is more than a second: the attempts, and when their programs ran."""
    reservations: list[str] = field(default_factory=list)
    """Windows that aren't at their time of day."""
    num_windows: int = 0
    oldest_backup_s: float = 0.0
    """Longest time for which events were in no backup while the disk was not full."""
    late_backups: list[str] = field(default_factory=list)
    """When that was more than two hours, and the end of the daemon's log then."""
    record: list[str] = field(default_factory=list)
    left_behind: list[int] = field(default_factory=list)


class Week:
    def __init__(self, queue: Box, machine: Machine, hours: int, seed: int, disk: Path | None) -> None:
        self._queue, self._machine, self._disk = queue, machine, disk
        self._rng, self._hours = random.Random(seed), hours
        self._numbers = itertools.count()
        self._plan: list[tuple[float, int, Callable[[], None]]] = []
        self._submitted: dict[str, _Submitted] = {}
        self._killed_s: dict[str, float] = {}
        self._ends_at_reboot: set[str] = set()
        self._is_up = self._is_full = False
        self._running: set[str] = set()
        """Attempts whose programs ran when it was last quiet."""
        self._alive_s = self._moved_s = 0.0
        """When the daemon was last seen to work, by its own clock, and the moves since."""
        self._backup: tuple[Path, int] | None = None
        self._backed_up = 0
        """Number of the last event when the newest backup was first there."""
        self._unsaved_s = 0.0
        """Since when events have been waiting for a backup that could be written."""
        self._last = 0
        self.found = Findings()

    def at(self, true_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._plan, (true_s, next(self._numbers), action))

    def run(self) -> Findings:
        queue, end_s = self._queue, self._hours * HOUR_S
        queue.settings(_QUEUE)
        self._serve()
        today = time.localtime(self._machine.wall_s)
        for every, hour, minute in _RESERVED:
            start_s = time.mktime((*today[:3], hour, minute, 0, 0, 0, -1))
            fields = {"start_s": start_s, "end_s": start_s + HOUR_S, "users": ["somebody"], "every": every}
            queue.call("reserve", devices=[queue.call("status")["devices"][-1]["id"]], **fields)
        self._make_plan(end_s)
        while self._plan or self._machine.due() or self._is_busy():
            now_s = self._machine.true_s
            hour_s = (now_s // HOUR_S + 1) * HOUR_S
            planned_s = self._plan[0][0] if self._plan else hour_s
            self._move(max(now_s, min((hour_s, planned_s, *self._machine.due().values()))))
            while self._plan and self._plan[0][0] <= self._machine.true_s:
                heapq.heappop(self._plan)[2]()
                self._settle()
            if self._machine.true_s > end_s + 30 * DAY_S:
                raise AssertionError(f"jobs don't end: {queue.call('list')}\n{queue.log()}")
        return self._judged()

    # what happens

    def _make_plan(self, end_s: float) -> None:
        rng = self._rng
        for hour in range(self._hours):
            for _ in range(rng.choices((0, 1), (1, 1))[0]):
                self.at(hour * HOUR_S + rng.choice((0, 15, 30, 45)) * 60, self._submit_any)
        for day in range(-(-self._hours // 24)):
            most = min(24, self._hours - 24 * day)
            self.at(day * DAY_S + rng.randrange(most) * HOUR_S + 600.0, lambda day=day: self._kill_daemon(day % 4 == 0))
            for part in (0.5, 0.95):
                self.at((24 * day + part * most) * HOUR_S, self._check_reservations)
        if self._disk is not None:
            for part in (0.3, 0.75):
                self.at(part * end_s + 120.0, self._fill)
                self.at(part * end_s + 1.9 * HOUR_S, self._free)
            self.at(0.75 * end_s + HOUR_S, lambda: self._kill_daemon(False))
        self.at(0.55 * end_s + 1800.0, self._reboot)

    def _submit_any(self) -> None:
        kind = self._rng.choices(("short", "fails", "limited", "long", "requeued", "saving"), (8, 1, 1, 2, 2, 3))[0]
        minutes = self._rng.randint(1, 16) * (3 if kind in ("short", "fails", "limited") else 60)
        self.submit(kind, minutes * 60.0, self._rng.choice((1, 1, 2)))

    def submit(self, kind: str, lasts_s: float, num_devices: int = 1) -> None:
        """Submits a job, again later while the disk is full."""
        work = self._machine.work
        shell = ("sh", "-c", 'exec "$PYTHON" -S -E "$PROGRAM" "$@"', "sh", str(work))
        variables = {**self._machine.variables, "PYTHON": sys.executable, "PROGRAM": str(work / "plain.py")}
        runs_s = 5 * HOUR_S if kind == "limited" else lasts_s
        command: tuple[str, ...] = (*shell, str(runs_s), "3" if kind == "fails" else "0")
        spec: dict[str, Any] = {"needs": {"min_devices": num_devices, "max_devices": num_devices}}
        outcome = "SUCCEEDED"
        if kind == "saving":
            steps = max(1, round(lasts_s / HOUR_S / 2))
            command = (sys.executable, str(work / "saving.py"), str(work), "0", "0", str(steps), str(2 * HOUR_S))
            spec["priority"] = -1
        elif kind == "fails":
            outcome = "FAILED exit code 3"
        elif kind == "limited":
            spec["hard_limit_s"], outcome = lasts_s, "FAILED time limit"
        try:
            if not self._is_up:
                raise QueueError("no daemon runs")
            job = self._queue.submit(
                *command, spec=spec, environment=variables, requeue=kind == "requeued", grace_s=600.0, folder="/"
            )
        except EvenloadError:
            self.found.refused += 1
            self.at(self._machine.true_s + HOUR_S, lambda: self.submit(kind, lasts_s, num_devices))
            return
        self._submitted[job] = _Submitted(kind, outcome)

    def _kill_daemon(self, runners_start_it: bool) -> None:
        """SIGKILL; a service starts it again, or the runners do."""
        if not self._is_up:
            return
        self._tick()
        self.found.kills += 1
        status = self._queue.call("status")
        kill([int(status["pid"])])
        if self._queue.daemon is not None:
            self._queue.daemon.wait()
        self._is_up = False
        until(lambda: presence.is_missing(self._queue.folder), self._queue.log)
        if runners_start_it and self._machine.due() and not self._is_full:
            self._queue.daemon = None
            until(self._queue.answers, self._queue.log)
            self._has_started()
            self.found.started_by_runners += 1
        elif not self._is_full:
            self._serve()

    def _reboot(self) -> None:
        """All processes are gone, and the clock that starts the machine is three hours late until somebody sets it."""
        self._tick()
        self.found.reboots += 1
        queue, machine = self._queue, self._machine
        running = machine.due()
        self._killed_s |= dict.fromkeys(running, machine.true_s)
        for name in running:
            done = self._submitted[name.partition(".")[0]]
            if done.kind not in ("saving", "requeued"):
                done.outcome = "FAILED rebooted"
        kill([int(queue.call("status")["pid"])])
        if queue.daemon is not None:
            queue.daemon.wait()
        kill(list(queue.runners()))
        until(lambda: not kill(queue.processes()), lambda: f"there still are {queue.processes()}")
        self._is_up = False
        machine.due()
        machine.move(machine.true_s + 600.0)
        machine.boot()
        self.set_wall(-3 * HOUR_S)
        self._serve()
        self.at(machine.true_s + 2 * HOUR_S, lambda: self.set_wall(3 * HOUR_S))

    def set_wall(self, by_s: float) -> None:
        self.found.clocks_set += 1
        self._machine.set_wall(by_s)

    def _fill(self) -> None:
        assert self._disk is not None
        self.found.full_disks += 1
        fill(self._disk)
        self._is_full = True

    def _free(self) -> None:
        assert self._disk is not None
        free(self._disk)
        self._is_full, self._unsaved_s = False, self._machine.true_s
        if not self._is_up:
            self._serve()
        until(lambda: all("backup" in text for text in self._queue.call("status")["problems"]), self._queue.log)

    def _check_reservations(self) -> None:
        """People see each window at its time of day."""
        if not self._is_up:
            return
        for row, (every, hour, minute) in zip(self._queue.call("status")["reservations"], _RESERVED, strict=True):
            at = time.localtime(row["start_s"] + 5.0)  # measured differences of two clocks
            self.found.num_windows += 1
            most_s = (4 if every == "weekday" else 1) * DAY_S + 2 * HOUR_S
            is_near = -HOUR_S < row["end_s"] - self._machine.wall_s < most_s
            if (at.tm_hour, at.tm_min) != (hour, minute) or not is_near:
                self.found.reservations.append(f"{every} {hour}:{minute:02}: {time.strftime('%a %d %H:%M', at)}")

    # the passing of time

    def _move(self, to_s: float) -> None:
        before_s = self._machine.true_s
        self._moved_s += self._machine.move(to_s)
        if before_s // HOUR_S < self._machine.true_s // HOUR_S:
            self._tick()
        self._settle()
        self._look_at_backups()

    def _look_at_backups(self) -> None:
        """Measure for how long events that are in no backup have been waiting for one; one that is due gets its moment."""
        patient_s = time.monotonic() + _BACKUP_S
        while True:
            now_s = self._machine.true_s
            if (kept := backups(self._queue.folder)) and (
                newest := (kept[0], kept[0].stat().st_mtime_ns)
            ) != self._backup:
                self._backup, self._backed_up = newest, self._last
            if self._last == self._backed_up or not self._is_up or self._is_full:
                self._unsaved_s = now_s
            if now_s - self._unsaved_s <= HOUR_S or time.monotonic() > patient_s:
                break
            time.sleep(0.05)
        if now_s - self._unsaved_s > max(2 * HOUR_S + 60.0, self.found.oldest_backup_s):
            last = "\n".join(self._queue.log().splitlines()[-12:])
            self.found.late_backups.append(f"hour {now_s / HOUR_S:.2f}, since {self._unsaved_s / HOUR_S:.2f}: {last}")
        self.found.oldest_backup_s = max(self.found.oldest_backup_s, now_s - self._unsaved_s)

    def _tick(self) -> None:
        """Returns once the daemon has worked since the last move."""
        if self._is_up:
            due_s = self._alive_s + self._moved_s - 0.1
            patient = (lambda: f"the daemon doesn't work\n{self._queue.log()}", _PATIENT_S)
            until(lambda: (presence.last_alive_s(self._queue.folder) or 0.0) >= due_s, *patient)
            self._alive_s, self._moved_s = presence.last_alive_s(self._queue.folder) or 0.0, 0.0

    def _has_started(self) -> None:
        """Its clock may differ; the first tick shows it."""
        self._is_up = True
        time.sleep(_TICK_S)
        self._alive_s, self._moved_s = presence.last_alive_s(self._queue.folder) or 0.0, 0.0

    def _settle(self) -> None:
        """Returns once everything that is due has happened, and the runners of programs that have ended have seen it."""
        until(
            lambda: all(until_s > self._machine.true_s for until_s in self._machine.due().values()),
            lambda: f"programs don't end: {self._machine.due()}",
            _PATIENT_S,
        )
        ended, self._running = self._running - self._machine.due().keys(), set(self._machine.due())
        if ended and not (self._is_up and not self._is_full):
            until(
                lambda: ended.isdisjoint(f"{job}.{num}" for job, num in self._queue.runners().values()), self._queue.log
            )
        if self._is_up and not self._is_full:
            patient = (lambda: f"{self._open_jobs()} {self._machine.due()}\n{self._queue.log()}", _PATIENT_S)
            until(self._is_quiet, *patient)

    def _is_quiet(self) -> bool:
        """Nothing was recorded for a moment, and the programs that run are those of the jobs that hold devices."""
        last, jobs = self._last, self._open_jobs()
        if JobState.STARTING in jobs.values() or jobs.keys() != {
            name.partition(".")[0] for name in self._machine.due()
        }:
            return False
        time.sleep(_TICK_S if self._may_start() else 0.1)
        self._open_jobs()
        return last == self._last

    def _may_start(self) -> bool:
        """A device is free and a job waits: the daemon may be about to start it, and time must not pass in between."""
        with Reader(self._queue.folder) as reader:
            num_held = sum(len(json.loads(line.devices)) for line in reader.jobs(states=_OPEN))
            return num_held < _SLOTS and bool(reader.jobs(states=(JobState.PENDING,), limit=1))

    def _open_jobs(self) -> dict[str, str]:
        with Reader(self._queue.folder) as reader:
            for entry in reader.log(after=self._last):
                self._last = entry.number
            return {line.id: JobState(line.state) for line in reader.jobs(states=_OPEN)}

    def _is_busy(self) -> bool:
        with Reader(self._queue.folder) as reader:
            return bool(reader.jobs(states=(*_OPEN, JobState.PENDING)))

    def _serve(self) -> None:
        self._queue.daemon = None
        self._queue.serve()
        self._has_started()

    # what is left

    def _judged(self) -> Findings:
        found, machine, queue = self.found, self._machine, self._queue
        kill([int(queue.call("status")["pid"])])
        with Reader(queue.folder) as reader:
            stored = {line.id: line for line in reader.jobs()}
            found.jobs = len(stored)
            found.lost += [f"{name}: nobody submitted it" for name in stored.keys() - self._submitted.keys()]
            for name, submitted in self._submitted.items():
                line, job = stored.get(name), reader.job(name)
                spans = machine.ran(name, self._killed_s)
                found.attempts += len(spans)
                if line is None or job is None:
                    found.lost.append(f"{name}: it isn't there")
                    continue
                state, _, reason = submitted.outcome.partition(" ")
                if line.state != state or reason not in line.reason:
                    found.lost.append(f"{name} ({submitted.kind}): {line.state} {line.reason}, not {submitted.outcome}")
                if submitted.kind not in ("saving", "requeued") and len(spans) != 1:
                    found.run_twice.append(f"{name}: {spans}")
                found.at_once += [f"{name}: {a}, {b}" for a, b in pairwise(spans) if b[0] < a[1]]
                billed_s = sum((row.ended_s or machine.true_s) - row.began_s for row in reader.attempts(name))
                off_s = billed_s - sum(ended_s - began_s for began_s, ended_s in spans)
                found.bills_off_s.append(off_s)
                if abs(off_s) > 1.0:
                    ledger = {path.name: path.read_text() for path in (machine.work / "ledger").glob(f"{name}.*")}
                    rows = [(row.began_s, row.ended_s, row.ending, row.reason) for row in reader.attempts(name)]
                    output = log_path(queue.folder, name)
                    said = output.read_text()[-2000:] if output.exists() else ""
                    found.bills_wrong.append(f"{name} {submitted}: {off_s:.2f} s, {rows}, {spans}, {ledger}, {said}")
        found.run_twice += sorted(path.name for path in (machine.work / "twice").iterdir())
        found.record = audit(queue.folder)
        found.bills_off_s.sort()
        found.left_behind = queue.programs()
        return found


def run(hours: int, seed: int, rate: float, first: tuple[int, int, int, int] = FRIDAY) -> Findings:
    """All of it in folders of its own."""
    zone = os.environ.get("TZ")
    os.environ["TZ"] = ZONE
    time.tzset()
    try:
        with tempfile.TemporaryDirectory(prefix="week-") as work:
            machine = Machine(Path(work), wall_s=time.mktime((*first, 0, 0, 0, 0, -1)), rate=rate)
            variables = {**machine.variables, "TZ": ZONE}
            with box(variables=variables) as queue, small_disk(queue.folder) as disk:
                try:
                    return Week(queue, machine, hours, seed, disk).run()
                finally:
                    queue.clean()
    finally:
        os.environ.pop("TZ") if zone is None else os.environ.update(TZ=zone)
        time.tzset()


if __name__ == "__main__":
    print(json.dumps(vars(run(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))), indent=1))
