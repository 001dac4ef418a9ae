"""State of one rank's samples is named in the first step, and what the whole batch sets is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import evenload
from evenload.errors import DivergenceError
from evenload.testing import run_ranks
from tests.ranks.wrong_uses.state_scripts import (
    NO_STATE,
    OF_THE_CALLS,
    OF_THE_WHOLE_BATCH,
    Trainer,
    codebook,
)

SHARES = (9, 5, 2)
MICRO = {"one": None, "three": 3}
BOUND = 1e-12

Result = torch.Tensor | str


def _on_ranks(folder: str) -> dict[str, Result]:
    torch.set_num_threads(1)
    found: dict[str, Result] = {}
    for train in (*OF_THE_CALLS, *OF_THE_WHOLE_BATCH, *NO_STATE):
        for name, micro_batch in MICRO.items() if train in OF_THE_WHOLE_BATCH else [("", None)]:
            key = f"{train.__name__}{name}"
            settings = {} if micro_batch is None else {"micro_batch": micro_batch}
            run = evenload.init(project_dir=f"{folder}/{key}", seed=0, balance=SHARES, timeout_s=20, **settings)
            try:
                found[key] = _flat(train(Trainer(run)))
            except DivergenceError as error:
                found[key] = str(error)
            finally:
                run.close()
    return found


def _flat(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.detach().double().flatten() for value in values])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Result]]:
    return run_ranks(_on_ranks, len(SHARES), str(folder), timeout_s=90)


def _messages(folder: Path) -> list[tuple[str, str]]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    kinds = ("kept_state", "coupled_loss", "wrong_units")
    return [(event["kind"], event["message"]) for event in events if event.get("kind") in kinds]


@pytest.mark.parametrize("train", OF_THE_CALLS, ids=lambda train: train.__name__)
def test_state_of_the_calls_is_named(ranks: Any, folder: Path, train: Any) -> None:
    ((kind, message),) = _messages(folder / train.__name__)
    assert kind == "kept_state" and "state-that-follows-the-batch" in message


def test_a_buffer_that_a_forward_sets_ends_the_run_in_the_second_step(ranks: Any) -> None:
    for found in ranks:
        assert "at step 1 (all were equal at step 0)" in found[codebook.__name__]
        assert "buffer book" in found[codebook.__name__]


@pytest.mark.parametrize("micro", MICRO)
@pytest.mark.parametrize("train", OF_THE_WHOLE_BATCH, ids=lambda train: train.__name__)
def test_state_of_the_whole_batch_is_exact(ranks: Any, folder: Path, train: Any, micro: str) -> None:
    key = f"{train.__name__}{micro}"
    expected = _flat(train(Trainer()))
    for found in ranks:
        assert float((found[key] - expected).norm() / expected.norm()) <= BOUND
    assert not _messages(folder / key)


@pytest.mark.parametrize("train", NO_STATE, ids=lambda train: train.__name__)
def test_no_other_is_named(ranks: Any, folder: Path, train: Any) -> None:
    expected = _flat(train(Trainer()))
    assert not _messages(folder / train.__name__)
    for found in ranks:
        assert float((found[train.__name__] - expected).norm() / expected.norm()) <= BOUND
