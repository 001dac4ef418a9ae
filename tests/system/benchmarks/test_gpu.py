"""The GPU experiments on a machine without one: listed, skipped, and judged by figures that are given."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import benchmarks.gpu as gpu
import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.gpu.experiments import EXPERIMENTS, PREFIX, ROOT, Command, Experiment, Finished, figures_of, run
from benchmarks.gpu.lab import EXPERIMENTS as EXPERIMENTS_OF_LAB

from tests import warm

PAGE = Path(gpu.__file__).with_name("README.md")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")


def test_each_experiment_is_on_the_page_and_fits_into_a_call() -> None:
    assert [f"E{number}" for number in range(1, 16)] == list(gpu.NAMES)
    assert re.findall(r"^\| (E\d+) \|", PAGE.read_text(), re.M) == list(gpu.NAMES)
    assert all(experiment.limit_s < 600 for experiment in EXPERIMENTS)
    groups = re.findall(r"`(E[\dE,]+)`", PAGE.read_text())
    assert sorted(",".join(groups).split(",")) == sorted(gpu.NAMES)
    limits = {experiment.name: experiment.limit_s for experiment in EXPERIMENTS}
    assert all(sum(limits[name] for name in group.split(",")) <= 600 for group in groups)


@without_gpu
def test_without_a_gpu_all_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--results", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")]
    assert len(lines) == 15 and "needs a GPU" in lines[0]
    assert not list(tmp_path.iterdir())
    assert main(["gpu", "--only", "E1,E3", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "0 passed, 0 failed, 2 skipped: this machine has no GPU" in out


def test_an_experiment_that_does_not_exist() -> None:
    with pytest.raises(SystemExit, match="there is no experiment E77; there are E1"):
        gpu.measure(quick=False, only="E1,E77")


# Options with which an experiment is short on a CPU; `part` runs in `rng`.
ON_CPU = {
    "visible": "",
    "solo": "--model tiny --rounds 1 --steps 1",
    "syncs": "--model tiny",
    "clock": "",
    "bn": "--batch 2",
    "feed": "--model tiny --steps 1 --workers 1 --pin",
    "shapes": "",
    "oom": "--model tiny",
    "nccl1": "--model tiny",
    "rng": "",
    "graph": "--model tiny --steps 1",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ON_CPU)
def test_the_code_of_each_experiment_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    words = ["-m", "benchmarks.gpu.lab", *f"{name} {ON_CPU[name]} --cpu".split()]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = warm.run(words, ROOT, 240, PYTHONPATH=path, TMPDIR=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0 and PREFIX in done.stdout, done.stderr
    assert ON_CPU.keys() | {"part"} == EXPERIMENTS_OF_LAB.keys()


def test_a_command_may_have_other_exit_codes(tmp_path: Path) -> None:
    def codes(allowed: tuple[int, ...]) -> bool:
        command = Command(("this",), 60.0, codes=allowed)  # exits with 0
        return bool(run(Experiment("E0", "", "", (command,), lambda *_: (True, "")))["passed"])

    assert codes((0, 2)) and not codes((2,))


def test_marks_judge_the_figures(tmp_path: Path) -> None:
    judges = {experiment.name: experiment.judge for experiment in EXPERIMENTS}

    def passes(name: str, *figures: dict[str, object]) -> bool:
        outputs = [f"some text\n{PREFIX}{json.dumps(one)}\n" for one in figures]
        return judges[name]([Finished(0, output, figures_of(output)) for output in outputs], tmp_path)[0]

    assert passes("E3", {"of_plain": 1.005}) and not passes("E3", {"of_plain": 1.005}, {"of_plain": 1.02})
    assert passes("E4", {"num_syncs": 0, "gap_s": 5e-4}) and not passes("E4", {"num_syncs": 1, "gap_s": 5e-4})
    assert passes("E7", {"step_s": 0.1}, {"step_s": 0.1005}) and not passes("E7", {"step_s": 0.1}, {"step_s": 0.102})
    assert passes("E9", {"num_micro": [4, 4, 4], "growth_mib": [300.0, 0.0, 0.0]})
    assert not passes("E9", {"num_micro": [2, 4, 4], "growth_mib": [300.0, 0.0, 0.0]})
    assert passes("E12", {"is_equal": True}) and not passes("E12", {"is_equal": False})
    with pytest.raises(KeyError):
        passes("E5", {})
