"""A task, the record of a training, and the plain tasks: a small classifier under several loops.

A task is a user's script in pieces: data, models, optimizers, and the body of the loop, which calls `backward(loss_fn)`.
Bias is off right before BatchNorm: its true gradient is 0, and AdamW would blow rounding noise up to a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, default_collate

Backward = Callable[..., torch.Tensor]


class Recorder:
    """What a training did, as plain tensors that two trainings can be compared by."""

    def __init__(self, task: Task) -> None:
        self._task: Task | None = task
        self.grads: list[torch.Tensor] = []
        self.present: list[tuple[bool, ...]] = []
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.num_micro: list[int] = []
        self.redone: list[bool] = []
        self.scales: list[float] = []
        self.events: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.params = torch.empty(0)
        self.buffers = torch.empty(0)

    def gradients(self, loss: torch.Tensor) -> None:
        """Right after a backward."""
        parameters = self._task.parameters()
        self.present.append(tuple(p.grad is not None for p in parameters))
        self.grads.append(
            torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten().cpu() for p in parameters]
            )
        )
        self.losses.append(float(loss))

    def end_of_step(self, metrics: dict[str, float]) -> None:
        self.metrics.append(dict(metrics))

    def finish(self) -> None:
        """At the end: keeps values, lets the models go."""
        task, self._task = self._task, None
        self.params = torch.cat([tensor.detach().flatten().cpu().clone() for tensor in task.results()])
        buffers = [b.detach().flatten().double().cpu() for model in task.models for b in model.buffers()]
        self.buffers = torch.cat(buffers) if buffers else torch.empty(0)
        self.notes.update(task.notes)


class Rows(Dataset[Any]):
    """Samples in a list."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Task:
    """Classification by a small network; the other tasks change pieces of it."""

    seed = 5
    batch_size = 32
    num_samples = 96
    num_steps = 10
    clip: ClassVar[float | None] = None
    dtype = torch.float64

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.notes: dict[str, Any] = {}
        self.step_index = 0
        self.rank = 0
        self.run: Any = None
        self.run_by_evenload = False
        self.dataset: Any = self.make_dataset()

    # data

    def make_dataset(self) -> Any:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(self.num_samples, 8, generator=g, dtype=self.dtype)
        y = torch.randint(0, 4, (self.num_samples,), generator=g)
        return Rows(list(zip(x, y, strict=True)))

    def collate(self, samples: Any) -> Any:
        return default_collate(samples)

    def order(self, epoch: int) -> list[int]:
        g = torch.Generator().manual_seed(100 + epoch)
        return torch.randperm(len(self.dataset), generator=g).tolist()

    # models

    def build(self) -> None:
        self.models = [self.make_model().to(self.dtype)]

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def place(self, models: Sequence[nn.Module]) -> None:
        """Told the models as they are to be called (after `prepare`)."""
        self.model = models[0]

    def make_optimizers(self) -> None:
        self.optimizers = [torch.optim.AdamW(self.models[0].parameters(), lr=1e-2, eps=1e-8)]

    def parameters(self) -> list[nn.Parameter]:
        return [p for model in self.models for p in model.parameters()]

    def results(self) -> list[torch.Tensor]:
        """What is compared at the end: the parameters, and what the loop made of them."""
        return list(self.parameters())

    # loop

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def body(self, backward: Backward, record: Recorder) -> None:
        loss = backward(self.loss)
        record.gradients(loss)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.models[0].parameters(), self.clip)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class Clipped(Task):
    clip = 0.05


class Ragged(Task):
    num_samples = 32 + 32 + 7
    clip = 1.0


class Momentum(Task):
    """Also: gradients kept as zeros by zero_grad(set_to_none=False)."""

    def make_optimizers(self) -> None:
        self.optimizers = [torch.optim.SGD(self.models[0].parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)]

    def body(self, backward: Backward, record: Recorder) -> None:
        record.gradients(backward(self.loss))
        self.optimizers[0].step()
        self.optimizers[0].zero_grad(set_to_none=False)


class ZeroFirst(Task):
    """zero_grad at the beginning of the body."""

    def body(self, backward: Backward, record: Recorder) -> None:
        self.optimizers[0].zero_grad()
        record.gradients(backward(self.loss))
        self.optimizers[0].step()


class TwoLosses(Task):
    """Two backward calls into the same parameters before one optimizer step; the second has a weight of its own."""

    def second(self, batch: Any) -> Any:
        x, y = batch
        return 0.3 * (self.model(x) ** 2)[y > 0].mean(), (y > 0).sum()

    def body(self, backward: Backward, record: Recorder) -> None:
        record.gradients(backward(self.loss))
        record.gradients(backward(self.second))
        torch.nn.utils.clip_grad_norm_(self.models[0].parameters(), 1.0)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
