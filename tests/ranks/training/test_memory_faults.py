"""100 injected out-of-memory errors on two ranks with BatchNorm, in forward, backward and collate: all recovered, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import evenload
from evenload.records.reader import read_events
from evenload.testing import run_ranks
from evenload.testing.faults import Fault, FaultInjector, random_faults

NUM_RUNS, NUM_FAULTS, STEPS, BATCH = 20, 5, 4, 64


def _build() -> nn.Module:  # no bias before BatchNorm: AdamW would blow up its rounding
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten().double() for value in model.state_dict().values()])


def _train(seed: int) -> tuple[torch.Tensor, list[tuple[tuple[int, ...], ...]], list[Fault]]:
    """One run with random faults; its weights, the micro-batches of each step as computed, and this rank's faults."""
    run = evenload.init(project_dir=f"run-{seed}", seed=0, balance="even", log_every_s=1000)
    injectors: list[FaultInjector] = []

    def collate(samples: list[Any]) -> Any:
        if injectors:
            injectors[0].at("collate")
        return default_collate(samples)

    model, loader = run.prepare(_build(), DataLoader(_data(), batch_size=BATCH, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    faults = random_faults(
        seed, NUM_FAULTS, 2, STEPS, kinds=("out_of_memory",), points=("forward", "backward", "collate")
    )
    injectors.append(FaultInjector(run, faults))
    plans = []
    for step in loader:
        step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
        plans.append(step.batch.plan.micro)
    injectors[0].close()
    run.close()
    return _weights(model), plans, injectors[0].happened


def _runs() -> list[Any]:
    return [_train(seed) for seed in range(NUM_RUNS)]


def _alone(plans: list[tuple[tuple[int, ...], ...]]) -> torch.Tensor:
    """One process with the same micro-batches: with BatchNorm the result depends on them."""
    model = _build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = _data().tensors
    for index, micro in enumerate(plans):
        start = index * BATCH
        for row in micro:
            part = slice(start, start + sum(row))
            (nn.functional.mse_loss(model(x[part]), y[part]) * sum(row) / BATCH).backward()
            start += sum(row)
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def test_100_of_100_are_recovered(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(_runs, 2)
    happened = [fault for one in (*first, *second) for fault in one[2]]
    assert len(happened) == NUM_RUNS * NUM_FAULTS == 100
    assert {fault.point for fault in happened} == {"forward", "backward", "collate"}
    repeated = 0
    for seed, ((weights, plans, own), (others, _, theirs)) in enumerate(zip(first, second, strict=True)):
        events = [event for event in read_events(Path(f"run-{seed}")) if event.kind == "memory"]
        # One attempt may fail on both ranks.
        assert max(len(own), len(theirs)) <= len(events) <= NUM_FAULTS
        repeated += len(events)
        assert torch.equal(weights, others)
        expected = _alone(plans)
        assert len(plans[-1]) > 1
        assert float((weights - expected).norm() / expected.norm()) <= 1e-12
    assert repeated > 0.8 * NUM_RUNS * NUM_FAULTS
