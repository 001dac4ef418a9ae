"""Islands that exchange times before the first synchronisation, and in long rounds."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import evenload
from evenload.training.comm.control import Control, Operation
from tests.ranks.islands.simulation import BATCH, Case, Points, adamw, build, loss_of, simulate
from tests.ranks.islands.test_references import difference

EVERY, NUM_STEPS, CHANGES_AT = 44, 46, 14
SLOW_S, FAST_S = 0.034, 0.017
"""Seconds of an island's sample."""
SETTINGS: dict[str, Any] = {"strategy": "local", "islands": "0,1/2", "sync_every": EVERY}
CASES = {
    "equal": Case({}, (6, 6), adamw, num_steps=NUM_STEPS, every=EVERY),
    "by_speed": Case(
        {"local_steps": "auto"}, (6, 6), adamw, num_steps=NUM_STEPS, every=EVERY, by_speed=True, gamma=0.9
    ),
}


def train(name: str, folder: str, *, left_at: int = 0) -> dict[str, Any]:
    """Train an epoch of `NUM_STEPS`, or epochs of 3 steps whose loop is left at a step of the run."""
    case = CASES[name]
    num_samples = 3 * BATCH if left_at else NUM_STEPS * BATCH
    run = evenload.init(project_dir=folder, seed=0, **SETTINGS, **case.settings)
    model, loader = run.prepare(build(), DataLoader(Points(num_samples), batch_size=BATCH))
    optimizer = case.optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.gamma)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    island = int(run.rank == 2)
    seen: dict[str, Any] = {"used": [], "samples": [], "ends": [], "rates": []}

    def loss_fn(batch: Any) -> Any:
        # Island 0 is the slow one, then island 1.
        is_slow = island == int(step.index >= CHANGES_AT and not left_at)
        time.sleep((2 - island) * len(batch[0]) * (SLOW_S if is_slow else FAST_S))
        return loss_of(model, batch)

    num_epochs = 10 if left_at else 1
    exchange, waits = Control.exchange_table, seen.setdefault("waits", [])

    def noted(control: Control, operation: Operation, values: Sequence[float] = ()) -> Any:
        waits.append((operation.name, control._groups.world_size))
        return exchange(control, operation, values)

    Control.exchange_table = noted  # type: ignore[method-assign]
    while loader.epoch < num_epochs:
        for step in loader:
            step.backward(loss_fn)
            plan = step.batch.plan
            seen["used"] += [(step.epoch, *plan.slice_of(m, step.planner.rank)) for m in range(plan.num_micro)]
            seen["samples"].append(plan.num_samples)
            if plan.progress.ends:
                seen["ends"].append(plan.progress.ends)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if left_at and plan.progress.ends and loader.loader.cursor().global_step + step.batch.num_steps == left_at:
                break
        seen["rates"].append(scheduler.get_last_lr()[0])
    Control.exchange_table = exchange  # type: ignore[method-assign]
    run.close()
    seen["weights"] = {key: value.detach().clone() for key, value in model.state_dict().items()}
    rows = [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()] if not run.rank else []
    seen["divided"] = [
        (row["step"], tuple(row["fields"]["parts"])) for row in rows if row.get("kind") == "islands_divided"
    ]
    return seen


def early(folder: str) -> dict[str, dict[str, Any]]:
    found = {name: train(name, f"{folder}/{name}") for name in CASES}
    return found | {f"{name}_left": train(name, f"{folder}/{name}_left", left_at=4) for name in CASES}


@pytest.fixture(scope="module")
def ranks(island_ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [seen["early"] for seen in island_ranks]


@pytest.mark.parametrize("name", list(CASES))
def test_islands_are_divided_long_before_they_synchronise(name: str, ranks: list[dict[str, Any]]) -> None:
    step, parts = ranks[0][name]["divided"][0]
    assert step in (6, 10, 18)  # later if other programs disturbed the first steps
    assert parts[1] > parts[0]  # two ranks and one begin with 2 : 1


@pytest.mark.parametrize("name", list(CASES))
def test_islands_are_divided_anew_when_a_speed_changes_in_a_long_round(name: str, ranks: list[dict[str, Any]]) -> None:
    divided = [parts for step, parts in ranks[0][name]["divided"] if CHANGES_AT < step < EVERY]
    assert divided, ranks[0][name]["divided"]
    assert divided[-1][0] > divided[-1][1]


@pytest.mark.parametrize("name", list(CASES))
def test_no_rank_waits_for_a_round_trip_in_its_loop(name: str, ranks: list[dict[str, Any]]) -> None:
    """Reports travel beside the steps; what all ranks wait for together is at the begin of the epoch."""
    for seen in ranks:
        together = [operation for operation, size in seen[name]["waits"] if size == len(ranks)]
        assert not {"SYNCHRONISE"} & set(together), together
        assert len(together) < 4, together


@pytest.mark.parametrize("name", list(CASES))
def test_as_in_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    """With the parts that were measured."""
    leaders = [ranks[0][name], ranks[2][name]]
    if CASES[name].by_speed:
        first, second = (seen["ends"] for seen in leaders)
        assert [length for _, length in first] == [length for _, length in second]
        rounds = tuple((length, (own, other)) for (own, length), (other, _) in zip(first, second, strict=True))
    else:
        rounds = tuple((1, parts) for parts in zip(*(seen["samples"] for seen in leaders), strict=True))
    case = replace(CASES[name], rounds=rounds, num_samples=NUM_STEPS * BATCH)
    expected = dict(simulate(case)[0].model.state_dict())
    for seen in ranks:
        assert difference(seen[name]["weights"], expected) < 1e-12
        assert seen[name]["rates"] == pytest.approx([0.02 * case.gamma**NUM_STEPS])


@pytest.mark.parametrize("name", [*CASES, *(f"{name}_left" for name in CASES)])
def test_each_sample_once_an_epoch(name: str, ranks: list[dict[str, Any]]) -> None:
    spans = sorted(span for seen in ranks for span in seen[name]["used"])
    for epoch, group in itertools.groupby(spans, lambda span: span[0]):
        positions = [p for _, low, high in group for p in range(low, high)]
        assert positions == list(range(len(positions))), epoch


@pytest.mark.parametrize("name", list(CASES))
def test_a_loop_left_where_times_are_due_goes_on_with_new_parts(name: str, ranks: list[dict[str, Any]]) -> None:
    step, parts = ranks[0][f"{name}_left"]["divided"][0]
    assert 4 <= step <= 28
    assert parts[1] > parts[0]  # two ranks and one begin with 2 : 1
    for seen in ranks[1:]:
        assert difference(seen[f"{name}_left"]["weights"], ranks[0][f"{name}_left"]["weights"]) == 0
