"""Models and data of the GPU experiments; synthetic, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, -1, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width)
        x = x + self.drop(self.mix(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(
        self, vocab: int = 32000, width: int = 768, depth: int = 12, context: int = 512, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width, drop) for _ in range(depth))), nn.LayerNorm(width)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.norm(self.blocks(h)) @ self.tokens.weight.T


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or channels != out
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet50(width: int = 64, classes: int = 1000) -> nn.Module:
    def stage(channels: int, width: int, depth: int, stride: int) -> nn.Module:
        rest = (Bottleneck(4 * width, width, 1) for _ in range(depth - 1))
        return nn.Sequential(Bottleneck(channels, width, stride), *rest)

    return nn.Sequential(
        *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        stage(width, width, 3, 1),
        stage(4 * width, 2 * width, 4, 2),
        stage(8 * width, 4 * width, 6, 2),
        stage(16 * width, 8 * width, 3, 2),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32 * width, classes)),
    )


def small_cnn() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


def tiny_cnn() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 10))


class Images(Dataset[Any]):
    """Float images made cheaply, so that reading is not the bottleneck."""

    def __init__(self, num: int, size: int) -> None:
        self.num, self.pool = num, torch.randn(64, 3, size, size)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pool[index % 64], index % 10


class Tokens(Dataset[Any]):
    def __init__(self, num: int, context: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.num, self.context = num, context
        self.text = torch.randint(0, vocab, (num + context + 1,), generator=generator)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        crop = self.text[index : index + self.context + 1]
        return crop[:-1], crop[1:]


def random_images(num: int, size: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(num, 3, size, size), torch.randint(0, 10, (num,)))


@dataclass(frozen=True)
class Subject:
    """A model with its data and its usual batch."""

    build: Callable[[], nn.Module]
    data: Callable[[int], Dataset[Any]]
    """Number of samples → dataset."""
    batch: int


SUBJECTS = {
    "gpt": Subject(GPT, lambda num: Tokens(num, 512, 32000), 32),
    "gpts": Subject(lambda: GPT(256, 256, 4, 128), lambda num: Tokens(num, 128, 256), 64),
    "rn50": Subject(resnet50, lambda num: Images(num, 224), 128),
    "cnn": Subject(small_cnn, lambda num: random_images(num, 32), 128),
    "tiny": Subject(tiny_cnn, lambda num: random_images(num, 16), 16),
}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    output = model(x)
    return F.cross_entropy(output.flatten(0, 1), y.flatten()) if output.dim() == 3 else F.cross_entropy(output, y)
