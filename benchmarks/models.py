"""The models that are measured, and their data; the same for Evenload and for its peers (no Evenload in here)."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks.gpu.models import random_images, resnet50

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"


@dataclass(frozen=True)
class Size:
    """One model with its global batch; `arguments` are those of the script that trains it under Evenload."""

    model: str
    batch_size: int
    context: int = 0
    width: int = 0
    depth: int = 0

    @property
    def arguments(self) -> list[str]:
        """For the script."""
        if self.model != "gpt":
            return ["--batch-size", str(self.batch_size)]
        return [
            *("--batch-size", str(self.batch_size), "--context", str(self.context)),
            *("--width", str(self.width), "--depth", str(self.depth), "--sample-bytes", "1"),
        ]


GPT = Size("gpt", 90, 128, 192, 4)
"""The example's own size: steps of about a second on two CPU cores."""
CNN = Size("cnn", 270)
"""Steps of about 25 ms on two CPU cores."""
NORMED_CNN = Size("normed_cnn", 270)
"""The small CNN with two BatchNorms: steps of about 30 ms on two CPU cores."""
RESNET50 = Size("resnet50", 32)
"""On images of 64 x 64: steps of about half a second on two CPU cores, and 53 BatchNorms."""
TINY_RESNET = Size("tiny_resnet", 8)
CHANGING = Size("gpt", 192, 64, 128, 3)
"""Steps of about 0.4 s on two CPU cores, and enough samples that a share can be cut finely."""
TINY_GPT = Size("gpt", 12, 16, 32, 1)
BERT = Size("bert", 64, 64, 256, 4)
"""As Hugging Face's: 4.3 million parameters, steps of about half a second on two CPU cores."""
_VOCABULARY = 4096
SHORT = Size("cnn", 54)
"""Steps of about 5 ms on a core and a half."""
SHORT_MLP = Size("mlp", 96)
"""The same."""
UNEVEN = {"bert": BERT, "cnn": CNN, "short_cnn": SHORT, "short_mlp": SHORT_MLP}
"""Those of ``benchmarks uneven`` and ``benchmarks phantom``."""
MANY = Size("many", 32)
"""800 parameters of 100 elements: steps of about 15 ms on two CPU cores."""
ONE_MS = Size("cnn", 6)
"""Steps of about 1 ms on one CPU core."""


def build(size: Size) -> tuple[nn.Module, Dataset[Any]]:
    """The model with fresh weights, and enough data."""
    if size.model == "cnn":
        return small_cnn(), images()
    if size.model == "bert":
        return SentenceClassifier(size), sentences(size)
    if size.model == "mlp":
        layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(*layers), TensorDataset(torch.randn(24_000, 256), torch.randint(0, 10, (24_000,)))
    if size.model == "many":
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(24_000, 10, generator=generator), torch.randint(0, 10, (24_000,), generator=generator)
        return ManyLayers(), TensorDataset(x, y)
    if size.model == "normed_cnn":
        return small_cnn(normed=True), images()
    if size.model == "resnet50":
        return resnet50(), random_images(512, 64)
    if size.model == "tiny_resnet":
        return resnet50(width=4), random_images(64, 32)
    classes = example_classes()
    text = torch.randint(0, 256, (1_000_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return classes.GPT(size.width, size.depth, size.context), classes.Crops(text, 100_000, size.context)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean loss of a batch, for all models."""
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) if logits.dim() == 3 else F.cross_entropy(logits, y)


class SentenceClassifier(nn.Module):
    """Hugging Face's BERT with a line on its pooled output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(
            BertConfig(
                vocab_size=_VOCABULARY,
                hidden_size=size.width,
                num_hidden_layers=size.depth,
                num_attention_heads=size.width // 64,
                intermediate_size=4 * size.width,
                max_position_embeddings=size.context,
            )
        )
        self.head = nn.Linear(size.width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.bert(tokens).pooler_output)
        return logits


def sentences(size: Size) -> Dataset[Any]:
    """Random ones: only their cost matters here."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randint(0, _VOCABULARY, (8_000, size.context), generator=generator),
        torch.randint(0, 10, (8_000,), generator=generator),
    )


def small_cnn(*, normed: bool = False) -> nn.Module:
    """Three convolutions and a line: 54,000 parameters on 16 x 16 images; `normed`: BatchNorm after two of them."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=not normed),
        *((nn.BatchNorm2d(24),) if normed else ()),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1, bias=not normed),
        *((nn.BatchNorm2d(48),) if normed else ()),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(48, 96, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


class ManyLayers(nn.Module):
    """800 layers of 10 x 10 weights each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(800))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


def images() -> Dataset[Any]:
    """Random ones: only their cost matters here."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(24_000, 3, 16, 16, generator=generator), torch.randint(0, 10, (24_000,), generator=generator)
    )


def example_classes() -> Any:
    """The classes of the example, which is a script: its definitions without what it runs."""
    tree = ast.parse(EXAMPLE.read_text())
    wanted = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.ImportFrom | ast.Import)
        and not any(alias.name == "evenload" for alias in getattr(node, "names", ()))
    ]
    module = ModuleType("train_gpt_classes")
    exec(compile(ast.Module(wanted, []), str(EXAMPLE), "exec"), module.__dict__)
    return module
