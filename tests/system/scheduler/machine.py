"""A machine whose clocks go as a test wants, for the daemons, runners and programs of a queue: real processes in faked time.

A test moves the time; between two moves it stands still, or goes at its true rate. What happens in between takes no faked
time, so that bills can be compared exactly. `STAND_IN` has each Python take its clocks from here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from evenload.scheduler import paths
from tests.paths import TESTS

STAND_IN = TESTS / "system" / "scheduler" / "stand_in_clock"

PLAIN = """
import json, os, signal, sys, time
work, lasts_s, code = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
def true_s():
    with open(work + "/clock") as file:
        row = json.load(file)
    return row["true_s"] + row["rate"] * (time.monotonic() - row["at_s"])
with open(os.environ["EVENLOAD_JOB"]) as file:
    terms = json.load(file)
name = f"{terms['job']}.{terms['attempt']}"
try:
    ledger = os.open(f"{work}/ledger/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
except FileExistsError:
    ledger = os.open(f"{work}/twice/{name}", os.O_CREAT | os.O_WRONLY)
def note(what):
    os.write(ledger, f"{what} {true_s()!r}\\n".encode())
def wait(until_s):
    with open(f"{work}/due/.{name}", "w") as file:
        file.write(f"{os.getpid()} {until_s!r}")
    os.replace(f"{work}/due/.{name}", f"{work}/due/{name}")
    while true_s() < until_s:
        time.sleep(0.02)
def end():
    note("ended")
    os.unlink(f"{work}/due/{name}")
def obey(number, frame):
    end()
    os._exit(143)
note("began")
if lasts_s:
    signal.signal(signal.SIGTERM, obey)
    wait(true_s() + lasts_s)
    end()
    os._exit(code)
"""
"""Lasts so many seconds, then exits with the code. It notes when it began and ended, and until when it waits."""

SAVING = (
    PLAIN
    + """
from pathlib import Path
from evenload import job
total, step_s = int(sys.argv[4]), float(sys.argv[5])
saved = Path(work, "saved", terms["job"])
done = int(saved.read_text()) if saved.exists() else 0
def save(step):
    saved.with_suffix(".part").write_text(str(step))
    saved.with_suffix(".part").replace(saved)
try:
    for step in job.steps(total, start=done, save=save):
        wait(true_s() + step_s)
        save(step + 1)
finally:
    end()
"""
)
"""The same in steps, each of which is saved; it stops after a step when it is requested to."""


class Machine:
    """The faked clocks in a folder, which holds the programs' notes too. Times in true seconds since the test's begin."""

    def __init__(self, work: Path, *, wall_s: float, rate: float = 0.0) -> None:
        """`wall_s`: what the wall clock shows at the begin; `rate`: 0 has time stand still between moves, 1 has it go on."""
        self.work, self._wall_s, self._rate = work, wall_s, rate
        self._true_s, self._at_s, self._booted_s = 0.0, time.monotonic(), -100.0
        self._boot = str(uuid.uuid4())
        for name in ("ledger", "twice", "due", "saved"):
            (work / name).mkdir()
        (work / "plain.py").write_text(PLAIN)
        (work / "saving.py").write_text(SAVING)
        self._write()

    @property
    def variables(self) -> dict[str, str]:
        return {"PYTHONPATH": str(STAND_IN), "STAND_IN_CLOCK": str(self.work / "clock")}

    @property
    def true_s(self) -> float:
        return self._true_s + self._rate * (time.monotonic() - self._at_s)

    @property
    def wall_s(self) -> float:
        return self.true_s + self._wall_s

    def move(self, to_true_s: float) -> float:
        """Time passes, if it is not that late already; by how much."""
        before_s = self.true_s
        self._true_s, self._at_s = max(before_s, to_true_s), time.monotonic()
        self._write()
        return self._true_s - before_s

    def set_wall(self, by_s: float) -> None:
        """Somebody sets the wall clock."""
        self._wall_s += by_s
        self._write()

    def boot(self) -> None:
        """The machine has started anew; its processes are for the caller to end."""
        self._boot, self._booted_s = str(uuid.uuid4()), self.true_s - 20.0
        self._write()

    def due(self) -> dict[str, float]:
        """Attempts whose programs run, and until when each waits."""
        found = {}
        for path in (self.work / "due").glob("[!.]*"):
            with contextlib.suppress(FileNotFoundError):
                pid, until_s = path.read_text().split()
                if Path("/proc", pid).exists():
                    found[path.name] = float(until_s)
                else:
                    path.unlink()
        return found

    def ran(self, job: str, killed_s: dict[str, float]) -> list[tuple[float, float]]:
        """When each attempt of a job began and ended; `killed_s` has the ends of those that were killed."""
        spans = []
        for path in sorted((self.work / "ledger").glob(f"{job}.*"), key=lambda path: int(path.suffix[1:])):
            notes = dict(line.split() for line in path.read_text().splitlines())
            if "began" in notes:
                began_s = float(notes["began"])
                spans.append((began_s, float(notes.get("ended", killed_s.get(path.name, began_s)))))
        return spans

    def _write(self) -> None:
        row = {
            "true_s": self._true_s, "at_s": self._at_s, "rate": self._rate,
            "boot": self._boot, "booted_s": self._booted_s, "wall_s": self._wall_s,
        }  # fmt: skip
        part = self.work / f".clock.{os.getpid()}"
        part.write_text(json.dumps(row))
        part.replace(self.work / "clock")


@contextlib.contextmanager
def small_disk(folder: Path, options: str = "size=24m") -> Iterator[Path | None]:
    """Mounts a small disk there; None where this user can't."""
    paths.make_private(folder)
    command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=711", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield folder if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leaves no byte."""
    with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def free(disk: Path) -> None:
    """Gives the room back."""
    (disk / "fill").unlink()
