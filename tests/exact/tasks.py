"""What is trained: tasks written once, in plain PyTorch, and run by the reference and by Evenload.

A task is a user's script in pieces: data, models, optimizers, and the body of the loop, which calls `backward(loss_fn)`.
Bias is off right before BatchNorm: its true gradient is 0, and AdamW would blow rounding noise up to a whole step.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, default_collate

IGNORED = -100
Backward = Callable[[Callable[[Any], Any]], torch.Tensor]


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
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten() for p in parameters])
        )
        self.losses.append(float(loss))

    def end_of_step(self, metrics: dict[str, float]) -> None:
        self.metrics.append(dict(metrics))

    def finish(self) -> None:
        """At the end: keeps values, lets the models go."""
        task, self._task = self._task, None
        self.params = torch.cat([p.detach().flatten().clone() for p in task.parameters()])
        buffers = [b.detach().flatten().double() for model in task.models for b in model.buffers()]
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
    num_steps = 20
    clip: ClassVar[float | None] = None
    dtype = torch.float64

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.notes: dict[str, Any] = {}
        self.step_index = 0
        self.rank = 0
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


class Normed(Task):
    """BatchNorm of all kinds, with and without affine, momentum and running statistics; a ragged last batch of 9."""

    num_samples = 32 + 32 + 9

    def make_dataset(self) -> Any:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(self.num_samples, 3, 6, 6, generator=g, dtype=self.dtype)
        x = x + torch.arange(self.num_samples, dtype=self.dtype).view(-1, 1, 1, 1) / 20  # statistics differ over ranks
        y = torch.randint(0, 4, (self.num_samples,), generator=g)
        return Rows(list(zip(x, y, strict=True)))

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, bias=False),
            nn.BatchNorm2d(6, affine=False, momentum=None),
            nn.Flatten(),
            nn.Linear(24, 12, bias=False),
            nn.BatchNorm1d(12, track_running_stats=False),
            nn.Tanh(),
            nn.Linear(12, 4),
        )


class ChannelsLast(Normed):
    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x.to(memory_format=torch.channels_last)), y)


class NormedAtEval(Normed):
    """BatchNorm without running statistics takes the batch's in eval mode too (fine-tuning with frozen BatchNorm)."""

    def place(self, models: Sequence[nn.Module]) -> None:
        super().place(models)
        self.model.eval()


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


class SilentRank(Tokens):
    """The last quarter of each global batch has no label: on the last rank the mean loss is 0 / 0."""

    def order(self, epoch: int) -> list[int]:
        return list(range(self.num_samples))

    def is_silent(self, index: int) -> bool:
        return index % self.batch_size >= 24

    def loss(self, batch: Any) -> Any:
        labels = batch["labels"]
        each = F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), labels.flatten(), reduction="none")
        mask = (labels.flatten() != IGNORED).to(each.dtype)
        return (each * mask).sum() / mask.sum(), int(mask.sum())  # NaN, and NaN gradients, where all is masked


class SilentRankNormed(SilentRank):
    """As before, with BatchNorm: samples without a label still count in its statistics, and have gradients through them."""

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


Point = collections.namedtuple("Point", ["x", "y"])  # noqa: PYI024


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
    def loss(self, batch: Any) -> Any:
        loss, weight = super().loss(batch)
        return {"loss": loss, "weight": weight, "nll": loss.detach(), "squared": loss.detach() ** 2}


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


class Gan(Task):
    """Two models, two optimizers, in the order of PyTorch's DCGAN tutorial: D on real, D on fake, step D, G through D."""

    detached = True

    def make_dataset(self) -> Any:
        g = torch.Generator().manual_seed(1)
        real = torch.randn(self.num_samples, 6, generator=g, dtype=self.dtype) * 2 + 1
        noise = torch.randn(self.num_samples, 4, generator=g, dtype=self.dtype)
        return Rows(list(zip(real, noise, strict=True)))

    def build(self) -> None:
        generator = nn.Sequential(nn.Linear(4, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
        discriminator = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
        self.models = [generator.to(self.dtype), discriminator.to(self.dtype)]

    def place(self, models: Sequence[nn.Module]) -> None:
        self.generator, self.discriminator = models

    def make_optimizers(self) -> None:
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.5, 0.999), eps=1e-8) for model in self.models
        ]

    def on_real(self, batch: Any) -> Any:
        out = self.discriminator(batch[0])
        return F.binary_cross_entropy_with_logits(out, torch.ones_like(out))

    def on_fake(self, batch: Any) -> Any:
        out = self.discriminator(self.generator(batch[1]).detach())
        return F.binary_cross_entropy_with_logits(out, torch.zeros_like(out))

    def fooling(self, batch: Any) -> Any:
        out = self.discriminator(self.generator(batch[1]))
        return F.binary_cross_entropy_with_logits(out, torch.ones_like(out))

    def body(self, backward: Backward, record: Recorder) -> None:
        optimize_g, optimize_d = self.optimizers
        self.models[1].zero_grad()
        record.gradients(backward(self.on_real))
        record.gradients(backward(self.on_fake))
        optimize_d.step()
        self.models[0].zero_grad()
        record.gradients(backward(self.fooling))
        optimize_g.step()


class GanKeepsGradients(Gan):
    """D's loss also flows into G (nothing is detached), and zero_grad comes at the end, of the stepped model only."""

    def on_fake(self, batch: Any) -> Any:
        out = self.discriminator(self.generator(batch[1]))
        return F.binary_cross_entropy_with_logits(out, torch.zeros_like(out))

    def body(self, backward: Backward, record: Recorder) -> None:
        optimize_g, optimize_d = self.optimizers
        record.gradients(backward(self.on_fake))
        optimize_d.step()
        optimize_d.zero_grad()
        record.gradients(backward(self.fooling))
        optimize_g.step()
        optimize_g.zero_grad()


class Critic(Task):
    """A gradient penalty: the loss holds a gradient with respect to the input."""

    def loss(self, batch: Any) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        out = self.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + 0.1 * ((slope.norm(dim=1) - 1) ** 2).mean()


class Branches(nn.Module):
    """Parameters of every kind of use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(8, 8)
        self.some_samples = nn.Linear(8, 8)
        self.some_steps = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4, bias=False)
        self.tied = nn.Linear(8, 4, bias=False)
        self.tied.weight = self.last.weight
        self.step_index = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.first(x)))
        odd = x[:, 0] > 1.5
        if bool(odd.any()):  # few samples: only some ranks come here
            h = torch.where(odd[:, None], h + self.some_samples(h), h)
        if self.step_index % 3 == 2:
            h = h + torch.tanh(self.some_steps(h))
        return self.last(h) + self.tied(torch.sin(h))


class Unused(Task):
    def make_model(self) -> nn.Module:
        return Branches()

    def body(self, backward: Backward, record: Recorder) -> None:
        self.models[0].step_index = self.step_index
        super().body(backward, record)


class Unfreezing(Task):
    """Parameters are frozen and let go in the middle of training, and the head is replaced by another one."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model[0].requires_grad_(False)
        return model

    def body(self, backward: Backward, record: Recorder) -> None:
        if self.step_index == 4:
            self.models[0][0].requires_grad_(True)
        if self.step_index == 8:
            self.models[0][2].bias.requires_grad_(False)
        super().body(backward, record)


class Checkpointed(Task):
    """Activation checkpointing with BatchNorm inside, whose statistics are then exchanged in the backward."""

    reentrant = False

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 16),
            nn.Tanh(),
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh()),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
            nn.Linear(16, 4),
        )

    def loss(self, batch: Any) -> Any:
        x, y = batch
        head, act, one, two, last = self.model
        h = act(head(x))
        for block in (one, two, two):  # the same block twice: several accumulations in one backward
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return F.cross_entropy(last(h), y)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Compiled(Task):
    """torch.compile around the prepared model."""

    backend = "aot_eager"
    num_steps = 6

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

    def place(self, models: Sequence[nn.Module]) -> None:
        torch._dynamo.reset()
        self.model = torch.compile(models[0], backend=self.backend)


class CompiledFirst(Compiled):
    """torch.compile before prepare."""

    def build(self) -> None:
        torch._dynamo.reset()
        super().build()
        self.models = [torch.compile(self.models[0], backend=self.backend)]

    def place(self, models: Sequence[nn.Module]) -> None:
        self.model = models[0]


class CompiledInductor(Compiled):
    backend = "inductor"
    num_steps = 4


class Inf(Clipped):
    """An infinite gradient in step 3, on the samples of one rank."""

    bad_steps = (3, 9)

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


TASKS: dict[str, type[Task]] = {
    task.__name__: task
    for task in globals().copy().values()
    if isinstance(task, type) and issubclass(task, Task)
}
