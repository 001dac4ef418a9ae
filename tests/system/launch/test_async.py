"""`evenload run --strategy async`: a process for the server, a worker that is killed, and each sample once all the same."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from evenload.records.reader import read_events, read_steps
from evenload.testing import hosts
from tests.warm import Command

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenload

def main():
    run = evenload.init(project_dir="run", staleness_lr="inverse", timeout_s=float(sys.argv[2]))
    data = torch.randn(160, 3, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data), batch_size=8, shuffle=True, num_workers=1)
    model, loader = run.prepare(nn.Linear(3, 1), loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.resume(model=model, optimizer=optimizer)
    parts = 0

    def loss_fn(batch):
        if run.rank == 2 and parts == 1 and run.world_size == 4:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    for epoch in range(loader.epoch, 2):
        for step in loader:
            parts += 1
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
        seen = run.reduce(sum(len(batch[0]) for batch in run.batches(DataLoader(TensorDataset(data), batch_size=8))))
        weights = run.gather([float(model.weight.detach().sum())])
        run.print("epoch", epoch, "ranks", run.world_size, "seen", seen, "equal", len(set(weights)) == 1)

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "timeout_s"), [("SIGKILL", 600), ("SIGSTOP", 8)])
def test_a_worker_that_dies_or_hangs_costs_its_part_and_no_sample(
    number: str, timeout_s: float, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        "-m",
        "evenload.cli.main",
        "run",
        "-d",
        "cpu:3",
        "--strategy",
        "async",
        "--throttle",
        "1,1,0.5",
        "train.py",
        number,
        str(timeout_s),
    ]
    process = Command(command, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        stdout, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
        process.communicate()
    printed = stdout + stderr
    assert process.returncode == 0, printed
    assert "rank 0: cpu    CPU (server)" in printed
    assert "killed by SIGKILL" in printed and "the run goes on without rank 2" in printed
    assert "epoch 0 ranks 3 seen 160 equal True" in printed and "epoch 1 ranks 3 seen 160 equal True" in printed
    records = read_steps(tmp_path / "run")
    for epoch in (0, 1):
        assert sorted(record.epoch_step for record in records if record.epoch == epoch) == list(range(20))
    assert max(record.metrics["staleness"] for record in records) <= 4
    [lost] = [event for event in read_events(tmp_path / "run") if event.kind == "lost"]
    assert lost.fields["rank"] == 2 and len(lost.fields["parts"]) == 1
    assert "mean staleness" in printed and "updates" in printed


@pytest.mark.slow
def test_a_worker_that_is_lost_between_two_loops_lets_all_start_again(tmp_path: Path) -> None:
    dies = """
        run.checkpoint()
        if run.rank == 2 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        seen = """
    (tmp_path / "train.py").write_text(SCRIPT.replace("        seen = ", dies[1:]))
    command = ["-m", "evenload.cli.main", "run", "-d", "cpu:2", "--strategy", "async", "train.py", "SIGKILL", "600"]
    process = Command(command, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        stdout, stderr = process.communicate(timeout=80)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, stdout + stderr
    assert "starts again from the checkpoint of step 20 (restart 1 of 3)" in stderr, stderr
    assert "the run goes on without rank 2" not in stderr and "epoch 1 ranks 3 seen 160 equal True" in stdout
    assert [record.step for record in read_steps(tmp_path / "run")] == list(range(40))


def start_on(boxes: Sequence[hosts.VirtualHost], folder: Path, script: str) -> list[Command]:
    """Start a run on all machines; what each prints goes to ``screen`` in its folder."""
    run = ["-m", "evenload.cli.main", "run", "-d", "cpu", "--nodes", str(len(boxes)), "--host", boxes[0].name]
    processes = []
    for box in boxes:
        own = folder / box.name
        own.mkdir()
        (own / "train.py").write_text(script)
        command = [*run, "--strategy", "async", "train.py", "SIGKILL", "600"]
        processes.append(Command(command, own, os.environ, host=box, output=own / "screen"))
    return processes


@pytest.mark.slow
def test_a_machine_that_is_lost_costs_its_parts_alone(tmp_path: Path) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    script = SCRIPT.replace("(batch):", "(batch):\n        __import__('time').sleep(0.3)", 1)
    with hosts.machines(3) as boxes:
        processes = start_on(boxes, tmp_path, script)
        try:
            steps, limit_s = tmp_path / "box1" / "run" / "steps.jsonl", time.monotonic() + 80
            while time.monotonic() < limit_s and not (steps.exists() and len(steps.read_text().splitlines()) > 6):
                time.sleep(0.1)
            processes[2].kill()
            codes = [processes[0].wait(60), processes[1].wait(60)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    printed = (tmp_path / "box1" / "screen").read_text()
    assert codes == [0, 0], printed
    assert "the run goes on without it" in printed
    assert "epoch 1 ranks 2 seen 160 equal True" in printed
    records = read_steps(tmp_path / "box1" / "run")
    assert sorted(record.epoch_step for record in records if record.epoch == 1) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while its worker waits", "between two loops"])
def test_a_machine_without_power_is_not_waited_for(moment: str, tmp_path: Path) -> None:
    """Its connections do not end: only the silence of its supervisor shows that it is gone."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    wait = """
        if {condition}:
            open(f"../waits-{{run.rank}}", "w").close()
            while not os.path.exists("../go"):
                __import__("time").sleep(0.1)
"""
    if moment == "between two loops":
        script = SCRIPT.replace("        seen = ", wait.format(condition="epoch == 0").lstrip("\n") + "        seen = ")
    else:  # the worker that computes the last part waits, and the other one waits for it
        script = SCRIPT.replace(
            "        return (model", wait.format(condition="last()").lstrip("\n") + "        return (model"
        )
        script = script.replace("    parts = 0\n", "    parts = 0\n    last = lambda: step.index == 19\n")
    with hosts.machines(3) as boxes:
        processes, screen = start_on(boxes, tmp_path, script), tmp_path / "box1" / "screen"
        try:
            limit_s = time.monotonic() + 60
            while not (waits := sorted(tmp_path.glob("waits-[12]"))) and time.monotonic() < limit_s:
                time.sleep(0.1)
            assert waits, screen.read_text()
            time.sleep(1.0)
            lost = 1 if waits[0].name == "waits-2" and moment != "between two loops" else 2
            boxes[lost].unplug()
            while "is gone" not in screen.read_text() and time.monotonic() < limit_s:
                time.sleep(0.1)
            (tmp_path / "go").touch()
            codes = [processes[index].wait(30) for index in {0, 1, 2} - {lost}]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    printed = screen.read_text()
    assert f"box{lost + 1} (rank {lost}) is gone: nothing was received for 5 s" in printed, printed
    if moment == "between two loops":
        assert codes == [1, 1] and "Start the same command again" in printed, printed
    else:
        assert codes == [0, 0] and "epoch 0 ranks 2 seen 160 equal True" in printed, printed
        records = read_steps(tmp_path / "box1" / "run")
        assert sorted(record.epoch_step for record in records if record.epoch == 1) == list(range(20))
