"""The best checkpoint of a run whose rank 0 is killed while that one is written: what the records say, not one before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenload.records.checkpoints import read_best
from evenload.records.reader import read_events
from evenload.training.checkpoint.load import load_checkpoint
from tests.system.launch.scripts import run

SCRIPT = """
import os, signal, sys, threading, time
import torch, evenload
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from evenload.balance.rebalance import Decision
from evenload.training.checkpoint import files
mode, shares = sys.argv[1], eval(sys.argv[2])
run = evenload.init(project_dir="run", seed=0)
torch.manual_seed(0)
model, loader = run.prepare(torch.nn.Linear(4, 1), DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run.resume(model=model, optimizer=optimizer)
if shares:
    loader.planner._balancer = None  # the test decides alone
write, logged = files.write, threading.Event()
def killed():
    if not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
def write_and_die(folder, step, *arguments):
    if step == 6 and run.rank == 0 and not Path("killed").exists():
        if mode.startswith("in step"):
            threading.Event().wait()  # for ever: the kill comes in this step
        logged.wait()
        while '"step":5,' not in Path("run", "steps.jsonl").read_text():
            time.sleep(0.01)
        write(folder, step, *arguments)
        killed()  # before its metric is noted
    return write(folder, step, *arguments)
files.write = write_and_die
def loss_fn(batch):
    if run.rank == 0 and mode == f"in step {now}":
        killed()
    return model(batch[0]).square().mean()
for epoch in range(loader.epoch, 1):
    for step in loader:
        now = step.index
        if shares and now == 2 and run.rank == 0:
            loader.planner._pending = Decision(shares, 1, "left_out", 1, None, "the test decides", 1.0, 0.5)
        step.backward(loss_fn)
        optimizer.step(); optimizer.zero_grad()
        done = step.index + 1
        if done == 6:
            torch.save(model.weight.detach().flatten().clone(), f"weights-{run.rank}")
        if mode == "every":  # its checkpoint is being written when the metric comes
            run.checkpoint(every=6, best=("val", "min"))
        run.log({"val": {2: 0.5, 6: 0.1, 10: 0.3}.get(done, 0.9)})
        if done == 6:
            logged.set()
            time.sleep(0.15)  # steps are recorded every 0.1 s
        if mode != "every":
            run.checkpoint(every=4, best=("val", "min"))
        while done == 7 and mode in ("best", "every") and not Path("killed").exists():
            pass
"""


def _train(folder: Path, mode: str, *options: str, shares: tuple[int, ...] = ()) -> tuple[int | None, str]:
    arguments = [mode, repr(shares)]
    code, stdout, stderr = run(folder, SCRIPT, *options, arguments=arguments, initialised=False, timeout_s=60)
    assert code == 0 and (folder / "killed").exists() and "killed by SIGKILL" in stderr, stdout + stderr
    best = read_best(folder / "run")
    failed = [event.message for event in read_events(folder / "run") if event.kind == "checkpoint_failed"]
    return (None if best is None else best.step), " ".join(failed)


def _assert_weights_of_step_6(folder: Path, rank: int) -> None:
    saved = load_checkpoint(folder / "run", "best")["model"]["weight"]
    assert torch.equal(saved.flatten(), torch.load(folder / f"weights-{rank}"))


@pytest.mark.parametrize("mode", ["best", "every"])
def test_a_complete_checkpoint_whose_metric_was_not_noted_is_the_best_after_a_restart(
    tmp_path: Path, mode: str
) -> None:
    assert _train(tmp_path, mode, "-d", "cpu") == (6, "")
    _assert_weights_of_step_6(tmp_path, 0)


def test_a_rank_that_still_has_the_best_weights_writes_them_when_it_takes_over(tmp_path: Path) -> None:
    assert _train(tmp_path, "in step 6", "-d", "cpu:2", "--max-restarts", "0") == (6, "")
    _assert_weights_of_step_6(tmp_path, 1)


def test_a_rank_that_stood_by_writes_no_weights_of_its_own_when_it_takes_over(tmp_path: Path) -> None:
    options = ("-d", "cpu:3", "--max-restarts", "0")
    assert _train(tmp_path, "in step 6", *options, shares=(4, 0, 4)) == (6, "")
    assert not torch.equal(torch.load(tmp_path / "weights-1"), torch.load(tmp_path / "weights-2"))
    _assert_weights_of_step_6(tmp_path, 2)


def test_best_weights_that_no_rank_has_any_more_are_named(tmp_path: Path) -> None:
    best, failed = _train(tmp_path, "in step 7", "-d", "cpu:2", "--max-restarts", "0")
    assert best == 10 and "lost while it wrote the best weights so far, of step 6 (val 0.1)" in failed
