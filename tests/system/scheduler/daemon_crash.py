"""A queue whose daemon and runners are killed with -9 at random moments, also while its disk is full; whose machine is started
anew and has its clock set now and then.

Real processes, real signals, a small disk of its own; only the clocks are the test's (`machine`). Each job's program leaves a
witness, made with O_EXCL, for each attempt, holds a lock while it runs, and saves after each step; so a lost job, an attempt
that ran twice, and two attempts at once all leave a trace.

``python -m tests.system.scheduler.daemon_crash NUM_KILLS SEED`` prints what it found as JSON.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenload.errors import EvenloadError
from evenload.scheduler.client import connect
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.reader import Reader
from tests.system.scheduler.daemons import Box, box, kill, until
from tests.system.scheduler.machine import Machine, fill, free, small_disk

_QUEUE = """
[cpu]
slots = 4
[settings]
max_lost = 100000
"""

PROGRAM = """
import fcntl, os, sys, time
from pathlib import Path
from evenload import job
from evenload.job.protocol import VARIABLE, read_contract
terms = read_contract(os.environ[VARIABLE])
folder, total = Path(sys.argv[1]), int(sys.argv[2])
def trace(kind):
    (folder / kind / f"{terms.job}.{terms.attempt}.{os.getpid()}").touch()
try:
    os.close(os.open(folder / "witness" / f"{terms.job}.{terms.attempt}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
except FileExistsError:
    trace("twice")
lock = os.open(folder / "locks" / terms.job, os.O_CREAT | os.O_RDWR)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    trace("at_once")
saved = folder / "saved" / terms.job
done = int(saved.read_text()) if saved.exists() else 0
def save(step):
    part = saved.with_suffix(".part")
    part.write_text(str(step))
    part.replace(saved)
for step in job.steps(total, start=done, save=save):
    time.sleep(0.05)
    save(step + 1)
"""

_TRACES = ("witness", "twice", "at_once", "locks", "saved")


@dataclass
class CrashCounts:
    """What the kills have shown."""

    kills: dict[str, int] = field(default_factory=lambda: {"daemon": 0, "runner": 0, "both": 0, "reboot": 0})
    adopted: int = 0
    """Attempts that ran while a daemon was killed, and were under way or properly ended under the next."""
    not_adopted: list[str] = field(default_factory=list)
    decided_after_s: list[float] = field(default_factory=list)
    """From the start of a daemon's process to its first answer, which follows its first decision."""
    killed_runners: set[tuple[str, int]] = field(default_factory=set)
    submitted: list[str] = field(default_factory=list)
    """Ids that the daemon has confirmed."""
    unsure: int = 0
    """Submits that were not answered."""
    full_disks: int = 0
    """Kills while the queue's disk was full."""
    clocks_set: int = 0


def crash(
    made: Box, machine: Machine, disk: Path | None, num_kills: int, seed: int, *, sets_clocks: bool
) -> dict[str, Any]:
    """Kills so often, waits until all jobs have ended, and looks what is left."""
    rng, counts, work = random.Random(seed), CrashCounts(), machine.work
    for name in _TRACES:
        (work / name).mkdir(exist_ok=True)
    (work / "program.py").write_text(PROGRAM)
    made.settings(_QUEUE)
    made.start()
    for number in range(num_kills):
        _keep_full(made, machine, rng, counts)
        time.sleep(rng.uniform(0.02, 0.4))
        kind = rng.choices(("daemon", "runner", "both", "reboot"), (40, 30, 25, 5))[0]
        if number == num_kills // 2:
            kind = "reboot"
        if sets_clocks and (rng.random() < 0.15 or number == num_kills // 3):
            counts.clocks_set += 1
            machine.set_wall(rng.choice((-1, 1)) * rng.choice((60.0, 3600.0, 86400.0)))
        is_full = disk is not None and (rng.random() < 0.15 or number == num_kills // 4)
        if disk is not None and is_full:
            counts.full_disks += 1
            fill(disk)
            time.sleep(rng.uniform(0, 0.3))
        _strike(kind, made, machine, disk if is_full else None, rng, counts)
    until(
        lambda: not made.call("list", limit=1)["jobs"],
        lambda: f"jobs don't end: {made.call('list')}\n{made.log()}",
        300,
    )
    return _judged(made, work, counts)


def _keep_full(made: Box, machine: Machine, rng: random.Random, counts: CrashCounts) -> None:
    """There are always jobs that wait."""
    work = machine.work
    try:
        with connect(made.folder, start=False, timeout_s=20) as client:
            waiting = client.call("list", limit=1)["counts"].get("PENDING", 0)
            for _ in range(max(0, 6 - waiting)):
                needs = {"min_devices": 1, "max_devices": rng.choice((1, 1, 2))}
                spec = {"needs": needs, "priority": rng.choice((-1, 0, 0, 1))}
                if needs["max_devices"] == 1 and rng.random() < 0.5:
                    spec |= {"share_device": True, "peak_bytes": 30 * 2**20}
                command = [sys.executable, str(work / "program.py"), str(work), str(rng.randint(2, 30))]
                program = {"command": command, "folder": str(work), "grace_s": 20.0, "requeue": True}
                program["environment"] = machine.variables
                counts.unsure += 1
                counts.submitted.append(client.call("submit", spec=spec, program=program)["job"])
                counts.unsure -= 1
    except EvenloadError:
        return


def _strike(kind: str, made: Box, machine: Machine, full: Path | None, rng: random.Random, counts: CrashCounts) -> None:
    """Kills something; the disk that is `full` gets room again some time afterwards."""
    counts.kills[kind] += 1
    runners = made.runners()
    assert made.daemon is not None
    if kind == "runner":
        if runners:
            victim = rng.choice(list(runners))
            counts.killed_runners.add(runners[victim])
            kill([victim])
        if full is not None:
            time.sleep(rng.uniform(0, 0.5))
            free(full)
        return
    before = _under_way(made)
    if kind == "daemon":
        made.kill()
    elif kind == "both":
        victims = [pid for pid in runners if rng.random() < 0.5]
        counts.killed_runners |= {runners[pid] for pid in victims}
        if rng.random() < 0.5:
            made.kill()
            kill(victims)
        else:
            kill(victims)
            made.kill()
    else:
        made.kill()
        counts.killed_runners |= set(before)
        for _ in range(2):  # a runner may have started another daemon, which knows the boot of before
            while runners := made.runners():  # before their programs: none may live to tell of the end
                counts.killed_runners |= set(runners.values())
                kill(list(runners))
                time.sleep(0.02)
            until(lambda: not kill(made.processes()), lambda: f"there still are {made.processes()}")
            machine.boot()
    if rng.random() < 0.3:
        time.sleep(rng.uniform(0, 0.5))  # away for a while
    if full is not None:
        if rng.random() < 0.5:
            made.start()
            time.sleep(rng.uniform(0, 1.0))
            if rng.random() < 0.5:
                made.kill()
        free(full)
    began_s = time.monotonic()
    if full is not None:  # one that found the disk full may answer, and still be about to end
        until(lambda: _decides(made, may_end=True), made.log)
    elif _decides(made):
        counts.decided_after_s.append(time.monotonic() - began_s)
    _look_for(before, made, counts)


def _decides(made: Box, *, may_end: bool = False) -> bool:
    """Starts a daemon where there is none, and asks it; False where it ended meanwhile, if it may."""
    try:
        if made.daemon is None or made.daemon.poll() is not None or not made.answers():
            made.serve()
        made.call("status")
    except (EvenloadError, AssertionError):
        if not may_end:
            raise
        return False
    return True


def _under_way(made: Box) -> dict[tuple[str, int], int]:
    """Attempts whose runner is recorded and alive, and its process id."""
    alive = made.runners()
    found = {}
    with contextlib.suppress(EvenloadError), Reader(made.folder) as reader:
        for pid, (job, number) in alive.items():
            for attempt in reader.attempts(job):
                is_own = attempt.runner is not None and attempt.runner["pid"] == pid  # not one that came too late
                if attempt.fence.attempt == number and is_own and attempt.ended_s is None:
                    found[job, number] = pid
    return found


def _look_for(before: dict[tuple[str, int], int], made: Box, counts: CrashCounts) -> None:
    """What ran before goes on under the new daemon, or has ended as it should."""
    with Reader(made.folder) as reader:
        for (job, number), pid in before.items():
            if (job, number) in counts.killed_runners:
                continue
            attempt = next(a for a in reader.attempts(job) if a.fence.attempt == number)
            same = attempt.runner is not None and attempt.runner["pid"] == pid
            if same and (attempt.ended_s is None or attempt.ending != "Lost"):
                counts.adopted += 1
            else:
                counts.not_adopted.append(f"{job}.{number}: {attempt}")


def _judged(made: Box, work: Path, counts: CrashCounts) -> dict[str, Any]:
    made.stop()
    with Reader(made.folder) as reader:
        jobs = {line.id: line for line in reader.jobs()}
        attempts = {name: reader.attempts(name) for name in jobs}
    lost = [
        f"{name}: {jobs.get(name)}, {attempts.get(name)}"
        for name in counts.submitted
        if name not in jobs or jobs[name].state != "SUCCEEDED"
    ]
    for name in counts.submitted:
        saved = work / "saved" / name
        if not saved.exists():
            lost.append(f"{name} has not run")
    surplus = len(jobs) - len(counts.submitted)
    needless = [
        f"{name}.{attempt.fence.attempt}: {attempt.reason}"
        for name, rows in attempts.items()
        for attempt in rows
        if attempt.ending == "Lost" and (name, attempt.fence.attempt) not in counts.killed_runners
    ]
    return {
        "kills": counts.kills,
        "jobs": len(jobs),
        "attempts": sum(map(len, attempts.values())),
        "lost": lost,
        "unconfirmed": {"submits": counts.unsure, "jobs": surplus},
        "run_twice": sorted(path.name for path in (work / "twice").iterdir()),
        "two_at_once": sorted(path.name for path in (work / "at_once").iterdir()),
        "full_disks": counts.full_disks,
        "clocks_set": counts.clocks_set,
        "adopted": counts.adopted,
        "not_adopted": counts.not_adopted,
        "lost_without_a_kill": needless,
        "decided_after_s": sorted(counts.decided_after_s),
        "record": audit(made.folder),
        "left_behind": made.processes(),
    }


def run(num_kills: int, seed: int, *, with_disks_and_clocks: bool = True) -> dict[str, Any]:
    """All of it in folders of its own; the disk that is full is mounted, which root alone can."""
    with tempfile.TemporaryDirectory(prefix="crash-") as work, contextlib.ExitStack() as stack:
        machine = Machine(Path(work), wall_s=time.time(), rate=1.0)
        made = stack.enter_context(box(variables=machine.variables))
        disk = stack.enter_context(small_disk(made.folder)) if with_disks_and_clocks else None
        stack.callback(made.clean)
        try:
            return crash(made, machine, disk, num_kills, seed, sets_clocks=with_disks_and_clocks)
        except Exception as error:
            error.add_note(f"seed {seed}; the daemon's log ends with\n{made.log()}")
            raise


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2])), indent=1))
    sys.exit(0)
