"""`evenload run --batch-max`, as docs/how-it-works.md shows it."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.wrong_uses.jobs import evenload_run

SCRIPT = """
import torch, evenload
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(640, 4)
run = evenload.init(project_dir="run", batch_lr="none")
model = torch.nn.Linear(4, 1)
model, loader = run.prepare(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(640, 1)), batch_size=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(3):
    for step in loader:
        step.backward(lambda batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step(); optimizer.zero_grad()
"""


def test_the_command_lets_the_batch_grow_or_says_that_it_stays(tmp_path: Path) -> None:
    ended = evenload_run(tmp_path, SCRIPT, "-d", "cpu:2", "--batch-max", "512")
    assert ended.code == 0, ended.stderr
    assert "evenload: global batch 16 → " in ended.stdout or "the global batch stays 16" in ended.stdout, ended.stdout
    assert "noise scale" in ended.stdout and "learning rate" not in ended.stdout


def test_a_dry_run_says_where_it_was_set(tmp_path: Path) -> None:
    ended = evenload_run(tmp_path, SCRIPT, "--dry-run", "--batch-max", "512")
    assert ended.code == 0, ended.stderr
    assert "batch_max = 512  (--batch-max 512)" in ended.stdout and "batch_lr = 'none'  (init(" in ended.stdout
