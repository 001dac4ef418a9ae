"""Every command of docs/ways-to-start.md, run as it stands: the same weights, whoever starts the script (bar: 1e-12)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evenload.testing import run_ranks
from evenload.training.launch.environment import WORKER_VARIABLE, detect
from tests.ranks.exact.measure import BOUND, relative
from tests.system.starts.ways import commands, shell, write_scripts

FIRST = "python train.py"
WITH_SRUN = "srun "
WAYS = [command for command in commands() if command != FIRST and not command.startswith(WITH_SRUN)]


def weights(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "weights.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state.values()])


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The weights of `python train.py`."""
    folder = tmp_path_factory.mktemp("first")
    write_scripts(folder)
    ended = shell(folder, FIRST)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "rank 0 of 1 on " in ended.stdout
    return weights(folder)


def check_two_ranks(stdout: str, folder: Path, expected: torch.Tensor) -> float:
    """Two ranks there were, not two times one; the difference of what they trained."""
    assert sorted(re.findall(r"rank (\d) of (\d) on cpu", stdout)) == [("0", "2"), ("1", "2")], stdout
    difference = relative(weights(folder), expected)
    assert difference <= BOUND
    return difference


def test_the_page_has_all_ways() -> None:
    assert FIRST in commands()
    for word in ("evenload run", "torchrun", "torch.distributed.run", "srun", "MASTER_ADDR", "own_spawn", "spawned"):
        assert any(word in command for command in commands()), word


def _ways() -> Iterator[Any]:
    """Yield all commands; two whose parts others have, torch.distributed.run and a script that spawns, run in `make long`."""
    for way in WAYS:
        is_double = "torch.distributed.run" in way or way.endswith(" spawned.py")
        name = way.splitlines()[-2 if "wait" in way else 0]
        yield pytest.param(way, id=name, marks=[pytest.mark.long] if is_double else [])


@pytest.mark.parametrize("command", [*_ways()])
def test_the_weights_are_the_same(
    command: str, tmp_path: Path, one_device: torch.Tensor, table: dict[str, float]
) -> None:
    write_scripts(tmp_path)
    ended = shell(tmp_path, command)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "terminate called" not in ended.stderr
    table[command.splitlines()[0]] = check_two_ranks(ended.stdout, tmp_path, one_device)


def as_task(folder: str, step: dict[str, str]) -> str:
    """On each rank: the page's script with the variables of a task of srun, and nothing else; what it printed."""
    rank = str(detect().rank)
    del os.environ[WORKER_VARIABLE]
    os.environ.update(step, SLURM_PROCID=rank, SLURM_LOCALID=rank)
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path("train.py", run_name="__main__")
    return printed.getvalue()


def test_tasks_of_srun(tmp_path: Path, one_device: torch.Tensor, table: dict[str, float]) -> None:
    """Two processes with the variables that srun sets (22.05) for a step of two tasks on one node."""
    write_scripts(tmp_path)
    step = {
        "SLURM_JOB_ID": str(40000 + int(tmp_path.stat().st_ino) % 9000),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "a-host-that-nobody-knows",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_LAUNCHER_PORT": "43475",
        "SLURM_JOB_NODELIST": "a-host-that-nobody-knows",
        "SLURM_NODELIST": "a-host-that-nobody-knows",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0,1",
    }
    printed = run_ranks(as_task, 2, str(tmp_path), step)
    table["srun --ntasks 2 python train.py (its variables)"] = check_two_ranks("".join(printed), tmp_path, one_device)


def test_the_real_srun(
    tmp_path: Path,
    one_device: torch.Tensor,
    table: dict[str, float],
    srun_here: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if srun_here is not None:
        monkeypatch.setenv("SLURM_CONF", srun_here)
    (command,) = [command for command in commands() if command.startswith(WITH_SRUN)]
    write_scripts(tmp_path)
    ended = shell(tmp_path, command)
    assert ended.code == 0, ended.stdout + ended.stderr
    table[command] = check_two_ranks(ended.stdout, tmp_path, one_device)
