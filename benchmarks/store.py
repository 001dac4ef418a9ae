"""The queue's store: durable submits a second, lists of 100,000 jobs, and the time to open such a queue.

Method: SQLite on a local disk (its file system is told), each commit forced to disk. Submits: 1, 8 and 32 clients, each of
which sends its next job when the last one is on disk; one writer takes all that wait, commits, and answers them: the
daemon's loop without its socket. Time per submit from sending to the answer. The same through the socket of a real daemon,
each client a process of its own that sends one job (which may not start yet) and waits for the answer. Lists: a queue of
100,000 jobs of 50 users, of which nine in ten have ended; median of 5 calls of a `Reader` in another process's place (a new
connection each). Opening: the writer's own start on that queue, and on one in which all 100,000 wait.

The command: ``evenload ps`` on that queue as a process of its own, its start included, what it prints into a pipe; median
of 5.

Bars: at least 500 submits a second with 8 clients, without the socket and through it; the list of all 100,000 jobs within
0.5 s, by a Reader and by ``evenload ps``, ``ps --all`` and ``ps --all --json``.
"""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import rows
from evenload.errors import QueueError
from evenload.hardware import mount_of
from evenload.scheduler import paths
from evenload.scheduler.client import connect
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device, JobSpec
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore

SUBMITS_PER_S = 500.0
LIST_S = 0.5
_PROGRAM = {"command": ["python", "train.py", "--width", "512"], "folder": "/home/ann/gpt", "environment": {"A": "1"}}


def measure(quick: bool) -> dict[str, Any]:
    """All three."""
    with tempfile.TemporaryDirectory(dir=_on_disk()) as name:
        folder = Path(name)
        mount = mount_of(folder)
        clients = {str(num): _submits(folder / f"of-{num}", num, quick) for num in ((8,) if quick else (1, 8, 32))}
        through = {
            str(num): _through_a_daemon(folder / f"by-{num}", num, quick) for num in ((8,) if quick else (1, 8, 32))
        }
        lists = _lists(folder, 2_000 if quick else 100_000, num_ps=1 if quick else 5)
    return {
        "file_system": mount.fs_type if mount is not None else "unknown",
        "clients": clients,
        "through_a_daemon": through,
        **lists,
        "bars": {
            f"{SUBMITS_PER_S:.0f} durable submits a second, 8 clients": clients["8"]["per_s"] >= SUBMITS_PER_S,
            f"{SUBMITS_PER_S:.0f} durable submits a second through a daemon, 8 clients": through["8"]["per_s"]
            >= SUBMITS_PER_S,
            f"the list of {lists['num_jobs']:,} jobs in {LIST_S} s": lists["list_s"]["all"] <= LIST_S,
            f"each evenload ps of {lists['num_jobs']:,} jobs in {LIST_S} s": max(lists["ps_s"].values()) <= LIST_S,
        },
    }


def _on_disk() -> str:
    """A folder that isn't in memory, where there is one."""
    for name in (tempfile.gettempdir(), str(Path.cwd())):
        mount = mount_of(Path(name))
        if mount is None or mount.fs_type != "tmpfs":
            return name
    return tempfile.gettempdir()


def _submits(folder: Path, num_clients: int, quick: bool) -> dict[str, Any]:
    """Clients in closed loops, and the writer who answers once a commit is on disk."""
    each = 20 if quick else 4000 // num_clients
    waiting: queue.SimpleQueue[tuple[str, threading.Event]] = queue.SimpleQueue()
    took_s: list[float] = []

    def client(number: int) -> None:
        for turn in range(each):
            began_s, answered = time.perf_counter(), threading.Event()
            waiting.put((f"{number}.{turn}", answered))
            answered.wait()
            took_s.append(time.perf_counter() - began_s)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    num_commits = 0
    with QueueStore(folder, holder="the benchmark") as store:
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        left = num_clients * each
        while left:
            batch = [waiting.get()]
            while not waiting.empty():
                batch.append(waiting.get())
            for name, _ in batch:
                store.record(events.Submitted(time.time(), name, JobSpec("ann")), extra=_PROGRAM)
            store.commit()
            num_commits += 1
            for _, answered in batch:
                answered.set()
            left -= len(batch)
        wall_s = time.perf_counter() - began_s
        for thread in threads:
            thread.join()
    with Reader(folder) as reader:
        if reader.counts() != {JobState.PENDING: num_clients * each}:
            raise RuntimeError(f"{num_clients * each} jobs were submitted, there are {reader.counts()}")
    return {"commits": num_commits, **_summary(took_s, wall_s)}


def _summary(took_s: list[float], wall_s: float) -> dict[str, Any]:
    ordered = sorted(took_s)
    return {
        "submits": len(took_s),
        "per_s": len(took_s) / wall_s,
        "median_s": median(took_s),
        "p99_s": ordered[int(0.99 * len(ordered))],
    }


def _through_a_daemon(folder: Path, num_clients: int, quick: bool) -> dict[str, Any]:
    """Clients in closed loops, each a process, and a daemon of their own."""
    each = 5 if quick else 1600 // num_clients
    paths.make_private(folder)
    words = [sys.executable, "-m", "evenload.scheduler.daemon", "--queue", str(folder), "--foreground"]
    with (folder / "daemon.out").open("wb") as log:
        daemon = subprocess.Popen(words, stdout=log, stderr=log)
    context = multiprocessing.get_context("spawn")
    begin, told = context.Event(), context.SimpleQueue()
    clients = [context.Process(target=_submit, args=(folder, each, begin, told)) for _ in range(num_clients)]
    try:
        until_s = time.monotonic() + 60.0
        while not _answers(folder) and time.monotonic() < until_s:
            time.sleep(0.1)
        for client in clients:
            client.start()
        for _ in clients:
            told.get()  # it is connected
        began_s = time.perf_counter()
        begin.set()
        took_s = [seconds for _ in clients for seconds in told.get()]
        wall_s = time.perf_counter() - began_s
    finally:
        daemon.terminate()
        daemon.wait(60.0)
        for client in clients:
            if client.pid is not None:
                client.kill()
                client.join()
    with Reader(folder) as reader:
        if reader.counts() != {JobState.PENDING: num_clients * each}:
            raise RuntimeError(f"{num_clients * each} jobs were submitted, there are {reader.counts()}")
    return _summary(took_s, wall_s)


def _answers(folder: Path) -> bool:
    try:
        connect(folder, start=False).close()
    except QueueError:
        return False
    return True


def _submit(folder: Path, num: int, begin: Any, told: Any) -> None:
    """One client: connects, waits for the word, submits; tells how long each took."""
    program = {**_PROGRAM, "folder": str(folder), "command": ["true"], "grace_s": 30.0}
    took_s = []
    with connect(folder, start=False) as client:
        told.put(None)
        begin.wait()
        for _ in range(num):
            began_s = time.perf_counter()
            client.call("submit", spec={"not_before_s": time.time() + 3600.0}, program=program)
            took_s.append(time.perf_counter() - began_s)
    told.put(took_s)


def _lists(folder: Path, num_jobs: int, num_ps: int) -> dict[str, Any]:
    waiting, ended = folder / "waiting", folder / "ended"
    _fill(waiting, num_jobs, num_that_run=0)
    _fill(ended, num_jobs, num_that_run=9 * num_jobs // 10)
    queue_states = [
        state for state in JobState if state not in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
    ]

    def ask(question: Callable[[Reader], Any]) -> float:
        times = []
        for _ in range(5):
            began_s = time.perf_counter()
            with Reader(ended) as reader:
                question(reader)
            times.append(time.perf_counter() - began_s)
        return median(times)

    with Reader(ended) as reader:
        if len(reader.jobs()) != num_jobs or len(reader.jobs(states=queue_states)) != num_jobs - 9 * num_jobs // 10:
            raise RuntimeError(f"the lists are wrong: {reader.counts()}")
    return {
        "num_jobs": num_jobs,
        "list_s": {
            "all": ask(lambda reader: reader.jobs()),
            "in the queue": ask(lambda reader: reader.jobs(states=queue_states)),
            "one user's": ask(lambda reader: reader.jobs(user="user7")),
            "the last 50": ask(lambda reader: reader.jobs(newest_first=True, limit=50)),
            "counts": ask(lambda reader: reader.counts()),
        },
        "ps_s": {
            " ".join(("ps", *words)): _ps(ended, num_ps, *words) for words in ((), ("--all",), ("--all", "--json"))
        },
        "open_s": {"one in ten waits": _opening(ended), "all wait": _opening(waiting)},
        "audit": audit(ended),
    }


def _fill(folder: Path, num_jobs: int, num_that_run: int) -> None:
    with QueueStore(folder, holder="the benchmark") as store:
        store.record(events.DeviceAdded(0.0, Device("gpu0", "here")))
        for number in range(num_jobs):
            job = f"{number}"
            spec = JobSpec(f"user{number % 50}", name=f"gpt-{number}", priority=number % 3)
            store.record(events.Submitted(float(number), job, spec), extra=_PROGRAM)
            if number < num_that_run:
                store.record(events.Placed(float(number), job, ("gpu0",), 1, "first in line"))
                store.record(events.JobStarted(float(number), job))
                store.record(events.Ended(float(number), job, number % 10 > 0, "exit code"))
            if number % 1000 == 999:
                store.commit()
        store.commit()


def _ps(folder: Path, num: int, *words: str) -> float:
    times = []
    for _ in range(num):
        began_s = time.perf_counter()
        command = [sys.executable, "-m", "evenload.cli.main", "ps", "--queue", str(folder), *words]
        subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60)
        times.append(time.perf_counter() - began_s)
    return median(times)


def _opening(folder: Path) -> float:
    began_s = time.perf_counter()
    with QueueStore(folder, holder="the benchmark"):
        return time.perf_counter() - began_s


def table(result: dict[str, Any]) -> str:
    """For people."""
    submits = rows(
        ["clients", "submits/s", "a commit", "median", "p99"],
        [
            [
                f"{num}{through}",
                f"{case['per_s']:.0f}",
                f"{case['submits'] / case['commits']:.1f}" if "commits" in case else "",
                f"{case['median_s'] * 1e3:.1f} ms",
                f"{case['p99_s'] * 1e3:.1f} ms",
            ]
            for cases, through in (("clients", ""), ("through_a_daemon", ", through a daemon"))
            for num, case in result[cases].items()
        ],
    )
    times = {
        **result["list_s"],
        **result["ps_s"],
        **{f"opened, {name}": seconds for name, seconds in result["open_s"].items()},
    }
    lists = rows([f"{result['num_jobs']:,} jobs", "seconds"], [[name, f"{s:.3f}"] for name, s in times.items()])
    return f"{submits}\n\n{lists}\n\non {result['file_system']}"
