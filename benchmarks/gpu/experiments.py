"""The fifteen experiments: their commands, and the mark that each must reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
PREFIX = "FIGURES "
"""Before the JSON in the last line of the output."""
Figures = dict[str, Any]
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Command:
    """A child process of an experiment."""

    words: tuple[str, ...]
    """After ``python -m``; ``{folder}`` stands for a folder of the experiment's own."""
    limit_s: float = 120.0
    environment: tuple[tuple[str, str], ...] = ()
    codes: tuple[int, ...] = (0,)
    """Exit codes that are no failure."""


@dataclass(frozen=True)
class Finished:
    """What a child process left."""

    code: int | None
    """None if it ran out of time."""
    output: str
    figures: Figures


@dataclass(frozen=True)
class Experiment:
    """A question with its commands and its mark."""

    name: str
    question: str
    mark: str
    commands: tuple[Command, ...]
    judge: Callable[[Sequence[Finished], Path], tuple[bool, str]]
    """From what the commands left, and the experiment's folder: passed, and the figures in words."""
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""

    @property
    def limit_s(self) -> float:
        """The longest it can take."""
        return sum(command.limit_s for command in self.commands)


def run(experiment: Experiment) -> dict[str, Any]:
    """Run all commands of an experiment and judge them; a command that fails or prints no figures fails it."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        finished = [_run(command, Path(folder)) for command in experiment.commands]
        try:
            passed, found = experiment.judge(finished, Path(folder))
        except (KeyError, IndexError, ValueError) as error:
            passed, found = False, f"no figures ({type(error).__name__}: {error})"
    codes = [one.code for one in finished]
    if any(code not in command.codes for code, command in zip(codes, experiment.commands, strict=True)):
        passed, found = False, f"{found}; exit codes {codes}"
    if None in codes:
        passed, found = False, f"{found}; out of time"
    tails = [one.output[-2000:] for one in finished]
    return {"passed": passed, "found": found, "figures": [one.figures for one in finished], "output": tails}


def _run(command: Command, folder: Path) -> Finished:
    words = [word.format(folder=folder) for word in command.words]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **dict(command.environment)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=command.limit_s,
        )
    except subprocess.TimeoutExpired as error:
        return Finished(None, _text(error.stdout), {})
    return Finished(done.returncode, done.stdout, figures_of(done.stdout))


def figures_of(output: str) -> Figures:
    """Return the figures in the output of a command; empty if it printed none."""
    lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
    figures: Figures = json.loads(lines[-1].removeprefix(PREFIX)) if lines else {}
    return figures


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _lab(text: str, limit_s: float = 90.0, environment: dict[str, str] | None = None) -> Command:
    return Command(("benchmarks.gpu.lab", *text.split()), limit_s, tuple((environment or {}).items()))


def _evenload(text: str, limit_s: float = 90.0, codes: tuple[int, ...] = (0,)) -> Command:
    return Command(("evenload.cli.main", *text.split()), limit_s, codes=codes)


def _train(name: str, devices: str, rest: str) -> Command:
    return _evenload(
        f"run -d {devices} --project-dir {{folder}}/{name} --fresh {rest.format(script='benchmarks/gpu/train.py')}",
        110.0,
    )


def _pytest(path: str, limit_s: float) -> Command:
    return Command(("pytest", "-q", "--maxfail=5", "-m", "gpu", path, "-p", "no:cacheprovider"), limit_s)


def _visible(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    shown, doctor = finished
    is_reduced = any("all-reduce" in line and "ok" in line for line in doctor.output.splitlines())
    found = f"same GPU {shown.figures['same']}, none {shown.figures['none']}, doctor's all-reduce ok {is_reduced}"
    return shown.figures["same"] and shown.figures["none"] and is_reduced, found


def _tests(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    lines = finished[0].output.strip().splitlines() or ["no output"]
    return finished[0].code == 0, lines[-1]


def _solo(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    parts = [one.figures["of_plain"] for one in finished]
    return max(parts) <= 1.01, f"{', '.join(f'{part:.4f}' for part in parts)} of plain"


def _syncs(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    num, gap_s = sum(one.figures["num_syncs"] for one in finished), max(one.figures["gap_s"] for one in finished)
    return num == 0 and gap_s < 1e-3, f"{num} synchronisations, largest gap {gap_s * 1e3:.2f} ms"


def _clock(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    error, switch_s = finished[0].figures["error"], finished[0].figures["switch_s"]
    return error < 0.02 and switch_s < 1e-5, f"error {error:.2%}, a switch {switch_s * 1e6:.1f} us"


def _bn(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    factor = max(one.figures["factor"] for one in finished)
    return factor < 1.1, f"factor {factor:.3f}"


def _feed(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    alone, fed = (one.figures["step_s"] for one in finished)
    return fed / alone - 1 < 0.01, f"{fed / alone - 1:+.2%} against the same steps of E3"


def _nccl(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    difference, num = finished[0].figures["difference"], finished[0].figures["num_sums"]
    return difference < 1e-6 and num > 2, f"difference {difference:.2e}, {num} sums over NCCL a step"


def _oom(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    counts = [one.figures["num_micro"] for one in finished]
    growth = max(abs(mib) for one in finished for mib in one.figures["growth_mib"][1:])
    is_early = all(len(set(of_run)) == 1 and of_run[0] > 1 for of_run in counts)
    return is_early and growth < 1.0, f"K by step {counts}, allocated grows by {growth:.2f} MiB a step"


def _shapes(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    steps = max(one.figures["new_size_steps"] for one in finished)
    reserved = max(one.figures["reserved_of_peak"] for one in finished)
    return steps < 2 and reserved < 1.2, f"a new size costs {steps:.1f} steps, reserved {reserved:.2f} of the peak"


def _graph(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    difference, longest = finished[0].figures["difference"], finished[0].figures["longest_step"]
    return difference < 1e-5 and longest < 3, f"difference {difference:.2e}, longest step {longest:.1f} × the median"


def _rng(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    is_equal = finished[0].figures["is_equal"]
    return is_equal, "equal" if is_equal else "not equal"


def _late_steps(folder: Path) -> Any:
    from evenload.records.reader import read_steps

    steps = [step for step in read_steps(folder) if not step.arm]
    return steps[len(steps) // 2 :]


def _rate(folder: Path) -> float:
    late = _late_steps(folder)
    return float(late[0].num_samples / median(step.seconds for step in late))


def _two_ranks(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    part, shares = _rate(folder / "two") / _rate(folder / "alone"), _late_steps(folder / "two")[-1].shares
    is_near = max(shares) - min(shares) <= 0.2 * sum(shares) / len(shares)
    return part >= 0.9 and is_near, f"{part:.3f} of one rank's samples/s, shares {shares}"


def _mixed(finished: Sequence[Finished], folder: Path) -> tuple[bool, str]:
    from evenload.records.reader import read_events

    alone, passed, found = _rate(folder / "alone"), True, []
    for name in ("mixed", "dp"):
        part = _rate(folder / name) / alone
        reports = [event.message for event in read_events(folder / name) if event.kind in ("balance", "contention")]
        passed = passed and (part >= 0.98 or any(reports))
        found.append(f"{name} {part:.3f} of the GPU alone, shares {_late_steps(folder / name)[-1].shares}")
    return passed, "; ".join(found)


_GPTS = "{script} --model gpts"
EXPERIMENTS = (
    Experiment(
        "E1",
        "Does NVML see what torch sees for each form of CUDA_VISIBLE_DEVICES, and does the doctor end in time?",
        "the same GPU for None, 0, its UUID and a prefix; none for '', -1, '0,0', 7; all-reduce ok",
        (_lab("visible", 60), _evenload("doctor", 150, codes=(0, 1, 2))),
        _visible,
    ),
    Experiment(
        "E2", "The tests that need a GPU", "no failures", (_pytest("tests/ranks/gpu", 480),), _tests, ("pytest",)
    ),
    Experiment(
        "E3",
        "One rank alone against the plain loop",
        "at most 1.01 of plain for gpt, gpts, cnn, rn50 (bf16)",
        (
            *(_lab(f"solo --model {name} --precision bf16") for name in ("gpt", "gpts", "cnn")),
            _lab("solo --model rn50 --precision bf16 --workers 6 --pin", 110),
        ),
        _solo,
    ),
    Experiment(
        "E4",
        "Host synchronisations of a step, kernels, idle time of the GPU",
        "no synchronisation in a bf16 step; largest gap < 1 ms",
        (
            _lab("syncs --model gpt --precision bf16", 60),
            _lab("syncs --model rn50 --precision bf16 --workers 6 --pin", 90),
        ),
        _syncs,
    ),
    Experiment(
        "E5",
        "Are a rank's own seconds device time?",
        "compute and optimizer within 2 % of the truth; a switch < 10 us",
        (_lab("clock"),),
        _clock,
    ),
    Experiment(
        "E6",
        "BatchNorm over ranks against torch's kernels",
        "factor < 1.1",
        tuple(_lab(f"bn --batch 64 --precision {name}") for name in ("no", "bf16")),
        _bn,
    ),
    Experiment(
        "E7",
        "Is the copy to the GPU hidden?",
        "rn50 with 8 workers and pinned memory less than 1 % slower than in E3",
        (
            _lab("solo --model rn50 --precision bf16 --workers 6 --pin", 110),
            _lab("feed --model rn50 --precision bf16 --workers 8 --pin"),
        ),
        _feed,
    ),
    Experiment(
        "E8",
        "The NCCL path with a world of one (an adopted group)",
        "gradient difference < 1e-6; more than two sums over NCCL a step: buckets, totals",
        (_lab("nccl1 --model gpts", 60),),
        _nccl,
    ),
    Experiment(
        "E9",
        "Real out of memory",
        "K rises in step 0 only; allocated before = after; no abort",
        (_lab("oom --model gpt"), _lab("oom --model gpt", 90, _EXPANDABLE)),
        _oom,
    ),
    Experiment(
        "E10",
        "New sizes: cudnn.benchmark, the allocator",
        "a new size costs < 2 steps; reserved < 1.2 of the peak",
        (_lab("shapes"), _lab("shapes --precision bf16", 90, _EXPANDABLE)),
        _shapes,
    ),
    Experiment(
        "E11",
        "torch.compile, default and reduce-overhead",
        "gradient against eager < 1e-5; no re-recording at every step",
        (_lab("graph --model gpts --batch 64", 150),),
        _graph,
    ),
    Experiment(
        "E12",
        "Dropout on CUDA across a checkpoint",
        "the whole run and the last part are equal in all digits",
        (_lab("rng"),),
        _rng,
    ),
    Experiment(
        "E13",
        "Two ranks on one GPU: exact?",
        "tests/ranks/gpu/test_cuda.py passes",
        (_pytest("tests/ranks/gpu/test_cuda.py", 240),),
        _tests,
        ("pytest",),
    ),
    Experiment(
        "E14",
        "Two ranks on one GPU: speed and shares",
        "samples/s at least 0.9 of one rank alone; shares stay near equal",
        (_train("alone", "0", f"{_GPTS} --steps 80"), _train("two", "0,0", f"{_GPTS} --steps 80")),
        _two_ranks,
    ),
    Experiment(
        "E15",
        "A GPU and a CPU, as ranks and as replicas (--strategy dp)",
        "not slower than the GPU alone, or reported as such",
        (
            _train("alone", "0", f"{_GPTS} --batch 256 --steps 60"),
            _train("mixed", "0,cpu", f"{_GPTS} --batch 256 --steps 80"),
            _train("dp", "0,cpu --strategy dp", f"{_GPTS} --batch 256 --steps 60"),
        ),
        _mixed,
    ),
)
