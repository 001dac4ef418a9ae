"""Goodput of a run whose processes are killed one after the other: Evenload, and torchrun with checkpoints.

Method: one rank on each of two cores trains churn_job.py in steps of 0.3 s. Every 20 s a rank is killed by SIGKILL, each in
turn; whatever started it starts it again on the same core. Arms: Evenload, which goes on with the ranks that are left;
torchrun, which restarts all of them from a checkpoint written every 20 steps, or every epoch (100 steps); torchft, where it
is installed, whose replicas go on with half of the batch while the other is down (heartbeats time out after 1 s).

A rank is alive from the moment when it has imported everything and is about to join until its process ends, in every arm
alike. Goodput is the samples of distinct steps done over alive seconds times the speed of a device: the best that any arm
reached before its first kill. Steps that are done again count once; of torchft, the samples of the replicas that committed a
step count. Reported beside it: seconds from a kill to the next step, steps done again, and the seconds in which processes
started (not alive). `--only evenload` (or `every 20 steps`, `every epoch`, `torchft`) measures one arm anew and takes the
others from the last result.

Bar: Evenload's goodput is at least 0.95.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import churn_job
from benchmarks.report import RESULTS, rows

NUM_RANKS = 2
_LIMIT = 0.95
_POLL_S = 0.01
_MOST_START_S = 120.0


@dataclass(frozen=True)
class _Process:
    pid: int
    ready_s: float
    steps: dict[int, float]
    """Time at which each step was done."""


def measure(quick: bool, only: str = "") -> dict[str, Any]:
    step_s, kill_every_s, num_kills = (0.05, 6.0, 2) if quick else (0.3, 20.0, 4)
    batch_size = max(NUM_RANKS, round(NUM_RANKS * step_s / churn_job.sample_seconds()) // NUM_RANKS * NUM_RANKS)
    script = churn_job.__file__
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}",
                "--max-restarts=1000", "--monitor-interval=0.1", script, "ddp"]  # fmt: skip
    evenload = [
        sys.executable,
        "-m",
        "evenload.cli.main",
        "run",
        "-d",
        f"cpu:{NUM_RANKS}",
        "--max-restarts=1000",
        script,
    ]
    arms: dict[str, tuple[list[str], list[str]]] = {
        "evenload": ([*evenload, "evenload"], []),
        "torchrun, saves every 20 steps": (torchrun, ["20"]),
        "torchrun, saves every epoch": (torchrun, [str(churn_job.EPOCH_STEPS)]),
    }
    if find_spec("torchft") is not None:
        arms["torchft"] = ([sys.executable, script, "torchft"], [])
    found = _earlier() if only else {}
    for name, (command, more) in ((name, arm) for name, arm in arms.items() if name.endswith(only)):
        found[name] = _run_arm(command, more, batch_size, kill_every_s, num_kills)
        print(f"{name}: {found[name]['samples']} samples in {found[name]['alive_s']:.0f} device seconds", flush=True)
    speed = max(arm["speed_per_s"] for arm in found.values())
    for arm in found.values():
        arm["goodput"] = arm["samples"] / (arm["alive_s"] * speed)
    bars = {} if quick else {f"goodput of Evenload is at least {_LIMIT}": found["evenload"]["goodput"] >= _LIMIT}
    return {
        "not_measured": [] if "torchft" in found else ["torchft: not installed"],
        "batch_size": batch_size,
        "kill_every_s": kill_every_s,
        "num_kills": num_kills,
        "speed_per_s": speed,
        "arms": found,
        "bars": bars,
    }


def _earlier() -> dict[str, dict[str, Any]]:
    """Return the arms of the last result."""
    path = RESULTS / "churn.json"
    return dict(json.loads(path.read_text())["result"]["arms"]) if path.exists() else {}


def _run_arm(
    command: Sequence[str], more: Sequence[str], batch_size: int, kill_every_s: float, num_kills: int
) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="evenload-churn-"))
    (folder / "notes").mkdir()
    with (folder / "printed").open("wb") as printed:
        launcher = subprocess.Popen(
            [*command, str(folder), str(batch_size), *more],
            stdout=printed,
            stderr=printed,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        )
    deaths: dict[int, float] = {}
    try:
        began_s = _wait_for_steps(folder, deaths, launcher, 5)
        kills_s = []
        for index in range(num_kills):
            _watch(folder, deaths, until_s=began_s + kill_every_s * (index + 1))
            # Each core in turn: the oldest process is the one that was not killed last.
            limit_s = time.time() + _MOST_START_S
            while not (trained := [one for one in _read(folder) if one.pid not in deaths and one.steps]):
                if launcher.poll() is not None or time.time() > limit_s:
                    raise RuntimeError(
                        f"no rank trained within {_MOST_START_S:.0f} s after a kill, or the launcher ended"
                    )
                _watch(folder, deaths, until_s=time.time() + 0.1)
            victim = min(trained, key=lambda process: process.ready_s)
            kills_s.append(time.time())
            os.kill(victim.pid, signal.SIGKILL)
        ended_s = kills_s[-1] + kill_every_s
        _watch(folder, deaths, until_s=ended_s)
        is_apart = "torchft" in command
        return _account(_read(folder), deaths, began_s, ended_s, kills_s, batch_size, is_apart)
    except BaseException:
        print((folder / "printed").read_text()[-4000:], flush=True)
        raise
    finally:
        for process in _read(folder):
            with suppress(ProcessLookupError, PermissionError):
                if process.pid not in deaths:
                    os.kill(process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path) -> list[_Process]:
    found = []
    for path in (folder / "notes").iterdir():
        lines = [line.split() for line in path.read_text().splitlines()]
        if lines:
            steps = {int(line[2]): float(line[0]) for line in lines if line[1] == "step"}
            found.append(_Process(int(path.name), float(lines[0][0]), steps))
    return found


def _watch(folder: Path, deaths: dict[int, float], until_s: float) -> None:
    """Note the ends of processes until a time."""
    while time.time() < until_s:
        for path in (folder / "notes").iterdir():
            pid = int(path.name)
            if pid not in deaths and _has_ended(pid):
                deaths[pid] = time.time()
        time.sleep(_POLL_S)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def _wait_for_steps(folder: Path, deaths: dict[int, float], launcher: subprocess.Popen[bytes], num_steps: int) -> float:
    """Return the time at which all ranks have done so many steps."""
    deadline_s = time.time() + _MOST_START_S
    while True:
        trained = [process for process in _read(folder) if len(process.steps) >= num_steps]
        if len(trained) == NUM_RANKS:
            return time.time()
        if time.time() > deadline_s or launcher.poll() is not None:
            raise RuntimeError(f"the ranks did not train within {_MOST_START_S:.0f} s")
        _watch(folder, deaths, time.time() + 0.1)


def _account(
    processes: Sequence[_Process],
    deaths: dict[int, float],
    began_s: float,
    ended_s: float,
    kills_s: Sequence[float],
    batch_size: int,
    is_apart: bool,
) -> dict[str, Any]:
    """Account an arm; `is_apart`: a step has the samples of the ranks that did it, each with its part of the batch."""
    times: dict[int, list[float]] = {}
    for process in processes:
        for step, at_s in process.steps.items():
            times.setdefault(step, []).append(at_s)
    done_s = sorted(min(found) for found in times.values())
    if is_apart:
        done_s = sorted(at_s for found in times.values() for at_s in found)
        batch_size //= NUM_RANKS
    samples = batch_size * sum(began_s < at_s <= ended_s for at_s in done_s)
    alive_s = sum(
        max(0.0, min(deaths.get(process.pid, ended_s), ended_s) - max(process.ready_s, began_s))
        for process in processes
    )
    first_s = kills_s[0] - began_s
    undisturbed = batch_size * sum(began_s < at_s <= kills_s[0] for at_s in done_s)
    every_s = sorted(at_s for process in processes for at_s in process.steps.values())
    return {
        "samples": samples,
        "alive_s": alive_s,
        "starting_s": NUM_RANKS * (ended_s - began_s) - alive_s,
        "speed_per_s": undisturbed / (NUM_RANKS * first_s),
        "to_next_step_s": [next((at_s for at_s in every_s if at_s > kill_s), ended_s) - kill_s for kill_s in kills_s],
        "steps_again": sum(max(found) - min(found) > 1.0 for found in times.values()),
        "longest_gap_s": max((later - earlier for earlier, later in pairwise(every_s)), default=0.0),
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        [
            name,
            f"{arm['goodput']:.3f}",
            arm["samples"],
            f"{arm['alive_s']:.0f} s",
            f"{arm['starting_s']:.0f} s",
            f"{median(arm['to_next_step_s']):.1f} s",
            f"{arm['longest_gap_s']:.1f} s",
            arm["steps_again"],
        ]
        for name, arm in result["arms"].items()
    ]
    head = ["arm", "goodput", "samples", "alive", "starting", "to the next step", "longest gap", "steps again"]
    return "\n".join([rows(head, lines), f"a kill every {result['kill_every_s']:.0f} s"])
