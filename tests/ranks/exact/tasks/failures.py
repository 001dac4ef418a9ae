"""Tasks in which something goes wrong on the way: overflow, too little memory, a late gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.exact.tasks.base import Clipped, Task, TwoLosses
from tests.ranks.exact.tasks.batches import Tokens
from tests.ranks.exact.tasks.gans import Gan
from tests.ranks.exact.tasks.norms import Normed


class Inf(Clipped):
    """An infinite gradient in step 3, on the samples of one rank."""

    bad_steps = (3, 7)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        if self.step_index in self.bad_steps:
            worst = self.dataset.rows[self.order(self.step_index * self.batch_size // self.num_samples)[self._at()]][0]
            if bool((x == worst).all(1).any()):
                loss = loss + (self.models[0][0].weight.sum() * 1e300) * 1e300
        return loss

    def _at(self) -> int:
        return self.step_index * self.batch_size % self.num_samples


class InfInOneOfTwo(TwoLosses):
    """The first of two backwards of a step overflows: the finite second one must not become a step of its own."""

    bad_steps = (4,)

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        return loss + (self.models[0][0].weight.sum() * 1e300) * 1e300 if self.step_index in self.bad_steps else loss


class InfInDiscriminator(Gan):
    """D's part overflows: D is left as it is, G goes on."""

    bad_steps = (4,)

    def on_real(self, batch: Any) -> Any:
        loss = super().on_real(batch)
        return loss + (self.models[1][0].weight.sum() * 1e300) * 1e300 if self.step_index in self.bad_steps else loss


class OutOfMemory(Clipped):
    """Rank 0 holds at most `limit` samples at once (as a GPU would tell it), from step `since` on."""

    limit = 5
    since = 0
    error: Exception = torch.OutOfMemoryError("injected")

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_buffer("calls", torch.zeros(1, dtype=torch.float64))
        return model

    def loss(self, batch: Any) -> Any:
        return self.raise_if_too_many(batch[0], super().loss(batch))

    def raise_if_too_many(self, x: torch.Tensor, loss: Any) -> Any:
        first = self.run_by_evenload and self.run.rank == 0  # of a replica its own number
        if first and self.step_index >= self.since and len(x) > self.limit:
            raise self.error
        return loss


class OutOfMemoryLate(OutOfMemory):
    since = 3
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


class OutOfMemoryTokens(Tokens, OutOfMemory):
    error = MemoryError("Unable to allocate 1.00 TiB for an array")

    def loss(self, batch: Any) -> Any:
        return self.raise_if_too_many(batch["input_ids"], Tokens.loss(self, batch))


class OutOfMemoryNormed(Normed, OutOfMemory):
    limit = 20  # BatchNorm over very few samples blows rounding up

    def loss(self, batch: Any) -> Any:
        return self.raise_if_too_many(batch[0], Normed.loss(self, batch))  # after the forward has moved the statistics


class LateDrawing(Task):
    """One more layer from step 3 on, after the others' gradients came; each call draws a number."""

    num_steps = 6

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, int, float]] = []

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.add_module("early", nn.Linear(8, 8))
        return model

    def loss(self, batch: Any) -> Any:
        x, y = batch
        number = float(torch.rand((), dtype=torch.float64))
        if self.run is None or self.run._context.loop.in_backward:  # not in the watch for coupled losses after it
            self.drawn.append((self.step_index, len(x), number))
        first, act, last = self.model[0], self.model[1], self.model[2]
        if self.step_index >= 3:
            x = x + torch.tanh(self.model.early(x))
        return F.cross_entropy(last(act(first(x))), y)
