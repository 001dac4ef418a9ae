"""Two loaders in one step: a tuple given to `prepare`, with other batch sizes and lengths.

A sample of such a task is a unit: the samples of each loader that belong together in any part of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from tests.ranks.exact.tasks.base import Backward, Recorder, Rows, Task


class Paired(Task):
    """Plain regression over two loaders; `batch_size` and `num_samples` of the task are units of the first."""

    units: ClassVar[tuple[int, int]]
    """Samples of each loader in a unit; the loaders' batch sizes are `batch_size` times that."""
    num_others: ClassVar[int]

    def make_dataset(self) -> Any:
        self.first = self.make_rows(self.num_samples * self.units[0], 1)
        self.second = self.make_rows(self.num_others, 2)
        return Units(self)

    def make_rows(self, count: int, seed: int) -> Rows:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 8, generator=g, dtype=self.dtype)
        return Rows(list(zip(x, torch.randint(0, 4, (count,), generator=g), strict=True)))

    def collate(self, samples: Any) -> Any:
        return tuple(default_collate([row for unit in samples for row in unit[index]]) for index in range(2))

    def order(self, epoch: int) -> list[int]:
        return [*range(epoch * self.num_samples, (epoch + 1) * self.num_samples)]

    def orders(self) -> tuple[Any, Any]:
        """The order of each loader's epoch, as a function of the epoch."""
        return lambda epoch: self._shuffled(self.first, 100 + epoch), lambda epoch: self._shuffled(
            self.second, 500 + epoch
        )

    @staticmethod
    def _shuffled(rows: Rows, seed: int) -> list[int]:
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()


class Units:
    """Unit i since the training began: the first loader's samples by its epochs, the second's without end."""

    def __init__(self, task: Paired) -> None:
        self.task = task
        self.streams: list[tuple[list[Any], Iterator[Any]]] = [([], samples) for samples in self._endless()]

    def _endless(self) -> Iterator[Iterator[Any]]:
        task = self.task
        # The first drops nothing, the second what is no whole batch.
        batch = task.batch_size * task.units[1]
        for rows, order, whole in zip(
            (task.first, task.second), task.orders(), (len(task.first), len(task.second) // batch * batch), strict=True
        ):
            yield self._epochs(rows, order, whole)

    @staticmethod
    def _epochs(rows: Rows, order: Any, whole: int) -> Iterator[Any]:
        epoch = 0
        while True:
            yield from (rows[key] for key in order(epoch)[:whole])
            epoch += 1

    def __getitem__(self, index: int) -> tuple[list[Any], list[Any]]:
        found = []
        for (drawn, samples), unit in zip(self.streams, self.task.units, strict=True):
            while len(drawn) < (index + 1) * unit:
                drawn.append(next(samples))
            found.append(drawn[index * unit : (index + 1) * unit])
        return found[0], found[1]


class FixMatch(Paired):
    """Batches of 32 labeled and 224 unlabeled samples through one model with BatchNorm; the unlabeled end in mid-epoch."""

    units = (1, 7)
    num_samples = 96 + 7
    num_others = 2 * 224 + 50

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def loss(self, batch: Any) -> Any:
        (x, y), (u, _) = batch
        logits = self.model(torch.cat([x, u, u + 0.1]))
        labeled, weak, strong = logits.split([len(x), len(u), len(u)])
        confidence, guess = weak.detach().softmax(1).max(1)
        unlabeled = (F.cross_entropy(strong, guess, reduction="none") * (confidence > 0.4)).mean()
        return {"loss": F.cross_entropy(labeled, y) + 0.5 * unlabeled, "sure": (confidence > 0.4).double().mean()}


class CycleGan(Paired):
    """Unpaired domains in batches of 64 and 96: two generators, two discriminators, two optimizers."""

    units = (2, 3)
    num_samples = 64 + 5
    num_others = 96 * 3 + 11

    def build(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).to(self.dtype)

        self.models = [make(), make(), nn.Linear(8, 1).to(self.dtype), nn.Linear(8, 1).to(self.dtype)]

    def place(self, models: Sequence[nn.Module]) -> None:
        self.to_b, self.to_a, self.judge_a, self.judge_b = models

    def make_optimizers(self) -> None:
        self.optimizers = [
            torch.optim.AdamW([p for model in part for p in model.parameters()], lr=5e-3, betas=(0.5, 0.999), eps=1e-8)
            for part in (self.models[:2], self.models[2:])
        ]

    def generate(self, batch: Any) -> Any:
        (a, _), (b, _) = batch
        fake_b, fake_a = self.to_b(a), self.to_a(b)
        fooling = F.softplus(-self.judge_b(fake_b)).mean() + F.softplus(-self.judge_a(fake_a)).mean()
        return fooling + 3.0 * ((self.to_a(fake_b) - a).abs().mean() + (self.to_b(fake_a) - b).abs().mean())

    def judge(self, batch: Any) -> Any:
        (a, _), (b, _) = batch
        fake_b, fake_a = self.to_b(a).detach(), self.to_a(b).detach()
        real = F.softplus(-self.judge_a(a)).mean() + F.softplus(-self.judge_b(b)).mean()
        return real + F.softplus(self.judge_a(fake_a)).mean() + F.softplus(self.judge_b(fake_b)).mean()

    def body(self, backward: Backward, record: Recorder) -> None:
        optimize_g, optimize_d = self.optimizers
        record.gradients(backward(self.generate))
        optimize_g.step()
        optimize_g.zero_grad()
        optimize_d.zero_grad()
        record.gradients(backward(self.judge))
        optimize_d.step()
        optimize_d.zero_grad()
