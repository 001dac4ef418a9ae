"""Models of every build, with an input each: what a cut has to get along with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def chain() -> nn.Module:
    """Nested Sequentials with layers without weights."""
    return nn.Sequential(
        nn.Identity(),
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)),
        nn.Linear(16, 4),
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.mlp(self.norm(x))
        return x + (y if scale is None else y * scale)


class Gpt(nn.Module):
    """The embedding's weight is the last layer, used by name; so is the table of places."""

    def __init__(self, width: int = 16, depth: int = 5) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(32, width), nn.Embedding(12, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.byte(x) + self.place.weight[: x.shape[1]]
        return self.norm(self.blocks(x)) @ self.byte.weight.T


class Body(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.drop = nn.Dropout(0.0)
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        h = self.drop(self.wte(ids))
        states = [h]
        for block in self.h:
            h = block(h, scale=mask)
            states.append(h)
        return {"last": self.ln_f(h), "states": tuple(states)}


class HeadedLikeHuggingFace(nn.Module):
    """A body in a module of its own, a head tied to the embedding, everything by keyword, a loss inside."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.transformer = Body(width, depth)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.transformer.wte.weight

    def forward(self, *, input_ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        out = self.transformer(input_ids, mask=mask)
        logits = self.head(out["last"])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits, **out}


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.down = (
            nn.Sequential(nn.Conv2d(channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
            if stride > 1
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)) + (self.down(x) if self.down is not None else x))


class Residuals(nn.Module):
    """Stages of blocks, as ResNets have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.layer1 = nn.Sequential(Residual(6), Residual(6))
        self.layer2 = nn.Sequential(Residual(6, 2), Residual(6))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.pool(self.layer2(self.layer1(x))).flatten(1))


class Ladder(nn.Module):
    """Down and up again with skips, in ModuleLists: no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv1d(8, 4, 3, padding=1) for _ in range(3))
        self.register_buffer("shift", torch.linspace(0, 1, 4)[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.relu(layer(torch.cat([x, skips.pop()], dim=1)))
        x = 2 * x
        x += self.shift  # in place, with something of the model's own
        return x


class Tokens(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(6, 8)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.where = nn.ParameterList([nn.Parameter(torch.randn(1, 6, 8))])
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 3, enable_nested_tensor=False
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first.expand(len(x), -1, -1), self.patch(x)], dim=1) + self.where[0]
        return self.encoder(x)[:, 0] * self.scale


class Recurrent(nn.Module):
    """Packed sequences between the layers, lengths that stay on the CPU, a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        packed = pack_padded_sequence(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
        out, (h, c) = self.lstm(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(padded), [h, c]


class SharedScale(nn.Module):
    """A small parameter that all blocks share: no reason to keep them together."""

    class Scaled(nn.Module):
        def __init__(self, gain: nn.Parameter) -> None:
            super().__init__()
            self.linear, self.gain = nn.Linear(8, 8), gain
            self.mix = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mix(self.linear(x) * self.gain)

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.parts = nn.ModuleDict({name: self.Scaled(self.gain) for name in "abcd"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


class Backwards(nn.Module):
    """Registered in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@dataclass(frozen=True)
class Case:
    """A model and the arguments of a call."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]

    def call(self, model: nn.Module, inputs: Any) -> Any:
        """As `place` reads its example."""
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _ids() -> torch.Tensor:
    return torch.randint(0, 32, (3, 7))


CASES = {
    "chain": Case(chain, lambda: torch.randn(5, 8)),
    "gpt": Case(Gpt, _ids),
    "headed": Case(HeadedLikeHuggingFace, lambda: {"input_ids": _ids(), "mask": torch.rand(3, 7, 1), "labels": _ids()}),
    "residuals": Case(Residuals, lambda: torch.randn(4, 3, 9, 9)),
    "ladder": Case(Ladder, lambda: torch.randn(2, 4, 6)),
    "tokens": Case(Tokens, lambda: torch.randn(2, 5, 6)),
    "recurrent": Case(Recurrent, lambda: (_ids(), torch.tensor([7, 3, 5]))),
    "shared": Case(SharedScale, lambda: torch.randn(3, 8)),
    "backwards": Case(Backwards, lambda: torch.randn(3, 6)),
}
