"""Islands in one process: the algorithms of docs/islands.md written down once more, without Evenload."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

NUM_SAMPLES, BATCH = 48, 12


class Points(Dataset[Any]):
    """Points with targets, and a weight for each, so that units are not samples."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
        self.weight = torch.randint(1, 9, (NUM_SAMPLES,), generator=generator).double()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], self.weight[index]


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, weight = batch
    each = functional.mse_loss(model(x), y, reduction="none").mean(1)
    return (each * weight).sum() / weight.sum(), weight.sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


@dataclass(frozen=True)
class Case:
    """Settings of a training, and what islands do under them."""

    settings: dict[str, Any]
    parts: tuple[int, ...]
    """Samples of a global batch, or batches of a round up to the end of an epoch, of each island."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    num_steps: int = 16
    every: int = 4
    by_speed: bool = False
    lr: float = 1.0
    momentum: float = 0.0
    num_fragments: int = 1
    gamma: float = 1.0
    """Factor of an exponential schedule."""


@dataclass
class Island:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    units: float = 0.0
    before: list[float] = field(default_factory=list)
    sent: list[list[torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, samples: Sequence[int], data: Points) -> None:
        index = torch.tensor(list(samples))
        loss, weight = loss_of(self.model, (data.x[index], data.y[index], data.weight[index]))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.units += float(weight)
        self.losses.append(float(loss.detach()))


def simulate(
    case: Case, model: nn.Module | None = None, first_step: int = 0, velocity: dict[str, torch.Tensor] | None = None
) -> list[Island]:
    """Train all islands in one process, from `first_step` on; afterwards the models hold the islands' own weights.

    `velocity` is changed, and holds that of the outer step.
    """
    data = Points()
    start_model = model or build()
    islands = []
    for _ in case.parts:
        own = build()
        own.load_state_dict(start_model.state_dict())
        islands.append(Island(own, case.optimizer(own)))
    fragments = _fragments(start_model, case.num_fragments)
    start = {name: tensor.detach().clone() for name, tensor in _tensors(start_model)}
    velocity = {} if velocity is None else velocity
    for name, p in start_model.named_parameters():
        velocity.setdefault(name, torch.zeros_like(p))
    pending: dict[int, dict[str, Any]] = {}
    for island in islands:
        island.before = [0.0] * case.num_fragments

    def send(index: int) -> None:
        own = [island.units - island.before[index] for island in islands]
        total = sum(own)
        if not total:
            return
        now = [dict(_tensors(island.model)) for island in islands]
        delta = {
            name: sum(u * (start[name] - tensors[name].detach()) for u, tensors in zip(own, now, strict=True)) / total
            for name in fragments[index]
        }
        sent = [{name: tensors[name].detach().clone() for name in fragments[index]} for tensors in now]
        pending[index] = {"delta": delta, "sent": sent}
        for island in islands:
            island.before[index] = island.units

    def take(index: int) -> None:
        if index not in pending:
            return
        found = pending.pop(index)
        for name, delta in found["delta"].items():
            if name in velocity:
                velocity[name] = case.momentum * velocity[name] + delta
                start[name] = start[name] - case.lr * (delta + case.momentum * velocity[name])
            else:
                start[name] = start[name] - delta
            for island, sent in zip(islands, found["sent"], strict=True):
                with torch.no_grad():
                    tensor = dict(_tensors(island.model))[name]
                    tensor.copy_(start[name] + (tensor - sent[name]))

    num_slots = first_step * case.num_fragments // case.every
    for done in range(first_step + 1, case.num_steps + 1):
        if not case.by_speed:
            _equal_step(case, islands, data, done - 1)
        elif done % (length := min(case.every, NUM_SAMPLES // BATCH)) == 0:  # a round is cut at the end of an epoch
            _round(case, islands, data, done - length)
        while num_slots < done * case.num_fragments // case.every:
            index = num_slots % case.num_fragments
            if case.num_fragments == 1:
                send(0)
                take(0)
            else:
                take((index - 1) % case.num_fragments)
                send(index)
            num_slots += 1
    if case.num_fragments > 1 or case.num_steps % case.every:  # the end of the run synchronises everything
        for index in range(case.num_fragments):
            take(index)
        for index in range(case.num_fragments):
            send(index)
            take(index)
    return islands


def _equal_step(case: Case, islands: list[Island], data: Points, step: int) -> None:
    low = step * BATCH % NUM_SAMPLES
    for island, (first, end) in zip(
        islands, itertools.pairwise(itertools.accumulate(case.parts, initial=0)), strict=True
    ):
        for group in island.optimizer.param_groups:
            group["lr"] = island.optimizer.defaults["lr"] * case.gamma**step
        island.step(range(low + first, low + end), data)


def _round(case: Case, islands: list[Island], data: Points, step: int) -> None:
    size = BATCH // len(islands)
    edges = list(itertools.pairwise(itertools.accumulate(case.parts, initial=0)))
    for island, (first, end) in zip(islands, edges, strict=True):
        for index in range(first, end):
            for group in island.optimizer.param_groups:
                group["lr"] = island.optimizer.defaults["lr"] * case.gamma ** (step + index - first)
            low = (step * BATCH + index * size) % NUM_SAMPLES
            island.step(range(low, low + size), data)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if b.is_floating_point())]


def _fragments(model: nn.Module, count: int) -> list[list[str]]:
    """By the middle of each parameter; buffers with the last."""
    size = sum(p.numel() for p in model.parameters()) / count
    found: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for name, p in model.named_parameters():
        found[min(count - 1, int((before + p.numel() / 2) / size))].append(name)
        before += p.numel()
    found[-1] += [name for name, b in model.named_buffers() if b.is_floating_point()]
    return found
