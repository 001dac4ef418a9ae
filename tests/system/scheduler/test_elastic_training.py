"""A training run in a real queue grows and shrinks between one rank and two: its weights are those of the undisturbed run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from evenload import hardware
from tests.system.scheduler.daemons import Box, box
from tests.system.scheduler.test_elastic_jobs import UNTIL, _wait_for_size
from tests.warm import run

EPOCHS = 40
TRAIN = """
import os, sys, time
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
loader = DataLoader(Noisy(), batch_size=32, shuffle=True)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
for epoch in range(loader.epoch, epochs):
    for step in loader:
        step.backward(lambda rows: (model(rows) - rows).square().mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.checkpoint(every="1h")
        if run.is_main:
            with open("steps", "a") as file:
                file.write(f"{step.index}\\n")
        if not os.path.exists("hurry"):
            time.sleep(0.2 / run.world_size if os.environ.get("SLOWLY") else 0)
if run.is_main:
    torch.save(nn.utils.parameters_to_vector(model.parameters()).detach(), "weights.pt")
"""
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    made = tmp_path / "undisturbed", tmp_path / "elastic"
    for folder in made:
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
    return made


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    len(hardware.usable_cores()) < 2, reason="one rank for each core of its slots, and there is one core"
)
def test_weights_of_a_resized_training_run(folders: tuple[Path, Path], tmp_path: Path) -> None:
    import torch

    undisturbed, elastic = folders
    run(["-m", "evenload.cli.main", "run", "-d", "cpu:2", "train.py", str(EPOCHS)], undisturbed, 200).check_returncode()
    cores = hardware.usable_cores()[:2]
    with box() as queue:
        queue.settings("[cpu]\nslots = 2\n[settings]\nmin_run_s = 0.0\n")
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # a slot is one core, so the job sees as many cores as it has slots
        try:
            queue.start()
        finally:
            os.sched_setaffinity(0, before)
        _train(queue, elastic, tmp_path)
    one, other = (torch.load(folder / "weights.pt", weights_only=True) for folder in folders)
    assert float((one - other).norm() / one.norm()) <= 1e-12
    assert [int(line) for line in (elastic / "steps").read_text().split()] == list(range(EPOCHS * 16))


def _train(queue: Box, folder: Path, marks: Path) -> None:
    """On one device, on two, on one again, to the end."""
    first = queue.submit("sh", "-c", UNTIL, str(marks / "end-first"))
    queue.wait_for(first, "RUNNING")
    job = queue.submit(
        *("sh", "-c", f"exec evenload run -d cpu:$(nproc) train.py {EPOCHS}"),
        folder=str(folder),
        environment={"PATH": PATH, "SLOWLY": "1"},
        spec={"needs": {"min_devices": 1, "max_devices": 2}},
    )
    _wait_for_size(queue, job, 1)
    (marks / "end-first").touch()
    _wait_for_size(queue, job, 2)
    second = queue.submit("sh", "-c", UNTIL, str(marks / "end-second"), spec={"estimate_s": 5.0})
    queue.wait_for(second, "RUNNING")
    _wait_for_size(queue, job, 1)
    (folder / "hurry").touch()
    done = queue.wait_for(job, "SUCCEEDED", "FAILED")
    assert done["state"] == "SUCCEEDED", queue.story(job)
    attempts = queue.call("job", job=job)["attempts"]
    assert [len(attempt["devices"]) for attempt in attempts] == [1, 2, 1]
    (marks / "end-second").touch()
    queue.wait_for(second, "SUCCEEDED")
