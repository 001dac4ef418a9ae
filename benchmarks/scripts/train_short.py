"""Scripts with steps of 0.05 to 5 ms, each with its own model, data and loop; ``benchmarks phantom`` runs them on equal ranks."""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import evenload

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import small_cnn

SAMPLES = 4096
Loss = Callable[[Any, Any], Any]


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy of classes, or the squared error of numbers."""
    x, y = batch
    out = model(x)
    return F.mse_loss(out.squeeze(-1), y) if y.is_floating_point() else F.cross_entropy(out, y)


@dataclass
class Script:
    """One script: what differs from a plain loop."""

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    batch_size: int = 64
    loss: Loss = plain_loss
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()


def mlp(*widths: int, norm: bool = False, dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = []
    for left, right in itertools.pairwise(widths[:-1]):
        layers += [nn.Linear(left, right), *((nn.BatchNorm1d(right),) if norm else ()), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def table(width: int = 16, classes: int = 10) -> TensorDataset:
    x = torch.randn(SAMPLES, width)
    return TensorDataset(x, x[:, :classes].argmax(1) if classes else x.sum(1))


def pictures(size: int, channels: int = 1) -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, channels, size, size), torch.randint(0, 10, (SAMPLES,)))


class Words(Dataset[Any]):
    """Sentences of 4 to 24 words."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return (torch.arange(4 + index % 21) * (index + 7)) % 500 + 1, index % 10


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(SAMPLES):
            x = torch.randn(16, generator=generator)
            yield x, x[:10].argmax()


def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), torch.tensor(labels)


class MeanOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(501, 32, padding_idx=0), nn.Linear(32, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        counts = (tokens > 0).sum(1, keepdim=True)
        return self.head(self.words(tokens).sum(1) / counts)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(501, width), kind(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.words(tokens))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(501, 32), nn.Linear(32, 10)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(tokens)).mean(1))


class Ratings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(2000, 16), nn.Embedding(1000, 16)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        return (self.users(pair[:, 0]) * self.films(pair[:, 1])).sum(1)


def ratings() -> TensorDataset:
    return TensorDataset(
        torch.stack([torch.randint(0, 2000, (SAMPLES,)), torch.randint(0, 1000, (SAMPLES,))], 1), torch.randn(SAMPLES)
    )


class Pair(nn.Module):
    """A teacher or generator beside what is trained with it."""

    def __init__(self, one: nn.Module, other: nn.Module, *, frozen: bool = False) -> None:
        super().__init__()
        self.one, self.other = one, other.requires_grad_(not frozen)


def distil(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        goal = model.other(batch[0]).softmax(1)
    return F.cross_entropy(model.one(batch[0]), goal)


def rebuild(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[0])


def critic_loss(model: Any, batch: Any) -> torch.Tensor:
    drawn = model.other(torch.randn_like(batch[0])).detach()
    return F.softplus(-model.one(batch[0])).mean() + F.softplus(model.one(drawn)).mean()


def drawing_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.softplus(-model.one(model.other(torch.randn_like(batch[0])))).mean()


def similarity(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(left, dim=1) @ F.normalize(right, dim=1).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


sgd = torch.optim.SGD
SCRIPTS: dict[str, Script] = {
    "logistic": Script(lambda: nn.Linear(16, 10), table, optimizer=sgd),
    "regression": Script(lambda: nn.Linear(64, 1), lambda: table(64, 0), 512, optimizer=sgd),
    "mlp": Script(lambda: mlp(16, 64, 10), table, 100),
    "mlp of 16": Script(lambda: mlp(16, 64, 64, 10), table, 16),
    "wide mlp": Script(lambda: mlp(64, 512, 512, 10), lambda: table(64), 128),
    "batch norm": Script(lambda: mlp(16, 64, 64, 10, norm=True), table),
    "dropout, clipping, schedule": Script(
        lambda: mlp(16, 128, 128, 10, dropout=0.1), table, 128, extras=("clip", "schedule", "log")
    ),
    "two workers": Script(lambda: mlp(16, 256, 10), table, loader={"num_workers": 2}),
    "bf16": Script(lambda: mlp(16, 256, 256, 10), table, settings={"precision": "bf16"}),
    "stream": Script(lambda: mlp(16, 256, 10), Endless),
    "validation, checkpoints": Script(lambda: mlp(16, 128, 10), table, extras=("validate", "checkpoint", "log")),
    "average, a log of rank 0": Script(lambda: mlp(16, 256, 10), table, extras=("average", "file")),
    "bag of words": Script(MeanOfWords, Words, loader={"collate_fn": padded}),
    "lstm": Script(lambda: Recurrent(nn.LSTM, 32), Words, loader={"collate_fn": padded}),
    "gru": Script(lambda: Recurrent(nn.GRU, 16), Words, 32, loader={"collate_fn": padded}, extras=("clip",)),
    "transformer": Script(Encoder, Words, 32, loader={"collate_fn": padded}, extras=("schedule",)),
    "pictures of 8 x 8": Script(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)), lambda: pictures(8)
    ),
    "pictures of 16 x 16": Script(small_cnn, lambda: pictures(16, 3), 48),
    "factors": Script(Ratings, ratings, 256),
    "autoencoder": Script(lambda: mlp(64, 128, 16, 128, 64), lambda: table(64), 128, rebuild),
    "distillation": Script(
        lambda: Pair(mlp(16, 32, 10), mlp(16, 512, 512, 10).eval(), frozen=True), table, 128, distil
    ),
    "gan": Script(lambda: Pair(mlp(16, 64, 1), mlp(16, 64, 16)), table, 64, critic_loss, extras=("second",)),
    "contrastive": Script(lambda: mlp(16, 128, 32), table, 96, extras=("coupled",)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(SCRIPTS))
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    script, steps = SCRIPTS[args.name], args.steps

    run = evenload.init(**script.settings)
    torch.manual_seed(0)
    data = script.data()
    is_stream = isinstance(data, IterableDataset)
    model, loader = run.prepare(
        script.model(), DataLoader(data, script.batch_size, shuffle=None if is_stream else True, **script.loader)
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = script.optimizer(trained, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    average = torch.optim.swa_utils.AveragedModel(model)
    run.resume(model=model, optimizer=optimizer, schedule=schedule, average=average)
    val_loader = DataLoader(TensorDataset(torch.randn(500, 16), torch.randint(0, 10, (500,))), batch_size=100)
    extras = script.extras
    log = Path(os.devnull).open("w") if "file" in extras and run.is_main else None  # noqa: SIM115

    epoch = loader.epoch
    while epoch * (SAMPLES // script.batch_size) < steps:
        for step in loader:
            if "coupled" in extras:
                loss = step.backward(lambda batch: (model(batch[0]), model(batch[0] * 1.1)), batch_loss=similarity)
            else:
                loss = step.backward(lambda batch: script.loss(model, batch))
            if "clip" in extras:
                nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if "second" in extras:
                step.backward(lambda batch: drawing_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if "schedule" in extras:
                schedule.step()
            if "average" in extras:
                average.update_parameters(model)
            if "log" in extras:
                run.log({"loss": loss})
            if log is not None:
                print(step.index, loss.item(), *(p.norm().item() for p in trained), file=log)
            if "checkpoint" in extras:
                run.checkpoint(every=200)
        if "validate" in extras:
            with torch.no_grad():
                right = sum((model(x).argmax(1) == y).sum().item() for x, y in run.batches(val_loader))
            run.log({"right": run.reduce(right) / 500})
        epoch += 1


if __name__ == "__main__":
    main()
