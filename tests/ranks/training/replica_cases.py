"""Models and uses of the prepared model in loss_fn, for the tests of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

REPLICAS = tuple({"device": "cpu", "name": f"replica {index}", "num_threads": 1} for index in range(3))
SHARES = (12, 7, 5)


def random_data(num: int = 24, steps: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num * steps, 6, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (num * steps,), generator=generator))


class Case:
    """A model and a loss function that uses it in some way."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Callable[[Any], Any]]) -> None:
        self.model = model.double()
        self.loss = loss(self.model)


class Remembering(nn.Module):
    """Sets attributes and replaces a buffer in forward, calls itself by a bound method and a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 16), nn.Linear(16, 3)
        self.layers = [self.first, self.last]
        self.act = self.squash
        self.register_buffer("calls", torch.zeros(()))
        self.penalty: Any = 0.0
        self.scale = 1.0

    def squash(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = (self.first.weight**2).sum() + (x**2).mean()
        return torch.tanh(x) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.layers[1](self.act(self.layers[0](x.flatten(1))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 3))


def _kept_parameters(model: nn.Module) -> Callable[[Any], Any]:
    kept, last, weight = list(model.parameters()), model[3], model[1].weight

    def loss(batch: Any) -> Any:
        x, y = batch
        by_hand = F.linear(torch.tanh(F.linear(x.flatten(1), weight, model[1].bias)), last.weight, last.bias)
        return F.cross_entropy(by_hand, y) + 1e-3 * sum((p**2).sum() for p in kept)

    return loss


def _asks_the_model(model: nn.Module) -> Callable[[Any], Any]:
    def loss(batch: Any) -> Any:
        x, y = batch
        names = [name for name, _ in model.named_parameters()]
        assert isinstance(model, nn.Sequential) and len(model) == 4 and names[0] == "1.weight" and model.training
        own = dict(model.named_parameters())
        hidden = model[:3](x)
        return F.cross_entropy(model[-1](hidden), y) + 1e-3 * own["1.weight"].abs().sum()

    return loss


def _remembered(model: nn.Module) -> Callable[[Any], Any]:
    def loss(batch: Any) -> Any:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 1e-3 * model.penalty

    return loss


def plain(model: nn.Module) -> Callable[[Any], Any]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


class Registered(nn.Module):
    """A class that keeps a list of those derived from it, and looks up what it hasn't in its body."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.known.append(cls.__name__)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("body"), name)


class Wrapping(Registered):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    @property
    def head(self) -> nn.Module:
        return self.body[3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body[:3](x)
        assert not hasattr(self, "nothing")
        return self.head(hidden)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 10, 2, batch_first=True), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(x)
        return self.last(out[:, -1])


class Checkpointed(nn.Module):
    """Dropout that is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 16), nn.Linear(16, 3)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.middle, torch.tanh(self.first(x.flatten(1))), use_reentrant=False))


def _shared() -> nn.Module:
    block = nn.Linear(16, 16)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), block, nn.Tanh(), block, nn.Linear(16, 3))


def _parametrized() -> nn.Module:
    model = mlp()
    parametrizations.weight_norm(model[1])
    return model


def _masked() -> nn.Module:
    model = mlp()
    mask = torch.rand(16, 48, generator=torch.Generator().manual_seed(2)) < 0.5
    model[1].weight.register_hook(lambda grad: grad * mask)
    return model


CASES: dict[str, Callable[[], Case]] = {
    "a hook on a parameter": lambda: Case(_masked(), plain),
    "kept parameters": lambda: Case(mlp(), _kept_parameters),
    "asks the model": lambda: Case(mlp(), _asks_the_model),
    "a registry": lambda: Case(Wrapping(), plain),
    "attributes": lambda: Case(Remembering(), _remembered),
    "lstm": lambda: Case(Recurrent(), plain),
    "shared module": lambda: Case(_shared(), plain),
    "parametrized": lambda: Case(_parametrized(), plain),
    "attention": lambda: Case(
        nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Flatten(), nn.Linear(48, 3)),
        plain,
    ),
}
DRAWING: dict[str, Callable[[], Case]] = {
    "dropout": lambda: Case(nn.Sequential(mlp()[0:3], nn.Dropout(0.3), nn.Linear(16, 3)), plain),
    "checkpointed dropout": lambda: Case(Checkpointed(), plain),
}
