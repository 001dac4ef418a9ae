"""Several loaders, the end of a run, sizes that nobody told: one rank, small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.balance.values import StepPlan
from evenload.training.checkpoint import files
from evenload.training.comm.control import Control
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.compute.weighting import read_result
from evenload.training.step.planner import Planner


def _session(folder: Path, *, stop_after: int | None = None, every: int = 2) -> tuple[list[int], int]:
    """Two loaders one after the other, one epoch each, with checkpoints in the loop; the indices, and where it began."""
    run = evenload.init(project_dir=folder)
    try:
        data = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.ones(12, 1))
        model, first, second = run.prepare(nn.Linear(2, 1), DataLoader(data, 2), DataLoader(data, 3))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        run.resume(model=model, optimizer=optimizer)
        began, indices = run._context.loop.steps_done, []
        for loader in (first, second):
            for _ in range(loader.epoch, 1):
                for step in loader:
                    step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
                    optimizer.step()
                    optimizer.zero_grad()
                    indices.append(step.index)
                    run.checkpoint(every=every)
                    if len(indices) == stop_after:
                        return indices, began
        return indices, began
    finally:
        run.close()


def _is_finished(folder: Path) -> bool:
    newest = files.newest(folder)
    assert newest is not None
    return bool(files.read(newest)["evenload"]["finished"])


def test_steps_are_counted_over_all_loaders(tmp_path: Path) -> None:
    assert _session(tmp_path, stop_after=8) == ([0, 1, 2, 3, 4, 5, 6, 7], 0)
    newest = files.newest(tmp_path)
    assert newest is not None and files.step_of(newest) == 8
    assert not _is_finished(tmp_path)
    assert _session(tmp_path) == ([8, 9], 8)
    assert _is_finished(tmp_path)
    assert _session(tmp_path) == ([], 10)


@pytest.mark.parametrize("every", [1, 5, 100])
def test_a_run_is_marked_finished_wherever_its_last_checkpoint_was(
    tmp_path: Path, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _session(tmp_path, every=every)
    assert _is_finished(tmp_path)
    _session(tmp_path)
    assert "this run is finished at step 10" in capsys.readouterr().out


def test_a_copy_beside_the_checkpoints_is_not_taken_for_one(tmp_path: Path) -> None:
    _session(tmp_path)
    newest = files.newest(tmp_path)
    assert newest is not None
    (newest.parent / f"{newest.name}.bak").mkdir()
    (newest.parent / "step-best").mkdir()
    assert files.newest(tmp_path) == newest


def _planner(**settings: object) -> Planner:
    alone = Control(Groups(Membership(0, ("w",), ""), 0, backend="gloo", timeout_s=1))
    given = {"batch_size": 32, "balance": "auto", "micro_batch": "auto", "announce": lambda *_: None, **settings}
    return Planner(alone, rank=0, world_size=2, **given)  # type: ignore[arg-type]


def _run(planner: Planner, num_steps: int, num_samples: int) -> StepPlan:
    """Steps in which rank 1 takes three times as long for a sample."""
    for step in range(num_steps):
        plan = planner.plan(0, step, step, step * num_samples, num_samples)
        planner.observe(step, plan, [plan.shares[0] * 0.01, plan.shares[1] * 0.03], False)
        if planner.has_decision:
            planner.sync_decision(step)
    return planner.plan(0, num_steps, num_steps, 0, num_samples)


def test_a_batch_sampler_that_tells_no_size_is_balanced_too() -> None:
    assert _run(_planner(is_guess=True), 12, 24).shares == (18, 6)


def test_a_resumed_run_looks_at_its_shares_at_once() -> None:
    planner = _planner()
    planner.load_state_dict({"shares": [8, 24], "num_micro": 1, "world_size": 2}, 0)
    assert planner.plan(0, 0, 0, 0, 32).shares == (8, 24)
    assert _run(planner, 12, 32).shares == (24, 8)


def test_memory_that_runs_out_moves_the_shares_where_costs_are_known() -> None:
    planner = _planner()
    plan = _run(planner, 12, 32)
    assert plan.shares == (24, 8)
    again = planner.lower_caps(plan, [True, False], 0)
    assert again.shares == plan.shares and again.num_micro == 2
    assert planner.has_decision


def test_a_models_output_counts_only_scalars_whatever_the_share() -> None:
    class Output(dict[str, torch.Tensor]):
        pass

    loss = torch.ones((), requires_grad=True)
    output = Output(loss=loss, logits=torch.ones(1, 1), aux_loss=torch.tensor(2.0))
    assert set(read_result(output).metrics) == {"aux_loss"}
    assert set(read_result({"loss": loss, "accuracy": torch.ones(1)}).metrics) == {"accuracy"}
