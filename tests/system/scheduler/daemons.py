"""Real daemons of queues in folders of their own, for tests: started, killed, started again, and put away with all they left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evenload.errors import EvenloadError
from evenload.job.processes import all_stats
from evenload.scheduler import paths
from evenload.scheduler.client import Client, connect
from evenload.scheduler.core.values import Job
from evenload.scheduler.runner.files import read_markers
from evenload.scheduler.runner.processes import remove_cgroup
from evenload.scheduler.store.reader import Reader
from tests.paths import ROOT

_START = """
import sys
from pathlib import Path
from evenload.job import processes
if sys.argv[2]:
    processes.BOOT_ID = Path(sys.argv[2])
if sys.argv[3]:
    import time
    from evenload.scheduler import clock
    clock.wall_s = lambda: time.time() + float(Path(sys.argv[3]).read_text())
from evenload.scheduler.daemon.__main__ import main
sys.exit(main(["--queue", sys.argv[1], "--foreground"]))
"""

PATIENT_S = 60.0
"""For what takes a moment on a quiet machine."""


class Box:
    """One queue and its daemon."""

    def __init__(self, folder: Path, *, boot_id: Path | None = None, variables: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.daemon: subprocess.Popen[bytes] | None = None
        self._boot_id = boot_id
        self._variables = variables or {}
        self.set_by: Path | None = None
        """A file with the seconds by which somebody has set the machine's clock, as its daemon sees it."""

    def settings(self, text: str) -> None:
        """Writes queue.toml."""
        paths.make_private(self.folder)
        (self.folder / paths.SETTINGS_FILE).write_text(text)

    def start(self) -> None:
        """Starts a daemon that is this process's child."""
        paths.make_private(self.folder)
        with (self.folder / "test.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-c", _START, str(self.folder), str(self._boot_id or ""), str(self.set_by or "")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **self._variables},
            )

    def answers(self) -> bool:
        """True where a daemon accepts requests."""
        try:
            connect(self.folder, start=False).close()
        except EvenloadError:
            return False
        return True

    def serve(self) -> None:
        """Starts a daemon as a service does: again and again until one stays."""

        def is_up() -> bool:
            if self.daemon is None or self.daemon.poll() is not None:
                self.start()
            return self.answers()

        until(is_up, self.log)

    def client(self, timeout_s: float = 30.0) -> Client:
        """A connection, once the daemon answers."""
        deadline_s = time.monotonic() + PATIENT_S
        while True:
            try:
                return connect(self.folder, start=False, timeout_s=timeout_s)
            except Exception:
                if time.monotonic() > deadline_s or (self.daemon is not None and self.daemon.poll() is not None):
                    raise AssertionError(f"no daemon:\n{self.log()}") from None
                time.sleep(0.01)

    def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Asks once."""
        with self.client() as client:
            return client.call(verb, **fields)

    def submit(self, *command: str, spec: dict[str, Any] | None = None, **program: Any) -> str:
        """Submits a command; its id."""
        row = {"command": list(command), "folder": str(self.folder), "grace_s": 30.0, **program}
        return str(self.call("submit", spec=spec or {}, program=row)["job"])

    def state(self, job: str) -> dict[str, Any]:
        """The job's row."""
        row: dict[str, Any] = self.call("job", job=job)["job"]
        return row

    def wait_for(self, job: str, *states: str) -> dict[str, Any]:
        """The job's row once it is in one of these states."""
        found: dict[str, Any] = {}

        def is_there() -> bool:
            found.update(self.state(job))
            return found["state"] in states

        until(is_there, lambda: f"job {job} isn't {states}: {found}\n{self.log()}")
        return found

    def output(self, job: str) -> str:
        """What the job has printed."""
        path = paths.log_path(self.folder, job)
        return path.read_text() if path.exists() else ""

    def stored(self, job: str) -> Job:
        """The job as it is in the queue's file."""
        with Reader(self.folder) as reader:
            found = reader.job(job)
        assert found is not None
        return found

    def story(self, job: str) -> str:
        """All that is known of a job, for a test that fails."""
        return f"{self.call('job', job=job)}\n{self.output(job)[-2000:]}\n{self.log()}"

    def log(self) -> str:
        """What the daemon has said."""
        path = self.folder / "test.log"
        return path.read_text()[-4000:] if path.exists() else ""

    def kill(self) -> None:
        """kill -9 of the daemon."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def stop(self) -> None:
        """The daemon ends; its jobs go on."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.terminate()
            self.daemon.wait(PATIENT_S)

    def clean(self) -> None:
        """Ends the daemon and all that it has started."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        until(lambda: not kill(self.processes()), lambda: f"there still are {self.processes()}")
        for folder in (self.folder / paths.ATTEMPTS).glob("*"):
            remove_cgroup(read_markers(folder).cgroup)

    def runners(self) -> dict[int, tuple[str, int]]:
        """The runners of this queue that run, by process id: job and attempt."""
        found = {}
        mark = str(self.folder / paths.ATTEMPTS) + "/"
        for pid, command in _commands():
            if b"evenload.scheduler.runner" in command and command[-1].decode().startswith(mark):
                job, _, attempt = command[-1].decode().removeprefix(mark).partition(".")
                found[pid] = (job, int(attempt))
        stats = all_stats()  # a program that has not begun yet still looks like the runner that forked it
        return {pid: run for pid, run in found.items() if pid in stats and stats[pid].parent not in found}

    def programs(self) -> list[int]:
        """All processes that a job of this queue has started."""
        mark = f"EVENLOAD_JOB={self.folder}/".encode()
        found = []
        for pid, _ in _commands():
            with contextlib.suppress(OSError):
                if any(line.startswith(mark) for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    found.append(pid)
        return found

    def processes(self) -> list[int]:
        """Runners and what they have started, and daemons that were left behind."""
        folder = str(self.folder).encode()
        ours = [pid for pid, command in _commands() if any(folder in word for word in command) and pid != os.getpid()]
        return [*ours, *self.programs()]


def _commands() -> Iterator[tuple[int, list[bytes]]]:
    for place_of in Path("/proc").iterdir():
        if place_of.name.isdigit():
            with contextlib.suppress(OSError):
                command = (place_of / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if command != [b""]:
                    yield int(place_of.name), command


def kill(pids: list[int]) -> list[int]:
    """kill -9 of each; those that were there."""
    there = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            there.append(pid)
    return there


def until(condition: Callable[[], object], otherwise: Callable[[], str], patient_s: float = PATIENT_S) -> None:
    """Returns once the condition holds."""
    deadline_s = time.monotonic() + patient_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(otherwise())
        time.sleep(0.02)


@contextlib.contextmanager
def box(**options: Any) -> Iterator[Box]:
    """A queue in a folder that other users can reach if the queue lets them; nothing of it is left behind."""
    parent = Path(tempfile.mkdtemp(prefix="evenload-queue-"))
    parent.chmod(0o755)
    made = Box(parent / "queue", **options)
    try:
        yield made
    finally:
        made.clean()
        shutil.rmtree(parent, ignore_errors=True)
