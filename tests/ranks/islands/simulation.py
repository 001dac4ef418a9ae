"""Islands in one process: the algorithms of docs/islands.md written down once more, without Evenload.

Only the random matrices that PowerSGD starts with are Evenload's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from evenload.training.parallel.wire.bucket_sum import Matrix
from evenload.training.parallel.wire.powersgd import PowerSGD
from tests.ranks.wire.simulation import CODECS, Values, powersgd_sum, quantised_sum

NUM_SAMPLES, BATCH = 48, 12


class Points(Dataset[Any]):
    """Points with targets, and a weight for each, so that units are not samples."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
        self.weight = torch.randint(1, 9, (num_samples,), generator=generator).double()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], self.weight[index]


def build(seed: int = 0, hidden: tuple[int, int] = (8, 6)) -> nn.Module:
    torch.manual_seed(seed)
    a, b = hidden
    layers = (nn.Linear(5, a, bias=False), nn.BatchNorm1d(a), nn.Tanh(), nn.Linear(a, b), nn.Tanh(), nn.Linear(b, 3))
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
    delay: int = 0
    gamma: float = 1.0
    """Factor of an exponential schedule."""
    wire: str = "fp32"
    order: tuple[int, ...] = (0, 1, 2)
    """Of islands, by their first ranks."""
    hidden: tuple[int, int] = (8, 6)
    num_samples: int = NUM_SAMPLES
    rounds: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Global steps and parts of each round in turn, where parts change; with equal steps a round is a step."""


@dataclass
class Island:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    units: float = 0.0
    before: list[float] = field(default_factory=list)
    sent: list[list[torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    errors: dict[str, Values] = field(default_factory=dict)
    """Losses of the wire so far, in units of the pseudo-gradient."""
    total_per_own: float = 0.0
    """All islands' units of the newest synchronisation by those of this one."""

    def step(self, samples: Sequence[int], data: Points) -> None:
        index = torch.tensor(list(samples))
        loss, weight = loss_of(self.model, (data.x[index], data.y[index], data.weight[index]))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.units += float(weight)
        self.losses.append(float(loss.detach()))


def simulate(
    case: Case,
    model: nn.Module | None = None,
    first_step: int = 0,
    velocity: dict[str, torch.Tensor] | None = None,
    earlier: Sequence[Island] = (),
) -> list[Island]:
    """Train all islands in one process, from `first_step` on; afterwards the models hold the islands' own weights.

    `velocity` is changed, and holds that of the outer step. The errors of `earlier` islands go to the first one.
    """
    data = Points(case.num_samples)
    start_model = model or build(0, case.hidden)
    islands = []
    for _ in case.parts:
        own = build(0, case.hidden)
        own.load_state_dict(start_model.state_dict())
        islands.append(Island(own, case.optimizer(own)))
    fragments = _fragments(start_model, case.num_fragments)
    start = {name: tensor.detach().clone() for name, tensor in _tensors(start_model)}
    velocity = {} if velocity is None else velocity
    for name, p in start_model.named_parameters():
        velocity.setdefault(name, torch.zeros_like(p))
    pending: dict[int, dict[str, Any]] = {}
    starts: dict[str, Values] = {}
    for island in islands:
        island.before = [0.0] * case.num_fragments
        island.total_per_own = float(len(islands))
    if earlier:
        islands[0].total_per_own = earlier[0].total_per_own
        islands[0].errors = {n: sum(other.errors[n] for other in earlier) for n in earlier[0].errors}

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
        if case.wire != "fp32":
            weighted = [
                {n: u * (start[n] - tensors[n].detach()) for n in fragments[index] if n in velocity}
                for u, tensors in zip(own, now, strict=True)
            ]
            by_rank = [i for i in case.order if i < len(islands)]
            ordered = [[values[i] for i in by_rank] for values in (islands, weighted, own)]
            delta |= _through_wire(case.wire, *ordered, starts)
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
    length = min(case.every, case.num_samples // BATCH) if case.by_speed else 1  # a round is cut at the end of an epoch
    rounds = iter(case.rounds or itertools.repeat((length, case.parts)))
    next_end = first_step
    for done in range(first_step + 1, case.num_steps + 1):
        if done > next_end:
            length, parts = next(rounds)
            next_end += length
        if not case.by_speed:
            _equal_step(case, islands, data, done - 1, parts)
        elif done == next_end:
            _round(case, islands, data, done - length, parts)
        while num_slots < done * case.num_fragments // case.every:
            index = num_slots % case.num_fragments
            if case.num_fragments == 1 and not case.delay:
                send(0)
                take(0)
            else:
                take((index - 1) % case.num_fragments)
                send(index)
                sent_at = done
            num_slots += 1
        if case.delay and pending and done == sent_at + case.delay:
            take((num_slots - 1) % case.num_fragments)
    if (
        case.num_fragments > 1 or case.delay or case.num_steps % case.every
    ):  # the end of the run synchronises everything
        for index in range(case.num_fragments):
            take(index)
        for index in range(case.num_fragments):
            send(index)
            take(index)
    return islands


def _through_wire(
    wire: str,
    islands: Sequence[Island],
    weighted: Sequence[dict[str, torch.Tensor]],
    units: Sequence[float],
    starts: dict[str, Values],
) -> dict[str, torch.Tensor]:
    """Return the pseudo-gradient of a fragment, from each island's values times its units (docs/islands.md)."""
    shapes = {name: tensor.shape for name, tensor in weighted[0].items()}
    ends = [0, *itertools.accumulate(shape.numel() for shape in shapes.values())]
    spans = {name: slice(low, high) for name, low, high in zip(shapes, ends, ends[1:], strict=False)}
    scales = [own * island.total_per_own for own, island in zip(units, islands, strict=True)]
    terms = []
    for island, values, scale in zip(islands, weighted, scales, strict=True):
        parts = [values[n].flatten().numpy() + scale * island.errors.get(n, 0.0) for n in shapes]
        terms.append(np.concatenate(parts))
    if wire == "powersgd":
        wide = [n for n, shape in shapes.items() if len(shape) == 2 and 8 * sum(shape) <= shape.numel()]
        for n in wide:
            one = Matrix(f"0.{n}", 0, *shapes[n])
            starts.setdefault(n, PowerSGD(0).start(one, torch.zeros(1, dtype=torch.float64)).numpy())
        by_place = {spans[n].start: starts[n] for n in wide}
        out, lost = powersgd_sum(terms, [(spans[n].start, *shapes[n]) for n in wide], by_place)
        starts |= {n: by_place[spans[n].start] for n in wide}
    else:
        out, lost = quantised_sum(terms, CODECS[wire])
    total = sum(units)
    for island, own, scale, missing in zip(islands, units, scales, lost, strict=True):
        for n, span in spans.items():
            island.errors[n] = missing[span] / total + (1 - scale / total) * island.errors.get(n, 0.0)
        island.total_per_own = total / own
    return {n: torch.from_numpy(out[span] / total).view(shapes[n]) for n, span in spans.items()}


def _equal_step(case: Case, islands: list[Island], data: Points, step: int, parts: Sequence[int]) -> None:
    low = step * BATCH % case.num_samples
    for island, (first, end) in zip(islands, itertools.pairwise(itertools.accumulate(parts, initial=0)), strict=True):
        for group in island.optimizer.param_groups:
            group["lr"] = island.optimizer.defaults["lr"] * case.gamma**step
        island.step(range(low + first, low + end), data)


def _round(case: Case, islands: list[Island], data: Points, step: int, parts: Sequence[int]) -> None:
    size = BATCH // len(islands)
    edges = list(itertools.pairwise(itertools.accumulate(parts, initial=0)))
    for island, (first, end) in zip(islands, edges, strict=True):
        for index in range(first, end):
            for group in island.optimizer.param_groups:
                group["lr"] = island.optimizer.defaults["lr"] * case.gamma ** (step + index - first)
            low = (step * BATCH + index * size) % case.num_samples
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
