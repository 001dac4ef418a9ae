"""Train in short steps that often take much longer: spikes, evaluations, checkpoints, a recompilation (benchmarks/stalls.py)."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.training.checkpoint import files

num_steps, long_s = int(sys.argv[1]), float(sys.argv[2])
rows = torch.randn(960, 8, generator=torch.Generator().manual_seed(0))
run = evenload.init(project_dir=sys.argv[3], seed=0, log_every_s=1000)
torch.manual_seed(1)


def slow_backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    time.sleep(long_s if run.rank == 2 else 0.0)
    return module.forward


model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
model, loader = run.prepare(model, DataLoader(TensorDataset(rows), batch_size=48, shuffle=True))
forward = torch.compile(model, backend=slow_backend, dynamic=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.resume(model=model, optimizer=optimizer)
write = files.write


def write_slowly(*arguments: Any) -> int:
    time.sleep(long_s)
    return write(*arguments)


files.write = write_slowly  # type: ignore[assignment]
validation = DataLoader(TensorDataset(rows[:96]), batch_size=16)


def spike_s(step: int) -> float:
    """Return the seconds that this rank waits in a step; one of ten steps has one rank that does."""
    choose = random.Random(step)
    if choose.random() >= 0.1 or choose.randrange(3) != run.rank:
        return 0.0
    return 4.0 if choose.random() < 0.05 else choose.uniform(0.05, 0.3)


done = 0
while done < num_steps:
    for step in loader:
        done = step.index + 1
        spike = spike_s(done)
        if done == num_steps // 3:
            torch.compiler.reset()  # the next call compiles again

        def loss_fn(batch: Any, spike: float = spike) -> torch.Tensor:
            time.sleep(spike)
            return (forward(batch[0]) - batch[0]).square().mean()

        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        if done % 500 in (250, 252):
            run.checkpoint()  # the second waits for the write of the first
        if done % 500 == 100:
            for (x,) in run.batches(validation):
                time.sleep(long_s / 2 if run.rank == 1 else 0.0)
                forward(x)
        if done % 500 == 400 and run.is_main:
            time.sleep(long_s)
        if done >= num_steps:
            break
run.close()
