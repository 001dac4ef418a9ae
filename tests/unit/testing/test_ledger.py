"""The ledger of samples: what a rank notes of its backwards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from evenload.testing.ledger import SampleLedger
from evenload.training.comm.generation import Membership


def test_a_rank_lost_after_the_others_have_the_gradients_was_part_of_the_backward(tmp_path: Path) -> None:
    groups = SimpleNamespace(membership=Membership(0, ("a", "b"), ""))
    engine = SimpleNamespace(num_backwards=0)
    spec = SimpleNamespace(launch_dir="launch", worker="a")
    run: Any = SimpleNamespace(_context=SimpleNamespace(spec=spec, folder=tmp_path, engine=engine, groups=groups))

    def backward(loss_fn: Any) -> torch.Tensor:
        loss_fn([7])
        engine.num_backwards += 1
        groups.membership = Membership(1, ("a",), "")
        return torch.zeros(())

    plan = SimpleNamespace(generation=0, attempt=0, micro=((1, 1),))
    step: Any = SimpleNamespace(
        index=3, stats=SimpleNamespace(calls=0), batch=SimpleNamespace(plan=plan), backward=backward
    )
    ledger = SampleLedger(run, list)
    ledger.backward(step, lambda batch: torch.zeros(()))
    ledger._file.close()
    (path,) = tmp_path.rglob("*.jsonl")
    call, receipt = map(json.loads, path.read_text().splitlines())
    assert call["ids"] == [7] and receipt["workers"] == ["a", "b"]
