"""Tasks whose batches and results have other shapes: sequences with ignored labels, dicts, named tuples."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.exact.tasks.base import Rows, Task

IGNORED = -100


class Tokens(Task):
    """Sequences of variable length, padded, with -100: the loss is a mean over tokens. Sample 0 has no label at all."""

    def make_dataset(self) -> Any:
        g = torch.Generator().manual_seed(1)
        rows = []
        for index in range(self.num_samples):
            length = int(torch.randint(2, 12, (1,), generator=g))
            ids = torch.randint(0, 11, (length,), generator=g)
            labels = torch.randint(0, 11, (length,), generator=g)
            labels[torch.rand(length, generator=g) < 0.3] = IGNORED
            if self.is_silent(index):
                labels[:] = IGNORED
            rows.append((ids, labels))
        return Rows(rows)

    def is_silent(self, index: int) -> bool:
        return index == 0

    def collate(self, samples: Any) -> Any:
        ids = nn.utils.rnn.pad_sequence([ids for ids, _ in samples], batch_first=True)
        labels = nn.utils.rnn.pad_sequence([y for _, y in samples], batch_first=True, padding_value=IGNORED)
        return {"input_ids": ids, "labels": labels}

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 11))

    def loss(self, batch: Any) -> Any:
        labels = batch.pop("labels")  # user code may take a batch apart
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), (labels != IGNORED).sum()


class TiedTokens(Tokens):
    """The embedding is also the output's weight."""

    num_steps = 8

    def make_model(self) -> nn.Module:
        model = nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 11))
        model[3].weight = model[0].weight
        return model


class SilentRank(Tokens):
    """The last quarter of each global batch has no label: on the last rank the mean loss is 0 / 0."""

    def order(self, epoch: int) -> list[int]:
        return list(range(self.num_samples))

    def is_silent(self, index: int) -> bool:
        return index % self.batch_size >= 24

    def loss(self, batch: Any) -> Any:
        labels = batch["labels"]
        logits = self.model(batch["input_ids"]).flatten(0, 1)
        # cross_entropy itself gives gradient 0 where all is ignored; a mean over a mask of one's own does not
        each = F.cross_entropy(logits, labels.flatten().clamp(min=0), reduction="none")
        mask = (labels.flatten() != IGNORED).to(each.dtype)
        return (each * mask).sum() / mask.sum(), int(mask.sum())  # NaN, and NaN gradients, where all is masked


class SilentRankNormed(SilentRank):
    """As before, with BatchNorm: samples without a label still count in its statistics, and have gradients through them.

    With torch's own cross_entropy: its loss is NaN there, its gradient is 0.
    """

    class _PerToken(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(features)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    def collate(self, samples: Any) -> Any:
        cut = [(ids[:2], labels[:2]) for ids, labels in samples]  # equal lengths: padding would enter the statistics
        return super().collate(cut)

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(11, 12), nn.Linear(12, 16, bias=False), self._PerToken(16), nn.Tanh(), nn.Linear(16, 11)
        )

    def loss(self, batch: Any) -> Any:
        return Tokens.loss(self, batch)


Point = collections.namedtuple("Point", ["x", "y"])


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """Like Hugging Face's ModelOutput: a mapping that also holds tensors which are no metrics."""


class Structured(Task):
    """A namedtuple for a batch, a mapping for a result, scalars that become metrics."""

    num_samples = 32 + 32 + 7

    def make_dataset(self) -> Any:
        return Rows([Point(x, y) for x, y in super().make_dataset().rows])

    def loss(self, batch: Any) -> Any:
        logits = self.model(batch.x)
        right = (logits.argmax(1) == batch.y).double().mean()
        return Output(loss=F.cross_entropy(logits, batch.y), logits=logits, accuracy=right, two=2)


class DictMetrics(Tokens):
    """A dict with a weight; the further scalars are means over the same tokens, as floats and as tensors."""

    def loss(self, batch: Any) -> Any:
        labels = batch["labels"]
        kept = labels != IGNORED
        logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        right = (logits.argmax(-1) == labels)[kept].double().mean()
        return {"loss": loss, "weight": kept.sum(), "nll": loss.detach(), "accuracy": float(right)}
