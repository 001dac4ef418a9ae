"""A queue beside external processes, on GPUs that a file stands in for: they take and free devices at random, memory
comes back late, or nobody holds it.

The queue asks the stand-in through the same calls as NVML. Each job's program looks at its device in its first
instruction, and then shows up there as a CUDA process would. A device taken between the queue's look and the
program's first instruction can't be seen by any queue; it is counted apart.

``python -m tests.system.scheduler.external_box NUM_STARTS SEED`` prints what it found as JSON.
"""

from __future__ import annotations

import bisect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from evenload.scheduler.store.ledger import RunnerStarted
from evenload.scheduler.store.reader import Reader
from tests.paths import ROOT
from tests.system.scheduler.daemons import Box, box, until

NUM_GPUS = 4
_GIB = 2**30

_CARDS = """
import contextlib, fcntl, json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
@contextlib.contextmanager
def cards():
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads((folder / "cards.json").read_text())
        yield found
        part = folder / f"cards.{os.getpid()}"
        part.write_text(json.dumps(found))
        part.replace(folder / "cards.json")
"""

EXTERNAL = (
    _CARDS
    + """
import random
rng = random.Random(int(sys.argv[2]))
me = os.getpid()
while True:
    time.sleep(0.005)
    now_s = time.time()
    with cards() as found:
        for card in found:
            if card["clears_s"] and now_s > card["clears_s"]:
                card["used"], card["clears_s"] = card["ghost"], 0
            if me in card["pids"]:
                if now_s > card["until_s"]:
                    card["pids"], card["clears_s"] = [], now_s + rng.uniform(0, 0.1)
            elif not card["pids"] and not card["used"] and not card["ghost"] and rng.random() < 0.005:
                card.update(pids=[me], used=2**30, taken_s=time.time(), until_s=now_s + rng.uniform(0.1, 1.5))
"""
)

PROGRAM = (
    _CARDS
    + """
import random
began_s = time.time()
terms = json.loads(Path(os.environ["EVENLOAD_JOB"]).read_text())
number = int(os.environ["CUDA_VISIBLE_DEVICES"].split("-")[1][0])
with cards() as found:
    card = found[number]
    was = {"pids": card["pids"], "used": card["used"], "taken_s": card["taken_s"]}
    card.update(pids=[*card["pids"], os.getpid()], used=card["used"] + 2**30)
with (folder / "starts").open("a") as file:
    file.write(json.dumps({"gpu": number, "began_s": began_s, "job": terms["job"], "attempt": terms["attempt"], **was}) + "\\n")
time.sleep(random.uniform(0, 0.1))
with cards() as found:
    card = found[number]
    card.update(pids=[pid for pid in card["pids"] if pid != os.getpid()], clears_s=time.time() + random.uniform(0, 0.3))
"""
)

_GHOST = (
    _CARDS
    + """
number, ghost = int(sys.argv[2]), int(sys.argv[3])
with cards() as found:
    card = found[number]
    if not ghost or not (card["pids"] or card["used"]):
        card.update(used=ghost, ghost=ghost, taken_s=time.time())
        print("done")
"""
)


def run(num_starts: int, seed: int) -> dict[str, Any]:
    """All of it in folders of its own."""
    variables = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "stand_in_nvml"), str(ROOT)])}
    with box(variables=variables) as made:
        work = made.folder.parent / "work"
        work.mkdir()
        made._variables["STAND_IN_GPUS_FILE"] = str(work / "cards.json")
        card = {"Name": "NVIDIA H200", "total": 139 * _GIB, "pids": [], "used": 0, "ghost": 0}
        card |= {"taken_s": 0.0, "until_s": 0.0, "clears_s": 0.0}
        (work / "cards.json").write_text(json.dumps([card] * NUM_GPUS))
        (work / "program.py").write_text(PROGRAM)
        (work / "external.py").write_text(EXTERNAL)
        made.settings("[watch]\nevery_s = 0.5\n")
        made.start()
        made.client().close()
        external = subprocess.Popen([sys.executable, str(work / "external.py"), str(work), str(seed)])
        try:
            return _measure(made, work, num_starts, external.pid)
        finally:
            external.kill()
            external.wait()


def _measure(made: Box, work: Path, num_starts: int, external: int) -> dict[str, Any]:
    kinds = {device["kind"] for device in made.call("status")["devices"]}
    program = {"command": [sys.executable, str(work / "program.py"), str(work)], "folder": str(work)}
    jobs: list[str] = []
    while len(jobs) < num_starts:
        jobs += made.call("submit", jobs=[{"program": program}] * min(100, num_starts - len(jobs)))["jobs"]
    named = _wait_until_named(made, external)
    ghosts_s = [_ghost(made, work, number) for number in range(2)]
    until(lambda: not made.call("list", limit=1)["jobs"], lambda: f"{made.call('status')}\n{made.log()}", 300)
    counts = made.call("list", ended=True, limit=1)["counts"]
    made.stop()
    starts = [json.loads(line) for line in (work / "starts").read_text().splitlines()]
    return {
        "kinds": sorted(kinds),
        "counts": counts,
        "named": named,
        "ghosts_named_s": ghosts_s,
        **_judged(made, work, starts),
    }


def _wait_until_named(made: Box, external: int) -> dict[str, Any]:
    """The external process as ``status`` names it."""
    seen: list[dict[str, Any]] = []

    def is_named() -> bool:
        for device in made.call("status")["devices"]:
            if device["closed"]:
                seen.extend(row for row in device["external"] if row["pid"] == external)
        return bool(seen)

    until(is_named, lambda: f"the external process isn't named: {made.call('status')}")
    return seen[0]


def _ghost(made: Box, work: Path, number: int) -> float:
    """Seconds until memory without a process is named; it is then taken away."""
    script = work / "ghost.py"
    script.write_text(_GHOST)

    def turn(ghost: int) -> bool:
        command = [sys.executable, str(script), str(work), str(number), str(ghost)]
        return subprocess.run(command, check=True, capture_output=True).stdout == b"done\n"

    until(lambda: turn(5 * _GIB), lambda: "the GPU is never free")
    began_s = time.monotonic()

    def is_named() -> bool:
        device = made.call("status")["devices"][number]
        return device["ghost_bytes"] >= 5 * _GIB and "no process is known" in device["closed"]

    until(is_named, lambda: f"the ghost isn't named: {made.call('status')}")
    took_s = time.monotonic() - began_s
    turn(0)
    return took_s


def _judged(made: Box, work: Path, starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what each start found, and what the look before it could have seen.

    The last look before a start may still have been under way when the queue decided. The one before it had ended, because
    looks follow one another in one thread: what it saw was known.
    """
    with Reader(made.folder) as reader:
        log = list(reader.log())
    let_go_s = {(e.job, e.attempt): e.time_s for told in log if isinstance(e := told.entry, RunnerStarted)}
    looks_s: list[list[float]] = [[] for _ in range(NUM_GPUS)]
    for line in (work / "looks").read_text().splitlines():
        looks_s[int(line.split()[1])].append(float(line.split()[0]))
    on_held, in_between, windows_s = [], [], []
    for start in starts:
        looks = looks_s[start["gpu"]]
        last = bisect.bisect_right(looks, let_go_s[start["job"], start["attempt"]]) - 1
        windows_s.append(start["began_s"] - looks[last])
        if start["pids"] or start["used"]:
            (in_between if start["taken_s"] > looks[max(last - 1, 0)] else on_held).append(start)
    refused = sum(1 for told in log if type(told.entry).__name__ == "Yielded")
    closed = sum(1 for told in log if type(told.entry).__name__ == "DeviceClosed")
    return {
        "starts": len(starts),
        "on_held_devices": on_held,
        "taken_between_look_and_start": len(in_between),
        "from_look_to_start_ms": {"median": 1e3 * median(windows_s), "most": 1e3 * max(windows_s)},
        "turned_back_at_the_gate": refused,
        "devices_closed": closed,
    }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2])), indent=1))
