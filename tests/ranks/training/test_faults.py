"""Faults of each kind happen where and when they were asked for, once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import ConfigError, RankFailedError
from evenload.testing import run_ranks
from evenload.testing.faults import Fault, FaultInjector, random_faults

FAULTS = (
    Fault(0, "slow", "forward", 0, 0.2),
    Fault(0, "stop", "backward", 1, 0.4),
    Fault(1, "exception", "own point", 2),
    Fault(0, "exception", "checkpoint", 2),
    Fault(1, "exception", "applied", 3),
)


def _train(folder: str, faults: tuple[Fault, ...]) -> tuple[list[Fault], list[float], list[int]]:
    run = evenload.init(project_dir=folder, seed=0)
    torch.manual_seed(0)
    model, loader = run.prepare(nn.Linear(2, 1), DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    run.resume(model=model, optimizer=optimizer)
    injector = FaultInjector(run, faults)
    seconds, raised = [], []
    for step in loader:
        began_s = time.monotonic()
        step.backward(lambda batch: model(batch[0]).square().mean())
        seconds.append(time.monotonic() - began_s)
        try:
            optimizer.step()
            injector.at("own point")
        except RuntimeError as error:
            assert "injected: Fault(" in str(error)
            raised.append(step.index)
        optimizer.zero_grad()
        run.checkpoint(every=1)
    injector.close()
    run.close()
    return injector.happened, seconds, raised


def test_each_kind_at_its_point(tmp_path: Path) -> None:
    first, second = run_ranks(_train, 2, str(tmp_path / "run"), FAULTS)
    assert [fault.point for fault in first[0]] == ["forward", "backward", "checkpoint"]
    assert [fault.point for fault in second[0]] == ["own point", "applied"] and second[2] == [2, 3]
    assert first[1][0] >= 0.2 and first[1][1] >= 0.4, (first[1], second[1])
    assert "CHECKPOINT FAILED" in (tmp_path / "run" / "events.jsonl").read_text()
    with pytest.raises(RankFailedError, match="the process ended with SIGKILL"):
        run_ranks(_train, 1, str(tmp_path / "killed"), (Fault(0, "kill", "reduced", 1),))


def test_random_faults_are_the_same_for_a_seed() -> None:
    faults = random_faults(3, 50, 3, 20)
    assert faults == random_faults(3, 50, 3, 20) != random_faults(4, 50, 3, 20)
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
    assert {fault.rank for fault in faults} == {0, 1, 2}
    with pytest.raises(ConfigError, match="unknown melt; there are kill, stop"):
        random_faults(0, 1, 1, 1, kinds=("melt",))
