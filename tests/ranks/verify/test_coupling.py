"""A loss that couples the samples of its batch, or is no mean over its units, is named in the first step; no other is."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks
from evenload.training.verify.coupling import CouplingWatch
from tests.ranks.verify.coupled_losses import (
    COUPLED,
    NUM_CLASSES,
    UNCOUPLED,
    WRONG_UNITS,
    Encoder,
    clip,
    mixup,
    softmax_over_the_batch,
)


def _loader(batch_size=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 12, generator=generator)
    return DataLoader(
        TensorDataset(x, torch.randint(0, NUM_CLASSES, (64,), generator=generator)), batch_size=batch_size
    )


def _train(loss, folder, balance, batch_size=16):
    """Two steps; the state after them, and whether the loss was named."""
    run = evenload.init(project_dir=folder, seed=0, balance=balance)
    model, loader = run.prepare(Encoder(), _loader(batch_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in loader:
        step.backward(lambda batch: loss(model, *batch))
        optimizer.step()
        optimizer.zero_grad()
        if step.index == 3:
            break
    state = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    draw = float(torch.rand(()))
    run.close()
    return state, draw


def _train_all(losses, folder, *args):
    torch.set_num_threads(1)
    return [_train(loss, f"{folder}/{loss.__name__}", *args) for loss in losses]


def _messages(folder):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [
        event["message"] for event in map(json.loads, lines) if event.get("kind") in ("coupled_loss", "wrong_units")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coupling")
    run_ranks(_train_all, 2, [*COUPLED, *UNCOUPLED, *WRONG_UNITS], str(folder), (12, 4), timeout_s=100)
    return folder


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_a_coupled_loss_is_named_once(folder: Path, loss):
    (message,) = _messages(folder / loss.__name__)
    assert "step.backward(encode, batch_loss=fn)" in message and "this is not the loss of the global batch" in message


@pytest.mark.parametrize("loss", WRONG_UNITS, ids=lambda loss: loss.__name__)
def test_wrong_units_are_named_once(folder: Path, loss):
    (message,) = _messages(folder / loss.__name__)
    assert WRONG_UNITS[loss] in message


def test_units_that_the_collate_fn_counts(tmp_path):
    """Half of a collated batch is no batch of half the samples."""

    def collate(rows):
        x, y = torch.utils.data.default_collate(rows)
        return x, y, len(rows)

    run = evenload.init(project_dir=str(tmp_path), seed=0)
    loader = _loader()
    model, prepared = run.prepare(Encoder(), DataLoader(loader.dataset, 16, collate_fn=collate))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in prepared:
        step.backward(lambda batch: (model.head(model(batch[0])).square().sum() / batch[2], batch[2]))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert not _messages(tmp_path)


def test_batch_norm_without_running_statistics_is_no_coupled_loss(tmp_path):
    run = evenload.init(project_dir=str(tmp_path), seed=0)
    norm = torch.nn.BatchNorm1d(16, track_running_stats=False)
    model, loader = run.prepare(torch.nn.Sequential(torch.nn.Linear(12, 16), norm, torch.nn.Linear(16, 5)), _loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in loader:
        step.backward(lambda batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert not _messages(tmp_path)


@pytest.mark.parametrize("loss", UNCOUPLED, ids=lambda loss: loss.__name__)
def test_no_other_loss_is_named(folder: Path, loss):
    assert not _messages(folder / loss.__name__)


def test_one_process_and_few_samples_of_rank_0(tmp_path):
    _train(clip, str(tmp_path / "alone"), "auto")
    (message,) = _messages(tmp_path / "alone")
    assert "exact now, with one device and one micro-batch" in message
    run_ranks(_train_all, 2, [clip, mixup], str(tmp_path), (1, 15))
    assert len(_messages(tmp_path / "clip")) == 1 and not _messages(tmp_path / "mixup")


def test_the_run_is_unchanged(tmp_path, monkeypatch):
    with_it = _train(softmax_over_the_batch, str(tmp_path / "a"), "auto")
    monkeypatch.setattr(CouplingWatch, "on_end", lambda *_: None)
    without = _train(softmax_over_the_batch, str(tmp_path / "b"), "auto")
    assert torch.equal(with_it[0], without[0]) and with_it[1] == without[1]


def _draw_from_its_own(folder, own):
    run = evenload.init(project_dir=folder, seed=0)
    model, loader = run.prepare(Encoder(), _loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noise = torch.Generator().manual_seed(1) if own else None

    def loss_fn(batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(model.head(model(x + torch.randn(x.shape, generator=noise))), y)

    for step in loader:
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    run.close()


@pytest.mark.parametrize(("num_ranks", "own"), [(2, True), (2, False), (1, True)])
def test_a_loss_that_draws_from_its_own_generator_is_named_once_where_ranks_would_draw_the_same(
    tmp_path, num_ranks, own
):
    run_ranks(_draw_from_its_own, num_ranks, str(tmp_path), own)
    text = (tmp_path / "events.jsonl").read_text()
    assert text.count("loss_fn draws from a generator of the script's own") == (num_ranks > 1 and own)


def _of_a_generator_for(purpose, folder):
    """A generator that loss_fn can reach, and does not draw from."""
    run = evenload.init(project_dir=folder, seed=0)
    model, loader = run.prepare(Encoder(), _loader())
    own = torch.Generator().manual_seed(1)  # of a DataLoader, for instance
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_fn(batch):
        assert own is not None
        return torch.nn.functional.cross_entropy(model.head(model(batch[0])), batch[1])

    class Trainer:
        def __init__(self):
            self.generator = own

        def loss(self, batch):
            return loss_fn(batch)

    trainer = Trainer()
    for step in loader:
        step.backward(trainer.loss if purpose == "method" else loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    run.close()


@pytest.mark.parametrize("purpose", ["method", "function"])
def test_a_generator_that_nothing_is_drawn_from_is_not_named(tmp_path, purpose):
    run_ranks(_of_a_generator_for, 2, purpose, str(tmp_path))
    assert "own_generator" not in (tmp_path / "events.jsonl").read_text()
