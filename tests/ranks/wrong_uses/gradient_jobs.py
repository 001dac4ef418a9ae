"""One training script, run twice: by plain PyTorch in one process, and by Evenload on ranks with unequal shares."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import EvenloadError
from evenload.training.parallel import buckets

SHARES = (13, 3)
BOUND = 1e-12
BATCH = sum(SHARES)
NUM_STEPS = 3
BUCKET_BYTES = 200
"""Small, so that some buckets have left when others are still computed."""
SMALL_BYTES = 100
"""So that there are gradients of both kinds: those that accumulate in their bucket, and those that are moved there."""

Script = Callable[["Job"], Any]
"""Trains, and returns tensors that must be those of one process."""


def dataset() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * NUM_STEPS, 6, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.tanh(x.sum(1, keepdim=True)))


class Job:
    """What a script trains with: the part that is the same in both runs."""

    on_ranks = False
    rank = 0
    run: Any = None
    model: Any
    bare: tuple[nn.Module, ...] = ()

    def network(self, *more: nn.Module) -> nn.Module:
        """A small network, with initial weights of the rank's own: those of rank 0 must count."""
        torch.manual_seed(3 + self.rank)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def prepare(self, *models: nn.Module) -> Any:
        self.bare, self.model = models, models[0]
        return models[0] if len(models) == 1 else models

    def steps(self, num_steps: int = 2 * NUM_STEPS) -> Iterator[Any]:
        raise NotImplementedError

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return functional.mse_loss(self.model(x), y)

    def optimizer(self, parameters: Any = None, **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.model.parameters() if parameters is None else parameters, **{"lr": 0.05, "momentum": 0.9, **settings}
        )

    def train(self, loss_fn: Any = None, **settings: Any) -> list[torch.Tensor]:
        """The plain loop."""
        optimizer = self.optimizer(**settings)
        losses = []
        for step in self.steps():
            losses.append(step.backward(loss_fn or self.loss))
            optimizer.step()
            optimizer.zero_grad()
        return [*self.weights(), *losses]

    def train_by(
        self, update: Callable[[torch.optim.Optimizer, Any], object], loss_fn: Any = None
    ) -> list[torch.Tensor]:
        """The loop with an update of the script's own: it is called when the gradients are there."""
        if not self.bare:
            self.prepare(self.network())
        optimizer = self.optimizer()
        for step in self.steps():
            step.backward(loss_fn or self.loss)
            update(optimizer, step)
            optimizer.zero_grad()
        return self.weights()

    def weights(self) -> list[torch.Tensor]:
        return [tensor for model in self.bare for tensor in (*model.parameters(), *model.buffers())]


class PlainStep:
    def __init__(self, index: int, batch: Any) -> None:
        self.index = index
        self.batch = batch

    def backward(self, loss_fn: Any) -> torch.Tensor:
        loss = loss_fn(self.batch)
        loss.backward()
        return loss.detach()


class PlainJob(Job):
    """One process, without Evenload."""

    def steps(self, num_steps: int = 2 * NUM_STEPS) -> Iterator[PlainStep]:
        batches = list(DataLoader(dataset(), batch_size=BATCH))
        for index in range(num_steps):
            yield PlainStep(index, [part.clone() for part in batches[index % NUM_STEPS]])


class RankJob(Job):
    """One of the ranks."""

    on_ranks = True

    def __init__(self, run: Any) -> None:
        self.run = run
        self.rank = run.rank
        self.loader: Any = None

    def prepare(self, *models: nn.Module) -> Any:
        super().prepare(*models)
        *prepared, self.loader = self.run.prepare(*models, DataLoader(dataset(), batch_size=BATCH))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def steps(self, num_steps: int = 2 * NUM_STEPS) -> Iterator[Any]:
        while True:
            for step in self.loader:
                yield step
                if step.index + 1 == num_steps:
                    return


def scripts_of(module: ModuleType) -> list[Script]:
    """Return the scripts of a module."""
    own = (
        value
        for value in vars(module).values()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    )
    return [value for value in own if not (isinstance(value, type) or value.__name__.startswith("_"))]


def in_one_process(script: Script) -> torch.Tensor:
    return _flat(script(PlainJob()))


def check_exact(script: Script, outcomes: Sequence[torch.Tensor | str]) -> None:
    """Fail if the values of a rank are not those of one process, to `BOUND`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = in_one_process(script)
    finally:
        torch.set_num_threads(threads)
    for rank, values in enumerate(outcomes):
        assert not isinstance(values, str), f"rank {rank}: {values}"
        assert values.shape == expected.shape
        found = float((values - expected).norm() / expected.norm())
        assert found <= BOUND, f"rank {rank} differs from one process by {found:.1e}"


def on_ranks(scripts: list[tuple[str, Script, dict[str, Any]]], folder: str) -> list[torch.Tensor | str]:
    """Runs on each rank: the values that each script returns, or the text of its error."""
    torch.set_num_threads(1)
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = BUCKET_BYTES
    buckets.SMALL_BYTES = SMALL_BYTES
    return [_outcome(script, f"{folder}/{name}", settings) for name, script, settings in scripts]


def _outcome(script: Script, folder: str, settings: dict[str, Any]) -> torch.Tensor | str:
    run = evenload.init(
        project_dir=folder.replace(" ", "-"), **{"seed": 0, "balance": SHARES, "timeout_s": 10.0, **settings}
    )
    try:
        values = _flat(script(RankJob(run)))
        run.close()
    except Exception as error:
        # Closed while the error is being handled, a run waits for nobody.
        with contextlib.suppress(EvenloadError):
            run.close()
        # What torch itself refuses is refused; the traceback is for an error that no test expects.
        where = "" if isinstance(error, EvenloadError) else f"\n{traceback.format_exc()}"
        return f"{type(error).__name__}: {error}{where}"
    return values


def _flat(values: Any) -> torch.Tensor:
    return torch.cat([torch.as_tensor(value).detach().double().flatten() for value in values])
