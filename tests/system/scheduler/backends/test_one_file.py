"""Bar 9: one job file, submitted by one command, runs, is preempted and resumes on local, Slurm and Ray; the same result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.system.cli.queue_box import box_in
from tests.system.scheduler.backends.programs import expected_result, steps_done, write_counting, write_job
from tests.system.scheduler.backends.ray_box import RayBox
from tests.system.scheduler.backends.slurm_cluster import SlurmCluster, wait_until
from tests.warm import run

LIMIT_S = 120.0
NUM_STEPS = 60
BOUND = 1e-12

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

TRAIN = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
import evenload

def main(step_s):
    run = evenload.init(project_dir="out/run", seed=0)
    torch.manual_seed(5)
    data = torch.randn(240, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model, loader = run.prepare(nn.Linear(6, 1).double(), DataLoader(data, batch_size=8, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-8)
    run.resume(model=model, optimizer=optimizer)
    for epoch in range(loader.epoch, 2):
        for step in loader:
            step.backward(lambda rows: model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if run.is_main:
                with open("out/trace", "a") as trace:
                    trace.write(f"{step.index}\\n")
            time.sleep(step_s)
    if run.is_main:
        torch.save(model.state_dict(), "out/weights.pt")

main(float(sys.argv[1]))
"""


@dataclass(frozen=True)
class BackendSetup:
    """A backend as this test uses it: how to submit, and how to send an urgent job that takes all devices."""

    options: list[str]
    variables: dict[str, str]
    send_urgent: Callable[[Path], None]
    read_log: Callable[[str], str]
    state: Callable[[str], str]


def evenload(command: str, *words: str, variables: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "evenload.cli.main", command, *words],
        cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(setup: BackendSetup, *words: str, folder: Path) -> str:
    told = evenload(
        "submit", "--json", "--no-snapshot", *setup.options, *words, variables=setup.variables, folder=folder
    )
    answer = json.loads(told)
    return str(answer["job"] if "job" in answer else answer["jobs"][0])


@pytest.fixture
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendSetup]:
    with box_in(tmp_path_factory.mktemp("box")) as box:
        setup = BackendSetup(
            options=["--queue", str(box.queue)],
            variables={},
            send_urgent=lambda folder: urgent(folder),
            read_log=box.log,
            state=lambda job: str(box.job(job)["state"]),
        )

        def urgent(folder: Path) -> None:
            submit(setup, "--priority", "1", "--devices", "2", "--", "sleep", "1", folder=folder)

        yield setup


@pytest.fixture
def on_slurm(slurm: SlurmCluster, tmp_path: Path) -> BackendSetup:
    root = tmp_path / ".local" / "state" / "evenload" / "slurm"

    def urgent(folder: Path) -> None:
        words = ("-p", "high", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
        assert slurm.tool("sbatch", "--parsable", *words).strip().isdecimal()

    def state(job: str) -> str:
        return slurm.tool("squeue", "-h", "-t", "all", "-o", "%T", "-j", job).strip().replace("COMPLETED", "SUCCEEDED")

    return BackendSetup(
        options=["--backend", "slurm"],
        variables={"HOME": str(tmp_path)},
        send_urgent=urgent,
        read_log=lambda job: (root / f"{job}.log").read_text() if (root / f"{job}.log").exists() else "",
        state=state,
    )


@pytest.fixture
def on_ray(ray_box: RayBox) -> BackendSetup:
    variables = {"RAY_ADDRESS": ray_box.address}
    setup = BackendSetup(
        options=["--backend", "ray", "--backend-option", f"root={ray_box.root}"],
        variables=variables,
        send_urgent=lambda folder: urgent(folder),
        read_log=ray_box.log,
        state=ray_box.state,
    )

    def urgent(folder: Path) -> None:
        submit(setup, "--priority", "1", "--devices", "4", "--", "sleep", "1", folder=folder)

    return setup


def runs_is_preempted_and_resumes(setup: BackendSetup, file: Path) -> None:
    folder = file.parent
    job = submit(setup, str(file), folder=folder)
    wait_until(lambda: len(steps_done(folder / "out")) > 3, f"steps of {file}", LIMIT_S)
    setup.send_urgent(folder)
    ended = ("SUCCEEDED", "FAILED", "CANCELLED")
    wait_until(lambda: "stopped at step" in setup.read_log(job) or setup.state(job) in ended, "the stop", LIMIT_S)
    wait_until(lambda: setup.state(job) in ended, "its end", LIMIT_S)
    log = setup.read_log(job)
    assert setup.state(job) == "SUCCEEDED", log
    assert "stopped at step" in log, "it was to be preempted in its midst"
    there = setup.options[:2]  # --backend NAME, or --queue DIR
    assert "succeeded" in evenload("show", *there, job, variables=setup.variables, folder=folder)
    assert evenload("logs", *there, job, variables=setup.variables, folder=folder) == log


def test_a_program_that_counts(local: BackendSetup, tmp_path: Path) -> None:
    """On the local queue; on Slurm and Ray the tests of those do the same."""
    total = 100
    file = write_counting(tmp_path, total, 0.05)
    runs_is_preempted_and_resumes(local, file)
    assert (tmp_path / "out" / "result").read_text() == expected_result(total)
    assert steps_done(tmp_path / "out") == list(range(total)), "a step was lost or done twice"


def write_training(folder: Path, ranks: str = "cpu:2", **asked: str) -> Path:
    """A script of Evenload's, and the job file."""
    (folder / "out").mkdir()
    (folder / "train.py").write_text(TRAIN)
    command = ["evenload", "run", "-d", ranks, "train.py", "0.05"]
    variables = f'{{ PATH = "{Path(sys.executable).parent}:{os.environ["PATH"]}" }}'
    return write_job(folder, command, **{"devices": "2", **asked}, environment=variables)


def weights(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "out" / "weights.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state.values()])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_training(folder)
    done = run(["-m", "evenload.cli.main", "run", "-d", "cpu:2", "train.py", "0"], folder, LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(folder)


def check_training(setup: BackendSetup, file: Path, undisturbed: torch.Tensor) -> None:
    runs_is_preempted_and_resumes(setup, file)
    folder = file.parent
    assert steps_done(folder / "out") == list(range(NUM_STEPS)), "a step was lost or done twice"
    difference = float((weights(folder) - undisturbed).norm() / undisturbed.norm())
    assert difference <= BOUND


def test_two_ranks_on_local(local: BackendSetup, tmp_path: Path, undisturbed: torch.Tensor) -> None:
    check_training(local, write_training(tmp_path), undisturbed)


def test_two_ranks_on_slurm(on_slurm: BackendSetup, tmp_path: Path, undisturbed: torch.Tensor) -> None:
    check_training(on_slurm, write_training(tmp_path), undisturbed)


@pytest.mark.long  # its parts are those of the two above, and of test_ray.py
def test_two_ranks_on_ray(on_ray: BackendSetup, tmp_path: Path, undisturbed: torch.Tensor) -> None:
    check_training(on_ray, write_training(tmp_path), undisturbed)


@pytest.mark.long
def test_two_nodes_on_slurm(on_slurm: BackendSetup, tmp_path: Path, undisturbed: torch.Tensor) -> None:
    """`evenload run` finds the other node by itself."""
    check_training(on_slurm, write_training(tmp_path, "cpu", nodes="2"), undisturbed)


@pytest.mark.long
def test_two_nodes_on_ray(on_ray: BackendSetup, tmp_path: Path, undisturbed: torch.Tensor) -> None:
    check_training(on_ray, write_training(tmp_path, "cpu", devices="4"), undisturbed)
