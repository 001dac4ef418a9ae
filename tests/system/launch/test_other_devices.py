"""A checkpoint of islands, and one of strategy async, in the middle of an epoch, resumed on another number of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenload.records.reader import read_steps
from tests.system.launch.scripts import run

SCRIPT = """
import os, signal, sys
import torch, evenload
from torch.utils.data import DataLoader, TensorDataset
stops_at = int(sys.argv[1])
run = evenload.init(project_dir="run", seed=0)
model = torch.nn.Linear(240, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, loader = run.prepare(model, DataLoader(TensorDataset(torch.eye(240)), batch_size=8, shuffle=True))
optimizer = torch.optim.SGD(model.parameters(), lr=8.0)  # adds 1 to the weight of each sample of the batch
run.resume(model=model, optimizer=optimizer)
for epoch in range(loader.epoch, 2):
    for step in loader:
        step.backward(lambda batch: -model(batch[0]).mean())
        optimizer.step(); optimizer.zero_grad()
        if stops_at and step.index + 1 >= stops_at and run.is_main:
            os.kill(os.getppid(), signal.SIGTERM)  # the launcher
            stops_at = 0
if run.is_main:
    torch.save(model.weight.detach().flatten().clone(), "weights.pt")
"""


def _resumed(folder: Path, before: list[str], after: list[str]) -> torch.Tensor:
    """Return how often each sample was used, in two epochs that are interrupted in the first."""
    code, stdout, stderr = run(folder, SCRIPT, *before, arguments=["13"], initialised=False, timeout_s=60)
    assert code == 75, stdout + stderr
    code, stdout, stderr = run(folder, SCRIPT, *after, arguments=["0"], initialised=False, timeout_s=60)
    assert code == 0 and "resuming at step" in stdout, stdout + stderr
    records = [(record.epoch, record.epoch_step) for record in read_steps(folder / "run")]
    assert sorted(records) == [(epoch, step) for epoch in range(2) for step in range(30)]
    weights: torch.Tensor = torch.load(folder / "weights.pt")
    return weights


@pytest.mark.parametrize(
    ("before", "islands", "after", "new_islands"),
    [("cpu:4", "0,1/2,3", "cpu:3", "0/1/2"), ("cpu:2", "0/1", "cpu:3", "0,1/2")],
)
def test_islands_go_on_on_other_devices(
    tmp_path: Path, before: str, islands: str, after: str, new_islands: str
) -> None:
    options = ["--strategy", "local", "--sync-every", "4"]
    used = _resumed(
        tmp_path, [*options, "-d", before, "--islands", islands], [*options, "-d", after, "--islands", new_islands]
    )
    assert torch.allclose(used, torch.full((240,), 2.0), atol=1e-4), used


@pytest.mark.parametrize(("before", "after"), [("cpu:3", "cpu:2"), ("cpu:2", "cpu:4")])
def test_asynchronous_training_goes_on_on_other_devices(tmp_path: Path, before: str, after: str) -> None:
    options = ["--strategy", "async", "-d"]
    used = _resumed(tmp_path, [*options, before], [*options, after])
    assert torch.allclose(used, torch.full((240,), 2.0), atol=1e-4), used
