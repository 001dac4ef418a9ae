"""Seeded random faults in real runs: nothing is lost, nothing is used twice, and the weights are those of an undisturbed run.

Method: `evenload run` trains disturbed_job.py in float64 over gloo on 3 or 4 ranks, about a dozen faults a run: SIGKILL, SIGSTOP,
exceptions, out of memory, a loader's worker that dies, requests to leave and to join; in forward, backward, between buckets, in
statistics of BatchNorm, in the exchange of a step, between it and the optimizer, after the optimizer, in another collective, in
an evaluation, in `run.reduce` and `run.gather`, in the write of a checkpoint, in the dataset, at the end. Evaluations gather
in each second epoch, and in each third a rank has no batches. A run that ends is started again by the same command. Then the
samples of all committed steps (evenload.testing.ledger) and the final weights are compared with those of one process. A seed
makes the same faults again: `python -m benchmarks faults --only 17`; what happened at which moment may differ.

Bars: over at least 300 faults 0 samples lost, 0 used twice, weights within 1e-9. (Where memory ran out so often that a
micro-batch has two samples, BatchNorm's gradients are nearly rounding: within 100 times of what a noise of 1e-15 does there.)
A killed rank is noticed within 1 s, and training goes on within 3 s after it (on a quiet machine).
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks import disturbed_job
from benchmarks.report import rows
from evenload.errors import ConfigError
from evenload.records.reader import read_events, read_steps
from evenload.records.values import RunEvent
from evenload.testing.faults import Fault, read_happened
from evenload.testing.ledger import check_ledger, relative_difference
from evenload.training.launch.run_control import change_devices_of, members_of

NUM_FAULTS = 300
_A_RUN = 12
_MOST_SESSIONS = 8
_SILENT_S = 90.0
"""A run without a new step for so long hangs."""
_CHOICES: tuple[tuple[str, tuple[str, ...], int], ...] = (
    # kind, points, weight
    ("kill", ("forward", "backward", "bucket", "statistics", "exchange", "reduced", "applied", "any", "end", "evaluation",
              "checkpoint", "loader", "begin", "rebuild", "reduce", "gather", "round", "confirm", "confirm_between", "last"), 45),
    ("out_of_memory", ("forward", "backward", "loader"), 15),
    ("exception", ("forward", "backward", "loader", "forward", "backward", "reduced", "end", "evaluation", "checkpoint"), 14),
    ("stop", ("forward", "bucket", "statistics", "reduced", "applied", "evaluation", "checkpoint", "loader",
              "reduce", "gather", "round", "confirm_between"), 8),
    ("leave", ("begin",), 9),
    ("join", ("begin",), 9),
)  # fmt: skip
ENDS_THE_RUN = ("reduced", "end", "evaluation")
"""Points at which an exception is one that nobody catches."""


def draw_faults(
    seed: int, num_faults: int, num_ranks: int, *, kinds: Sequence[str] = (), ends: bool = True
) -> list[Fault]:
    """Return faults in the order of their steps, some of them in the same step; `ends`: with exceptions that end a session."""
    choose = random.Random(seed)
    choices = [choice for choice in _CHOICES if not kinds or choice[0] in kinds]
    num_steps = len(disturbed_job.EXPECTED)
    apart = (num_steps - 30) / num_faults
    faults: list[Fault] = []
    while len(faults) < num_faults:
        kind, points, _ = choose.choices(choices, [weight for *_, weight in choices])[0]
        point = choose.choice(points)
        if not ends and kind == "exception" and point in ENDS_THE_RUN:
            continue
        step = int(3 + (len(faults) + choose.random()) * apart)
        if faults and choose.random() < 0.2:
            step = faults[-1].step  # two at once
        # A loader without workers reads in the rank itself; only the first epoch's samples are known by their step.
        step = step % disturbed_job.STEPS if point == "loader" else step
        rank = 0 if point == "checkpoint" or kind in ("leave", "join") else choose.randrange(num_ranks)
        seconds = choose.choice((0.0, 0.3)) if kind == "stop" else 0.0
        faults.append(Fault(rank, kind, point, step, seconds, least_ranks=2 if kind in ("kill", "stop") else 1))
    return faults


class Process(Protocol):
    """A started command, as `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...

    def communicate(self, timeout: float | None = None) -> tuple[str, str]: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Path], Process]
"""Starts python with arguments in a folder."""


@dataclass
class DisturbedRun:
    seed: int
    faults: list[Fault]
    happened: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)
    """How each ended."""
    ends_s: list[float] = field(default_factory=list)
    """When each ended, in seconds since 1970."""
    problems: list[str] = field(default_factory=list)
    num_repeated: int = 0
    """Steps that were computed again, at most in part."""
    difference: float = float("nan")
    rounding: float = 0.0
    """Difference that rounding alone may make, where a micro-batch has two samples."""
    noticed_s: list[float] = field(default_factory=list)
    """From each SIGKILL of a rank to the supervisor's notice; without those after which all ranks ended or started again."""
    again_s: list[float] = field(default_factory=list)
    """From that notice to the next step."""
    seconds: float = 0.0


def disturb(
    folder: Path,
    seed: int,
    num_faults: int,
    num_ranks: int,
    start: Start,
    *,
    ends: bool = True,
    kinds: Sequence[str] = (),
) -> DisturbedRun:
    """Train with random faults, again after a session that ended, and check the ledger and the weights."""
    began_s = time.monotonic()
    faults = draw_faults(seed, num_faults, num_ranks, ends=ends, kinds=kinds)
    outcome = DisturbedRun(seed, faults)
    for name in ("happened", "pids"):
        (folder / name).mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))
    choose = random.Random(seed + 1)
    arguments = [str(folder), str(choose.choice((0, 0, 1))), choose.choice(("auto", "auto", "12"))]
    script = str(Path(disturbed_job.__file__))
    command = ["-m", "evenload.cli.main", "run", "-d", f"cpu:{num_ranks}", "--max-restarts", "1", script, *arguments]
    for _ in range(_MOST_SESSIONS):
        (folder / "wanted").write_text(str(num_ranks))
        code, ended = _session(folder, num_ranks, start(command, folder), outcome)
        outcome.sessions.append(ended)
        outcome.ends_s.append(time.time())
        if code == 0 or outcome.problems:
            break
    else:
        outcome.problems.append(f"it did not end well in {_MOST_SESSIONS} sessions")
    outcome.happened = read_happened(folder / "happened")
    outcome.seconds = time.monotonic() - began_s
    if not outcome.problems:
        _check(folder, outcome)
    return outcome


def _session(folder: Path, num_ranks: int, process: Process, outcome: DisturbedRun) -> tuple[int, str]:
    """Wait for the end of a session, keeping the number of ranks; return its exit code and what it printed of its end."""
    over = threading.Event()
    keeper = threading.Thread(target=_keep_ranks, args=(folder, num_ranks, over), daemon=True)
    keeper.start()
    printed: list[tuple[str, str]] = []
    reader = threading.Thread(target=lambda: printed.append(process.communicate()), daemon=True)
    reader.start()
    steps = folder / "run" / "steps.jsonl"
    size, grown_s = -1, time.monotonic()
    while reader.is_alive():
        reader.join(0.2)
        now = steps.stat().st_size if steps.exists() else 0
        if now != size:
            size, grown_s = now, time.monotonic()
        if time.monotonic() - grown_s > _SILENT_S:
            outcome.problems.append(f"no step for {_SILENT_S:.0f} s; the stacks are in {folder}/printed")
            for path in (folder / "pids").iterdir():
                with suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGUSR1)
            time.sleep(1.0)
            process.kill()
            reader.join()
    over.set()
    code = process.poll()
    stdout, stderr = printed[0]
    with (folder / "printed").open("a") as file:
        file.write(f"--- session, exit code {code}\n{stdout}\n{stderr}\n")
    lines = [line for line in stderr.splitlines() if "failed" in line or "can't go on" in line or "Error" in line]
    return (1 if code is None else code), " | ".join(lines[-3:]) if code else ""


def _keep_ranks(folder: Path, num_ranks: int, over: threading.Event) -> None:
    """Carry out the faults that leave or join, and replace ranks that are not restarted by the launcher."""
    run = folder / "run"
    while not over.wait(0.1):
        wanted = num_ranks
        requests = [row for row in read_happened(folder / "happened").values() if row["kind"] in ("leave", "join")]
        for row in sorted(requests, key=lambda row: row["time_s"]):
            wanted = max(2, wanted - 1) if row["kind"] == "leave" else min(4, wanted + 1)
        partial = folder / "wanted.partial"
        partial.write_text(str(wanted))
        partial.replace(folder / "wanted")
        if len(members_of(run)) not in (0, wanted):
            with suppress(ConfigError):
                for _ in change_devices_of(run, f"cpu:{wanted}"):
                    pass


def _check(folder: Path, outcome: DisturbedRun) -> None:
    check = check_ledger(folder / "run", disturbed_job.EXPECTED)
    outcome.problems += check.problems
    outcome.num_repeated = check.num_repeated_plans
    if check.problems:
        return
    sizes = [[len(part) for part in one.micro] for one in check.committed]
    expected = disturbed_job.undisturbed(sizes)
    outcome.difference = relative_difference(torch.load(folder / "weights.pt"), expected)
    if min(map(min, sizes)) <= 2:
        outcome.rounding = relative_difference(disturbed_job.undisturbed(sizes, noise=1e-15), expected)
    if not outcome.difference <= max(1e-9, 100 * outcome.rounding):
        outcome.problems.append(f"the weights differ by {outcome.difference:.1e}")
    trained_s = sorted(record.time for record in read_steps(folder / "run"))
    kills = [row for row in outcome.happened.values() if row["kind"] == "kill" and row["point"] != "loader"]
    for kill_s, noticed_s in notices(kills, read_events(folder / "run"), outcome.ends_s):
        if (again_s := next((one for one in trained_s if one > noticed_s), None)) is not None:
            outcome.noticed_s.append(noticed_s - kill_s)
            outcome.again_s.append(again_s - noticed_s)


def notices(
    kills: Sequence[Mapping[str, Any]], events: Sequence[RunEvent], ends_s: Sequence[float]
) -> list[tuple[float, float]]:
    """Return the time of each kill and that of its notice, without kills after which all ranks ended or started again.

    `ends_s`: when each command ended. After a start of all, other processes have the same names of workers.
    """
    bounds_s = sorted((*ends_s, *(event.time for event in events if event.kind == "restarted"), math.inf))
    found = []
    for row in kills:
        end_s = next(one for one in bounds_s if one >= row["time_s"])
        of_worker = (e.fields["time_s"] for e in events if e.kind == "lost" and e.fields["worker"] == row["worker"])
        if (noticed_s := min((s for s in of_worker if row["time_s"] - 0.01 <= s <= end_s), default=None)) is not None:
            found.append((row["time_s"], noticed_s))
    return found


def measure(quick: bool, only: str = "") -> dict[str, Any]:
    def start(arguments: Sequence[str], folder: Path) -> Process:
        variables = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=variables, stdout=pipe, stderr=pipe, text=True
        )

    wanted = 10 if quick else NUM_FAULTS
    seeds = [int(one) for one in only.split(",")] if only else []
    runs: list[DisturbedRun] = []
    seed = 0
    while (seeds or not only) and (only or sum(len(run.happened) for run in runs) < wanted):
        seed = seeds.pop(0) if only else seed + 1
        folder = Path(tempfile.mkdtemp(prefix=f"evenload-faults-{seed}-"))
        run = disturb(folder, seed, min(_A_RUN, wanted), 3 + seed % 2, start)
        runs.append(run)
        ended = f", {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
        word = "ok" if not run.problems else f"FAILED, kept in {folder}: {'; '.join(run.problems)}"
        print(
            f"seed {seed}: {len(run.happened)} of {len(run.faults)} faults, {run.num_repeated} steps again, weights "
            f"{run.difference:.0e}{_beside_rounding(run)}{ended}, {run.seconds:.0f} s: {word}",
            flush=True,
        )
        if not run.problems:
            shutil.rmtree(folder)
    return _result(runs, judged=not quick and not only)


def _beside_rounding(run: DisturbedRun) -> str:
    return f" (rounding alone {run.rounding:.0e})" if run.rounding > 1e-10 else ""


def _result(runs: Sequence[DisturbedRun], judged: bool) -> dict[str, Any]:
    counts: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    by_kind: dict[str, list[int]] = defaultdict(list)
    for run in runs:
        for index, row in run.happened.items():
            counts[row["kind"], row["point"]] += 1
            failed[row["kind"], row["point"]] += bool(run.problems)
            by_kind[row["kind"]].append(index)
    num_faults = sum(counts.values())
    noticed_s, again_s = [one for run in runs for one in run.noticed_s], [one for run in runs for one in run.again_s]
    bars = {
        f"{NUM_FAULTS} faults: nothing lost, nothing twice, weights within 1e-9": num_faults >= NUM_FAULTS
        and not any(run.problems for run in runs),
        "a killed rank is noticed within 1 s": bool(noticed_s) and max(noticed_s) <= 1.0,
        "training goes on within 3 s after it": bool(again_s) and max(again_s) <= 3.0,
    }
    return {
        "num_faults": num_faults,
        "counts": [[kind, point, count, failed[kind, point]] for (kind, point), count in sorted(counts.items())],
        "num_runs": len(runs),
        "num_sessions": sum(len(run.sessions) for run in runs),
        "endings": [[run.seed, ended] for run in runs for ended in run.sessions if ended],
        "steps_repeated": sum(run.num_repeated for run in runs),
        "largest_difference": max((run.difference for run in runs if run.rounding <= 1e-10), default=0.0),
        "beside_rounding": [[run.seed, run.difference, run.rounding] for run in runs if run.rounding > 1e-10],
        "noticed_s": {"median": median(noticed_s), "max": max(noticed_s)} if noticed_s else {},
        "again_s": {"median": median(again_s), "max": max(again_s)} if again_s else {},
        "problems": [[run.seed, problem] for run in runs for problem in run.problems],
        "bars": bars if judged else {},
    }


def table(result: dict[str, Any]) -> str:
    lines = [rows(["fault", "point", "happened", "in runs that failed"], result["counts"])]
    lines += [f"session of seed {seed} ended: {text}" for seed, text in result["endings"]]
    lines += [f"seed {seed}: {problem}" for seed, problem in result["problems"]]
    times = [
        f"{name} {kind} {value:.2f} s" for name in ("noticed_s", "again_s") for kind, value in result[name].items()
    ]
    lines.append(
        f"{result['num_faults']} faults in {result['num_runs']} runs and {result['num_sessions']} sessions; "
        f"{result['steps_repeated']} steps computed again; largest difference {result['largest_difference']:.0e}; "
        + ", ".join(times)
    )
    return "\n".join(lines)
