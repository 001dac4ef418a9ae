"""State that a script keeps from batch to batch, as papers' code does: each function trains a few steps.

`OF_THE_CALLS`: loss_fn changes it from the samples it receives. `OF_THE_WHOLE_BATCH`: the loop body changes it from what
batch_loss received. `NO_STATE`: what only looks like state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

DIM, OUT, NUM_SAMPLES, BATCH, NUM_STEPS = 6, 5, 64, 16, 4
Train = Callable[["Trainer"], list[torch.Tensor]]


class Trainer:
    """One process of plain PyTorch; with a run of Evenload one of its ranks."""

    def __init__(self, run: Any = None) -> None:
        self.run = run

    def fit(
        self, model: nn.Module, loss_fn: Any, *, batch_loss: Any = None, after: Any = None, num_calls: int = 1
    ) -> list[torch.Tensor]:
        """Train, with `num_calls` backwards in each step; return the weights, buffers and losses."""
        loader: Any = DataLoader(_dataset(), batch_size=BATCH)
        if self.run is not None:
            model, loader = self.run.prepare(model, loader)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for step in loader:
            for _ in range(num_calls):
                if self.run is not None:
                    losses.append(step.backward(loss_fn, batch_loss=batch_loss))
                    continue
                loss = loss_fn([part.clone() for part in step])
                if batch_loss is not None:
                    loss = batch_loss(*loss)
                loss.backward()
                losses.append(loss.detach())
            if after is not None:
                after()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters(), *model.buffers(), *losses]


def _dataset() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, DIM, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, OUT, (NUM_SAMPLES,), generator=g), torch.arange(NUM_SAMPLES))


def _network(num_out: int = OUT, num_in: int = DIM) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(num_in, 8), nn.Tanh(), nn.Linear(8, num_out)).double()


class _CentredLoss(nn.Module):
    """DINO's: the centre of the targets follows each batch."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, OUT, dtype=torch.float64))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        p = F.softmax((target - self.center) / 0.1, -1).detach()
        return -(p * F.log_softmax(out, -1)).sum(-1).mean()

    def follow(self, target: torch.Tensor) -> None:
        self.center = 0.7 * self.center + 0.3 * target.detach().mean(0, keepdim=True)


class _Codebook(nn.Module):
    """VQ-VAE's: averages of what is assigned to each code."""

    book: torch.Tensor
    sums: torch.Tensor
    sizes: torch.Tensor

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.encoder, self.decoder = _network(3), _network(DIM, 3)
        book = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        for name, value in (("book", book), ("sums", book.clone()), ("sizes", torch.ones(4, dtype=torch.float64))):
            self.register_buffer(name, value, persistent=persistent)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = self.encoder(x)
        index = torch.cdist(z, self.book).argmin(1)
        code = self.book[index]
        out = self.decoder(z + (code - z).detach())
        return (out - x).square().mean(1) + 0.25 * (z - code.detach()).square().mean(1), z.detach(), index

    @torch.no_grad()
    def follow(self, z: torch.Tensor, index: torch.Tensor) -> None:
        one = F.one_hot(index, 4).double()
        self.sizes.mul_(0.8).add_(0.2 * one.sum(0))
        self.sums.mul_(0.8).add_(0.2 * one.T @ z)
        self.book.copy_(self.sums / self.sizes[:, None].clamp(min=0.1))


def _contrast(q: torch.Tensor, k: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def _queue() -> torch.Tensor:
    return F.normalize(torch.randn(24, OUT, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=1)


# -- of the calls ------------------------------------------------------------------------------------------------------


def centre_in_a_loss(trainer: Trainer) -> list[torch.Tensor]:
    model, loss = _network(), _CentredLoss()

    def loss_fn(batch: Any) -> torch.Tensor:
        found = loss(model(batch[0]), batch[0][:, :OUT])
        loss.follow(batch[0][:, :OUT])
        return found  # type: ignore[no-any-return]

    return trainer.fit(model, loss_fn)


def queue_of_keys(trainer: Trainer) -> list[torch.Tensor]:
    model, queue = _network(), _queue()
    momentum = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(batch: Any) -> torch.Tensor:
        nonlocal queue
        k = F.normalize(momentum(batch[0] + 0.1), dim=1)
        found = _contrast(F.normalize(model(batch[0]), dim=1), k, queue)
        queue = torch.cat([queue[len(k) :], k])
        return found

    return trainer.fit(model, loss_fn)


def memory_of_samples(trainer: Trainer) -> list[torch.Tensor]:
    """ELR's targets: an average of what was predicted for each sample."""
    model, memory = _network(), torch.zeros(NUM_SAMPLES, OUT, dtype=torch.float64)

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y, index = batch
        out = model(x)
        p = out.softmax(1).clamp(1e-4, 1 - 1e-4)
        memory[index] = 0.7 * memory[index] + 0.3 * p.detach()
        return F.cross_entropy(out, y) + 3 * (1 - (memory[index] * p).sum(1)).log().mean()

    return trainer.fit(model, loss_fn)


def average_of_the_loss(trainer: Trainer) -> list[torch.Tensor]:
    model, average = _network(), 1.0

    def loss_fn(batch: Any) -> torch.Tensor:
        nonlocal average
        loss = F.cross_entropy(model(batch[0]), batch[1])
        average = 0.9 * average + 0.1 * loss.item()
        return loss / average

    return trainer.fit(model, loss_fn)


def counter_of_calls(trainer: Trainer) -> list[torch.Tensor]:
    model, calls = _network(), 0

    def loss_fn(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + min(1.0, calls / 10) * out.square().mean()

    return trainer.fit(model, loss_fn)


def codebook(trainer: Trainer, *, persistent: bool = True) -> list[torch.Tensor]:
    model = _Codebook(persistent)

    def loss_fn(batch: Any) -> torch.Tensor:
        losses, z, index = model(batch[0])
        model.follow(z, index)
        return losses.mean()  # type: ignore[no-any-return]

    return trainer.fit(model, loss_fn)


def codebook_that_is_not_persistent(trainer: Trainer) -> list[torch.Tensor]:
    return codebook(trainer, persistent=False)


OF_THE_CALLS: tuple[Train, ...] = (
    centre_in_a_loss,
    queue_of_keys,
    memory_of_samples,
    average_of_the_loss,
    counter_of_calls,
    codebook,
    codebook_that_is_not_persistent,
)


# -- of the whole batch ------------------------------------------------------------------------------------------------


def centre_after_the_step(trainer: Trainer) -> list[torch.Tensor]:
    model, loss, seen = _network(), _CentredLoss(), {}

    def batch_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen["target"] = target
        return loss(out, target)  # type: ignore[no-any-return]

    found = trainer.fit(
        model,
        lambda batch: (model(batch[0]), batch[0][:, :OUT]),
        batch_loss=batch_loss,
        after=lambda: loss.follow(seen["target"]),
    )
    return [*found, loss.center]


def queue_after_the_step(trainer: Trainer) -> list[torch.Tensor]:
    model, queue, seen = _network(), _queue(), {}
    momentum = copy.deepcopy(model).requires_grad_(False)

    def batch_loss(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen["k"] = k.detach()
        return _contrast(q, k, queue)

    def after() -> None:
        nonlocal queue
        queue = torch.cat([queue[len(seen["k"]) :], seen["k"]])
        with torch.no_grad():
            for ours, theirs in zip(momentum.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)

    def encode(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(model(batch[0]), dim=1), F.normalize(momentum(batch[0] + 0.1), dim=1)

    return [*trainer.fit(model, encode, batch_loss=batch_loss, after=after), queue, *momentum.parameters()]


def codebook_after_the_step(trainer: Trainer) -> list[torch.Tensor]:
    """Each sample's loss is computed where it is encoded; the batch's only changes the codes."""
    model, seen = _Codebook(), {}

    def batch_loss(losses: torch.Tensor, z: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        seen["z"] = (z.detach(), index)
        return losses.mean()

    return trainer.fit(
        model, lambda batch: model(batch[0]), batch_loss=batch_loss, after=lambda: model.follow(*seen["z"])
    )


OF_THE_WHOLE_BATCH: tuple[Train, ...] = (centre_after_the_step, queue_after_the_step, codebook_after_the_step)


# -- no state ----------------------------------------------------------------------------------------------------------


def caches_and_logs(trainer: Trainer) -> list[torch.Tensor]:
    model, logged, cache = _network(), [], {}

    def loss_fn(batch: Any) -> torch.Tensor:
        out = model(batch[0])
        logged.append(out.detach().mean())
        return F.cross_entropy(out + cache.setdefault(len(out), torch.zeros(1)), batch[1])

    return trainer.fit(model, loss_fn)


def spectral_norms(trainer: Trainer) -> list[torch.Tensor]:
    """Its buffers change in each forward, but from the weights alone."""
    model = _network()
    model[0] = spectral_norm(model[0])  # type: ignore[index, operator]
    return trainer.fit(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))


def batch_changed_in_place(trainer: Trainer) -> list[torch.Tensor]:
    """Each of two backwards in a step receives the batch as it was read."""
    model = _network()
    return trainer.fit(model, lambda batch: F.cross_entropy(model(batch[0].mul_(1.5).add_(0.1)), batch[1]), num_calls=2)


class _Watched(nn.Module):
    """Keeps its last output for a plot, in a buffer that is no part of the state."""

    last_out: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = _network()
        self.register_buffer("last_out", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        self.last_out = out.detach()
        return out


def output_kept_for_a_plot(trainer: Trainer) -> list[torch.Tensor]:
    model = _Watched()
    return trainer.fit(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))[: len([*model.parameters()])]


NO_STATE: tuple[Train, ...] = (caches_and_logs, spectral_norms, batch_changed_in_place, output_kept_for_a_plot)
