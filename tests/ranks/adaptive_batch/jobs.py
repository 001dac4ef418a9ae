"""Trainings whose noise is known, and the plain loop that each must equal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenload
from evenload.balance.batch import rate_gain
from evenload.training.data import randomness

NUM_SAMPLES = 960
BASE = 16


class Cloud(Dataset[torch.Tensor]):
    """Points around a mean: the gradient of `Offset` is the mean point, and its noise what they scatter."""

    def __init__(self, noise: float, dim: int = 256, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        points = torch.randn(num_samples, dim, generator=generator, dtype=torch.float64)
        points = (points - points.mean(0)) / points.std(0, unbiased=False)
        # Each coordinate of the mean is 1, so |G|^2 = dim and tr(S) = dim * variance: the noise scale is the variance.
        self.points = 1.0 + points * noise**0.5

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index]


class Offset(nn.Module):
    """A parameter for each coordinate; the loss is linear, so its gradient never changes."""

    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, dtype=torch.float64))
        self.other = nn.Parameter(torch.ones(dim // 2, dtype=torch.float64))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        # The second parameter bends the loss, so that the order of steps matters.
        return points @ self.weight + ((points[:, : len(self.other)] * self.other) ** 2).mean(1) * 1e-3


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    folder: str,
    noise: float,
    num_epochs: int,
    settings: dict[str, Any],
    kind: str = "sgd",
    until: int | None = None,
    sampled: bool = False,
    overhead_s: float = 0.0,
) -> dict[str, Any]:
    """Trains on these ranks; what was seen."""
    run = evenload.init(project_dir=folder, seed=3, **settings)
    model, data = Offset(), Cloud(noise)
    sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(1)) if sampled else None
    model, loader = run.prepare(model, DataLoader(data, batch_size=BASE, shuffle=sampler is None, sampler=sampler))
    optimizer = optimizer_of(kind, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40)
    resumed = bool(run.resume(model=model, optimizer=optimizer, scheduler=scheduler))
    sizes, lengths, rates, steps = [], [], [], []
    growing = run._saver.adaptive_batch
    stopped = False
    for _ in range(loader.epoch, num_epochs):
        lengths.append((loader.epoch, loader.batch_size, len(loader)))
        for step in loader:
            step.backward(lambda points: model(points).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if overhead_s:  # as a slow network would take
                with run._context.clock.segment("comm"):
                    time.sleep(overhead_s)
            rates.append(optimizer.param_groups[0]["lr"])
            sizes.append((step.epoch, step.num_samples))
            if growing is not None:
                steps.append(step_of(step, growing.growth.now))
            if step.index + 1 == until:
                run.checkpoint()
                stopped = True
                break
        if stopped:
            break
    seen = {
        "steps": steps,
        "resumed": resumed,
        "sizes": sizes,
        "lengths": lengths,
        "rates": rates,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "progress": None if growing is None else growing.growth.progress(),
        "noise": None if growing is None else growing.growth._noise.samples,
    }
    run.close()
    seen["events"] = events(folder) if run.rank == 0 else []
    return seen


def events(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]


def step_of(step: evenload.Step, now: Any) -> tuple[int, int, int, int, float]:
    """Epoch, first and last position of a step's samples, and the batch and noise scale that its learning rate follows."""
    plan = step.batch.plan
    return plan.epoch, plan.start, plan.start + plan.num_samples, now.batch_size, now.noise


def plain(noise: float, epochs: list[tuple[int, float]], kind: str, rule: str) -> torch.Tensor:
    """One plain process: for each epoch its batch, and the noise scale that its learning rate follows."""
    steps = [
        (epoch, low, min(low + size, NUM_SAMPLES), size, scale)
        for epoch, (size, scale) in enumerate(epochs)
        for low in range(0, NUM_SAMPLES, size)
    ]
    return plain_steps(Cloud(noise), steps, kind, rule)


def plain_steps(
    data: Cloud, steps: list[tuple[int, int, int, int, float]], kind: str = "sgd", rule: str = "adascale"
) -> torch.Tensor:
    """One plain process: the steps as `step_of` tells them."""
    model = Offset()
    optimizer = optimizer_of(kind, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40)
    for epoch, low, high, size, scale in steps:
        generator = torch.Generator().manual_seed(randomness.mix(3, epoch, randomness.ORDER))
        points = data.points[torch.randperm(len(data), generator=generator)[low:high]]
        model(points).mean().backward()
        set_rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= rate_gain(scale, BASE, size, rule=rule)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, set_rates, strict=True):
            group["lr"] = rate
        scheduler.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def chosen(seen: dict[str, Any]) -> dict[int, tuple[int, float]]:
    """For each epoch the batch and noise scale that the records tell."""
    told = {e["fields"]["epoch"]: e["fields"] for e in seen["events"] if e.get("kind") == "batch"}
    return {0: (BASE, 0.0)} | {epoch: (t["batch_size"], t["noise_samples"]) for epoch, t in told.items()}


def train_all(jobs: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Several trainings one after the other, in the processes that are there."""
    torch.set_num_threads(1)
    return [train(f"{folder}/{job.pop('name', index)}", **job) for index, job in enumerate(jobs)]
