"""A loss that depends on how far collate_fn pads is named in the first step; one that ignores the padding is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

import evenload
from evenload.testing import run_ranks

NUM_WORDS, MASK, NUM_SAMPLES, BATCH = 20, 20, 32, 16
Batch = tuple[torch.Tensor, torch.Tensor]


def _sentences() -> list[tuple[torch.Tensor, int]]:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 12, (NUM_SAMPLES,), generator=g).tolist()
    return [(torch.randint(1, NUM_WORDS, (length,), generator=g), index % 3) for index, length in enumerate(lengths)]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS + 1, 8)
        self.rnn = nn.GRU(8, 8, bidirectional=True, batch_first=True)
        self.head, self.word = nn.Linear(16, 3), nn.Linear(8, NUM_WORDS)


def _in_order(samples: list[Any]) -> Batch:
    return pad_sequence([words for words, _ in samples], True), torch.tensor([label for _, label in samples])


def _from_the_left(samples: list[Any]) -> Batch:
    words = pad_sequence([words for words, _ in samples], True, padding_side="left")
    return words, torch.tensor([label for _, label in samples])


def _sorted(samples: list[Any]) -> Batch:
    """The chatbot tutorial's: the longest first, for pack_padded_sequence."""
    return _in_order(sorted(samples, key=lambda sample: len(sample[0]), reverse=True))


def _masked(samples: list[Any]) -> Batch:
    """A data collator's for masked language models: draws which words are masked."""
    words, _ = _in_order(samples)
    chosen = (torch.rand(words.shape) < 0.4) & (words > 0)
    chosen[:, 0] = True
    return words.masked_fill(chosen, MASK), words.masked_fill(~chosen, -100)


def _whole_rnn(model: Network, batch: Batch) -> torch.Tensor:
    out, _ = model.rnn(model.words(batch[0]))
    return F.cross_entropy(model.head(out.mean(1)), batch[1])


def _packed_rnn(model: Network, batch: Batch) -> torch.Tensor:
    lengths = (batch[0] > 0).sum(1)
    packed = pack_padded_sequence(model.words(batch[0]), lengths, batch_first=True, enforce_sorted=False)
    _, last = model.rnn(packed)
    return F.cross_entropy(model.head(torch.cat([last[0], last[1]], 1)), batch[1])


def _masked_words(model: Network, batch: Batch) -> tuple[torch.Tensor, int]:
    words, labels = batch
    out = model.word(model.words(words))
    return F.cross_entropy(out.flatten(0, 1), labels.flatten()), int((labels != -100).sum())


SCRIPTS: dict[str, tuple[Any, Callable[..., Any], bool]] = {
    "padded": (_in_order, _whole_rnn, True),
    "padded from the left": (_from_the_left, _whole_rnn, True),
    "packed": (_in_order, _packed_rnn, False),
    "sorted and packed": (_sorted, _packed_rnn, False),
    "masked in collation": (_masked, _masked_words, False),
}


def _train_all(folder: str) -> None:
    torch.set_num_threads(1)
    for name, (collate_fn, loss, _) in SCRIPTS.items():
        run = evenload.init(project_dir=f"{folder}/{name}", seed=0, balance=(10, 6), timeout_s=20)
        loader: Any = DataLoader(_sentences(), batch_size=BATCH, collate_fn=collate_fn)  # type: ignore[arg-type]
        model, steps = run.prepare(Network(), loader)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in steps:
            step.backward(lambda batch, model=model, loss=loss: loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        run.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("padding")
    run_ranks(_train_all, 2, str(folder), timeout_s=60)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_padding_that_counts_is_named(folder: Path, name: str) -> None:
    events = map(json.loads, (folder / name / "events.jsonl").read_text().splitlines())
    kinds = ("padding", "coupled_loss", "wrong_units", "kept_state")
    found = [(event["kind"], event["message"]) for event in events if event.get("kind") in kinds]
    if SCRIPTS[name][2]:
        ((kind, message),) = found
        assert kind == "padding" and "pad-all-parts-alike" in message
    else:
        assert not found
