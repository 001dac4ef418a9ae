"""Ranks that are killed while rank 0 takes straight steps and others stand by: nothing is lost, and the weights are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from evenload.records.reader import read_events, read_steps
from tests.system.launch.scripts import run

SCRIPT = """
import os, signal, sys, time
import torch, evenload
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from evenload.balance.rebalance import Decision
from evenload.training.launch.environment import detect
from evenload.training.step.straight import StraightLine
torch.set_default_dtype(torch.float64)
decisions, kills = eval(sys.argv[1]), eval(sys.argv[2])
num_straight, compute = 0, StraightLine.backward
def counted(*args):
    global num_straight
    num_straight += 1
    return compute(*args)
StraightLine.backward = counted
run = evenload.init(project_dir="run", seed=0)
torch.manual_seed(0)
x = torch.randn(8 * 80, 6)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
model, loader = run.prepare(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.resume(model=model, optimizer=optimizer)
loader.planner._balancer = None  # the test decides alone
def die():
    name = f"killed-{run.rank}-{step.index}"
    if (run.rank, step.index) in kills and not Path(name).exists():
        Path(name).write_text(str(num_straight))
        os.kill(os.getpid(), signal.SIGKILL)
def loss_fn(batch):
    die()
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
computed = []
for step in loader:
    if run.rank == 0 and step.index in decisions:
        loader.planner._pending = Decision(decisions[step.index], 1, "left_out", 1, None, "the test decides", 1.0, 0.5)
    if not step.shares[run.rank]:
        die()  # its loss_fn is not called
    step.backward(loss_fn)
    optimizer.step(); optimizer.zero_grad()
    run.checkpoint(every=10)
    computed.append(step.shares[run.rank])
    time.sleep(0.004)
torch.save([value.clone() for value in model.state_dict().values()], f"weights-{run.rank}")
Path(f"computed-{run.rank}").write_text(str(computed))
"""


def _train(folder: Path, devices: str, decisions: dict[int, Any], kills: set[tuple[int, int]], *options: str) -> str:
    folder.mkdir()
    arguments = [repr(decisions), repr(kills)]
    code, stdout, stderr = run(
        folder, SCRIPT, "-d", devices, *options, arguments=arguments, initialised=False, timeout_s=60
    )
    assert code == 0 and stderr.count("killed by SIGKILL") == len(kills), stdout + stderr
    assert [record.step for record in read_steps(folder / "run")] == [*range(80)]
    return stderr


def _assert_same_weights(torn: Path, whole: Path, num_ranks: int) -> None:
    expected = torch.load(whole / "weights-0")
    for rank in range(num_ranks):
        for one, other in zip(torch.load(torn / f"weights-{rank}"), expected, strict=True):
            assert (one - other).norm() <= 1e-12 * other.norm()


def test_rank_0_is_killed_in_its_straight_line_beside_a_rank_that_stands_by(tmp_path: Path) -> None:
    """The other one has old weights: it saves nothing, and all start again from the newest checkpoint."""
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    stderr = _train(torn, "cpu:2", {3: (8, 0)}, {(0, 37)})
    assert int((torn / "killed-0-37").read_text()) > 10
    assert "starts again from the checkpoint of step 30" in stderr, stderr
    _train(whole, "cpu", {}, set())
    _assert_same_weights(torn, whole, 2)


def test_one_of_two_ranks_that_stand_by_is_killed_and_the_other_computes_again(tmp_path: Path) -> None:
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    stderr = _train(torn, "cpu:3", {3: (8, 0, 0), 50: (5, 3)}, {(2, 30)}, "--max-restarts", "0")
    assert "training goes on" in stderr and "starts again" not in stderr, stderr
    computed = [json.loads((torn / f"computed-{rank}").read_text()) for rank in range(2)]
    assert computed[1][10:30] == [0] * 20 and computed[1][-20:] == [3] * 20 and computed[0][-20:] == [5] * 20
    [lost] = [event for event in read_events(torn / "run") if event.kind == "lost"]
    assert "rank 2" in lost.message
    _train(whole, "cpu", {}, set())
    _assert_same_weights(torn, whole, 2)
