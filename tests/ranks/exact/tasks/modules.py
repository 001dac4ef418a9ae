"""Tasks in which a model, or autograd, is used in uncommon ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.ranks.exact.tasks.base import Backward, Recorder, Task


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


class WrappedFirst(Checkpointed):
    """Modules wrapped for checkpointing before prepare, as torchtitan and FSDP users do."""

    def build(self) -> None:
        super().build()
        self.wrap()

    def wrap(self) -> None:
        model = self.models[0]
        for index in (2, 3):
            model[index] = checkpoint_wrapper(model[index])

    def loss(self, batch: Any) -> Any:
        return Task.loss(self, batch)


class WrappedAfter(WrappedFirst):
    """The same after prepare."""

    def build(self) -> None:
        Checkpointed.build(self)

    def place(self, models: Sequence[nn.Module]) -> None:
        super().place(models)
        self.wrap()


class Deepening(Task):
    """One more pass through a re-entrant checkpoint every third step: gradients accumulate more and more often."""

    num_steps = 8

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))

    def loss(self, batch: Any) -> Any:
        x, y = batch
        first, block, last = self.model
        h = first(x)
        for _ in range(1 + self.step_index // 3):
            h = checkpoint(block, h, use_reentrant=True)
        return F.cross_entropy(last(h), y)


class MixtureOfExperts(nn.Module):
    """Each sample goes through one of four experts; with few samples, a rank leaves experts unused."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh()) for _ in range(5))
        self.last = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(1)
        chosen = 2 * (x[:, 1] > 0).long() + (x[:, 2] > 0).long()
        h = x.new_zeros(len(x), 12)
        for index in chosen.unique().tolist():
            at = (chosen == index).nonzero().squeeze(1)
            h = h.index_add(0, at, self.experts[index](x[at]) * gates[at, index, None])
        return self.last(h)


class Experts(Task):
    num_steps = 8

    def make_model(self) -> nn.Module:
        return MixtureOfExperts()


class Compiled(Task):
    """torch.compile around the prepared model."""

    backend = "aot_eager"
    num_steps = 6

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

    def place(self, models: Sequence[nn.Module]) -> None:
        torch._dynamo.reset()
        self.model = torch.compile(models[0], backend=self.backend)


class Uncompiled(Compiled):
    def place(self, models: Sequence[nn.Module]) -> None:
        self.model = models[0]


class UncompiledShort(Uncompiled):
    num_steps = 4


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
