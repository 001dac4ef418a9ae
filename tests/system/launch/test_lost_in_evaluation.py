"""A rank is lost in an evaluation, one other is left, and the lost one joins again."""

from tests.warm import run

SCRIPT = """
import os, signal, time
from pathlib import Path
import torch, evenload
from torch.utils.data import DataLoader, TensorDataset
run = evenload.init(project_dir="run", seed=0)
model, loader = run.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(4000, 1)), batch_size=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.resume(model=model, optimizer=optimizer)
together = 0
for epoch in range(loader.epoch, 3):
    for number, step in enumerate(loader):
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step(); optimizer.zero_grad()
        time.sleep(0.02)
        together += epoch == 1 and run.world_size == 2
        if number > 3 if epoch != 1 else run.any(together > 3):
            break
    for batch in run.batches(DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)):
        if run.rank == 1 and not Path("lost").exists():
            Path("lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
print("ended with", run.world_size, "after", together)
"""


def test_the_rank_that_was_left_trains_on_with_the_one_that_joins(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run(["-m", "evenload.cli.main", "run", "-d", "cpu:2", "train.py"], tmp_path, 90)
    assert ended.returncode == 0, ended.stderr
    assert "killed by SIGKILL" in ended.stderr and "ended with 2 after" in ended.stdout, ended
