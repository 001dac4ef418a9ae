"""Preemption of a two-rank job: 100 times, at random moments, until its work is done; against the run that nobody stopped.

Method: a small model in float64 trains on two CPU ranks (gloo), with a loader worker, several micro-batches a step, clipping, a
scheduler and random numbers of the data set's own. A runner starts it with terms as a queue does, and asks it to stop after a
random time: by SIGTERM to `evenload run`, by SIGTERM to one rank, by the stop file, or by both the file and SIGTERM; in one of
ten cases before its first step (but after the launcher's first line: while Python itself is starting, SIGTERM ends it by the
signal, which a queue takes as an end on request). Jobs are started again until they are done; a new one begins when one is. Each
loop body is written into a witness file: a step that is there twice was lost and done again. A device is free when no rank and
no loader worker is left; counted from the event that says it is saved.

Bars: each of 100 preemptions ends with code 75 within the grace; at most 1 step lost in each; weights within 1e-12
of the undisturbed run; devices free at most 5 s after the save.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.report import rows
from evenload.job.protocol import VARIABLE, RunnerContract, read_report, request_stop, write_contract

GRACE_S = 30.0
WAYS = ("SIGTERM", "SIGTERM to one rank", "stop file", "stop file and SIGTERM")
BEFORE_THE_FIRST_STEP = 0.1
_LIMIT_S = 120.0
_LARGEST_DIFFERENCE = 1e-12
_FREE_S = 5.0

_SCRIPT = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(60)  # into the log: where it was, should it hang
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import evenload

class Noisy(Dataset):
    rows = torch.randn(512, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index] + 0.1 * torch.randn(16, dtype=torch.float64)

run = evenload.init(project_dir="run", seed=0, micro_batch=8)
torch.manual_seed(1)
epochs = int(sys.argv[1])
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)).double()
loader = DataLoader(Noisy(), batch_size=32, shuffle=True, num_workers=1)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
with open(f"pid-{run.rank}", "w") as file:
    file.write(str(os.getpid()))
for epoch in range(loader.epoch, epochs):
    for step in loader:
        step.backward(lambda rows: (model(rows) - rows).square().mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.checkpoint(every="1h")
        with open(f"steps-{run.rank}", "a") as file:
            file.write(f"{step.index}\\n")
if run.is_main:
    torch.save(nn.utils.parameters_to_vector(model.parameters()).detach(), "weights.pt")
"""


@dataclass(frozen=True)
class Preemption:
    """One of them."""

    way: str
    after_s: float
    """From the start of the program."""
    code: int
    ended_s: float
    """From the request until `evenload run` had ended."""
    free_s: float | None
    """From the save until no rank or loader worker was left; None where there was nothing to save."""
    saved_s: float | None
    """What the save took, as told."""
    steps: int
    """Done in this session."""
    lost: int
    """Done in this session, and done again in a later one."""


class Runner:
    """What a queue's runner does, for one job: starts it, asks it to stop, starts it again."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self._folder = folder
        self._epochs = epochs
        self._attempt = 0
        (folder / "train.py").write_text(_SCRIPT)

    def run(self, draw: random.Random | None) -> Preemption | None:
        """One attempt, asked to stop at a random moment; None where it ended with 0, undisturbed or in time."""
        self._attempt += 1
        terms = RunnerContract(
            "bench", self._attempt, str(self._folder / "report.json"), str(self._folder / "stop"), GRACE_S, 0.5
        )
        write_contract(self._folder / "job.json", terms)
        for name in ("stop", "report.json", "pid-0", "pid-1"):
            (self._folder / name).unlink(missing_ok=True)
        before, log_bytes = len(self._steps()), self._log_bytes()
        began_s = time.monotonic()
        with self._program() as process:
            if draw is None:
                return self._ended_by_itself(process)
            early = draw.random() < BEFORE_THE_FIRST_STEP
            if early:
                while self._log_bytes() == log_bytes and process.poll() is None:
                    time.sleep(0.005)
                    self._check_time(began_s)
                _wait(process, draw.uniform(0.0, 4.0))
            else:
                while len(self._steps()) == before and process.poll() is None:
                    time.sleep(0.005)
                    self._check_time(began_s)
                _wait(process, draw.uniform(0.0, 1.0))
            family = _family(process)
            way = draw.choice(WAYS)
            asked_s, asked_at_s = time.monotonic(), time.time()
            if process.poll() is not None or not self._ask(way, process, terms):
                return self._ended_by_itself(process)
            while any(_lives(one) for one in family):
                time.sleep(0.005)
                self._check_time(asked_s)
            free_at_s = time.time()
            code = process.wait(GRACE_S + _LIMIT_S)
            ended_s = time.monotonic() - asked_s
        if code == 0:
            return None  # it was through before it heard
        text, saved_at_s = self._last_stop(asked_at_s)
        steps = self._steps()
        told = read_report(terms)
        done = told.step if told is not None and told.state == "stopped" else 0
        return Preemption(
            way=way,
            after_s=round(asked_s - began_s, 2),
            code=code,
            ended_s=round(ended_s, 3),
            free_s=None if saved_at_s is None else round(free_at_s - saved_at_s, 3),
            saved_s=float(text.partition("saved in ")[2].partition(" s")[0]) if "saved in" in text else None,
            steps=len(steps) - before,
            lost=sum(step >= done for step in steps[before:]) if steps[before:] else 0,
        )

    def _check_time(self, since_s: float) -> None:
        if time.monotonic() - since_s > _LIMIT_S:
            log = (self._folder / "log").read_text()
            raise RuntimeError(f"nothing came of it within {_LIMIT_S:g} s; its log ends so:\n{log[-8000:]}")

    @property
    def redone(self) -> int:
        """Loop bodies that ran more than once, over all sessions."""
        steps = self._steps()
        return len(steps) - len(set(steps))

    @property
    def is_whole(self) -> bool:
        """Whether both ranks did each step, in order."""
        return all(sorted(set(self._steps(rank))) == list(range(self._epochs * 16)) for rank in (0, 1))

    def weights(self) -> torch.Tensor:
        weights: torch.Tensor = torch.load(self._folder / "weights.pt", weights_only=True)
        return weights

    def _ask(self, way: str, process: subprocess.Popen[bytes], terms: RunnerContract) -> bool:
        """Whether it was asked."""
        rank = self._folder / "pid-1"
        if way == "SIGTERM to one rank" and rank.exists():
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(rank.read_text()), signal.SIGTERM)
                return True
        if way.startswith("stop file"):
            request_stop(terms, "the benchmark asks")
        # A program that has not begun may not know of the file: a queue sends it the signal too.
        if way != "stop file" or not (self._folder / "report.json").exists():
            process.send_signal(signal.SIGTERM)
        return True

    def _ended_by_itself(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait(_LIMIT_S)
        if code != 0:
            raise RuntimeError(f"exit code {code}, nobody asked it: {(self._folder / 'log').read_text()[-3000:]}")

    def _last_stop(self, since_s: float) -> tuple[str, float | None]:
        """What the last stop since then told, and when."""
        found: tuple[str, float | None] = ("", None)
        with suppress(FileNotFoundError):
            for line in (self._folder / "run" / "events.jsonl").read_text().splitlines():
                event = json.loads(line)
                if event.get("kind") == "stopped" and event["time"] >= since_s:
                    found = (event["message"], event["time"])
        return found

    def _log_bytes(self) -> int:
        log = self._folder / "log"
        return log.stat().st_size if log.exists() else 0

    def _steps(self, rank: int = 0) -> list[int]:
        try:
            return [int(line) for line in (self._folder / f"steps-{rank}").read_text().split()]
        except FileNotFoundError:
            return []

    @contextmanager
    def _program(self) -> Iterator[subprocess.Popen[bytes]]:
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "evenload.cli.main", "run", "-d", "cpu:2", "train.py", str(self._epochs)],
                cwd=self._folder,
                env={**os.environ, VARIABLE: str(self._folder / "job.json")},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def measure(quick: bool) -> dict[str, Any]:
    """Preempts until there are enough."""
    epochs, wanted = (10, 3) if quick else (40, 100)
    draw = random.Random(4)
    found: list[Preemption] = []
    differences: list[float] = []
    redone, num_jobs = 0, 0
    whole = True
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as name:
        home = Path(name)
        undisturbed = _runner(home / "undisturbed", epochs)
        undisturbed.run(None)
        expected = undisturbed.weights()
        while len(found) < wanted:
            num_jobs += 1
            runner = _runner(home / f"job-{num_jobs}", epochs)
            ended = False
            while not ended:
                one = runner.run(draw if len(found) < wanted else None)
                ended = one is None
                if one is not None:
                    found.append(one)
                    print(f"{len(found)}: {one}", flush=True)
            redone += runner.redone
            whole = whole and runner.is_whole
            differences.append(float((runner.weights() - expected).norm() / expected.norm()))
    return _result(found, differences, redone, num_jobs, whole)


def _result(
    found: list[Preemption], differences: list[float], redone: int, num_jobs: int, whole: bool
) -> dict[str, Any]:
    free_s = [one.free_s for one in found if one.free_s is not None]
    worst = max(differences)
    return {
        "num_preemptions": len(found),
        "num_jobs": num_jobs,
        "codes": {str(code): sum(one.code == code for one in found) for code in {one.code for one in found}},
        "ended_s": {"median": statistics.median(one.ended_s for one in found), "max": max(o.ended_s for o in found)},
        "free_s": {"median": statistics.median(free_s), "max": max(free_s)} if free_s else {},
        "saved_s": {"max": max((one.saved_s for one in found if one.saved_s is not None), default=0.0)},
        "steps": sum(one.steps for one in found),
        "before_the_first_step": sum(one.steps == 0 for one in found),
        "lost": {"max": max(one.lost for one in found), "sum": sum(one.lost for one in found)},
        "redone": redone,
        "differences": differences,
        "preemptions": [asdict(one) for one in found],
        "bars": {
            "each ended with code 75": all(one.code == 75 for one in found),
            f"within the grace of {GRACE_S:g} s": all(one.ended_s <= GRACE_S for one in found),
            "at most 1 step lost in each": all(one.lost <= 1 for one in found) and redone <= len(found),
            "all steps done on both ranks": whole,
            f"weights within {_LARGEST_DIFFERENCE:g}": math.isfinite(worst) and worst <= _LARGEST_DIFFERENCE,
            f"devices free {_FREE_S:g} s after the save": all(seconds <= _FREE_S for seconds in free_s),
        },
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    by_way = []
    for way in WAYS:
        ones = [one for one in result["preemptions"] if one["way"] == way]
        free_s = [one["free_s"] for one in ones if one["free_s"] is not None]
        if ones:
            by_way.append(
                [
                    way,
                    len(ones),
                    sum(one["code"] == 75 for one in ones),
                    f"{max(one['ended_s'] for one in ones):.2f}",
                    f"{max(free_s):.2f}" if free_s else "-",
                    max(one["lost"] for one in ones),
                ]
            )
    worst = max(result["differences"])
    return "\n".join(
        [
            rows(["asked by", "times", "code 75", "ended, max s", "free after save, max s", "lost, max"], by_way),
            f"{result['num_jobs']} jobs; {result['steps']} steps between, {result['redone']} done twice; weights differ by "
            f"{worst:.1e}",
        ]
    )


def _runner(folder: Path, epochs: int) -> Runner:
    folder.mkdir()
    return Runner(folder, epochs)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        return own.children(recursive=True)
    return []


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
