"""Strategy local against the same algorithm in one process (simulation.py), in float64."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import evenload
from evenload.balance.split import scale_shares
from tests.ranks.islands.simulation import BATCH, NUM_SAMPLES, Case, Points, adamw, build, loss_of, sgd, simulate

ISLANDS = "0,1/2"


def pieces(usual: int, proportions: tuple[int, ...], sizes: list[int]) -> list[tuple[int, ...]]:
    """Divide sizes one after the other: with the earlier ones, each part is the whole number below its share of all."""
    eighths = scale_shares(proportions, 8 * usual)
    ends = [sum(eighths[:index]) for index in range(len(eighths) + 1)]
    found, done = [], 0
    for size in sizes:
        edges = [(done + size) * end // (8 * usual) - done * end // (8 * usual) for end in ends]
        found.append(tuple(high - low for low, high in itertools.pairwise(edges)))
        done += size
    return found


FIXED = {"islands": ISLANDS, "balance": (6, 3, 3), "sync_every": 4}
CASES = {
    "average": Case({**FIXED}, (9, 3), adamw, gamma=0.9),
    "diloco": Case({**FIXED, "outer_lr": 0.7, "outer_momentum": 0.9}, (9, 3), adamw, lr=0.7, momentum=0.9),
    "fragments": Case(
        {**FIXED, "outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 2},
        (9, 3),
        adamw,
        lr=0.7,
        momentum=0.9,
        num_fragments=2,
    ),
    "delayed": Case(
        {**FIXED, "outer_lr": 0.7, "outer_momentum": 0.9, "sync_delay": 3}, (9, 3), adamw, lr=0.7, momentum=0.9, delay=3
    ),
    "delayed_fragments": Case(
        {**FIXED, "fragments": 2, "sync_delay": 1, "wire": "fp16"},
        (9, 3),
        adamw,
        num_fragments=2,
        delay=1,
        wire="fp16",
        hidden=(32, 40),
    ),
    "by_speed": Case(
        {**FIXED, "local_steps": "auto", "outer_lr": 0.7, "outer_momentum": 0.9},
        (6, 2),
        adamw,
        by_speed=True,
        lr=0.7,
        momentum=0.9,
        gamma=0.9,
    ),
    "three_islands": Case(
        {"islands": ((2,), (0,), (1,)), "balance": (2, 4, 6), "sync_every": 5}, (6, 2, 4), num_steps=15, every=5
    ),
    # Shares that are no whole samples, or batches: they change by one from step to step.
    "pieces": Case(
        {"islands": ((0,), (1,), (2,)), "balance": (5, 8, 6), "sync_every": 4},
        (0, 0, 0),
        adamw,
        rounds=tuple((1, parts) for parts in pieces(BATCH, (5, 8, 6), [BATCH] * 16)),
    ),
    "pieces_by_speed": Case(
        {"islands": "0,1/2", "balance": (4, 3, 4), "sync_every": 4, "local_steps": "auto"},
        (0, 0),
        adamw,
        by_speed=True,
        rounds=tuple((4, parts) for parts in pieces(8, (7, 4), [8] * 4)),
    ),
    "uneven_round": Case(
        {**FIXED, "local_steps": "auto", "balance": (4, 3, 1), "sync_every": 8}, (7, 1), sgd, 16, 8, True
    ),
    # Units differ between synchronisations, and values fill more than a chunk.
    "bf16": Case({**FIXED, "wire": "bf16"}, (9, 3), adamw, wire="bf16", hidden=(32, 40)),
    "int8_diloco": Case(
        {
            "islands": "2/0/1",
            "balance": (4, 6, 2),
            "sync_every": 4,
            "outer_lr": 0.7,
            "outer_momentum": 0.9,
            "wire": "int8",
        },
        (2, 4, 6),
        adamw,
        lr=0.7,
        momentum=0.9,
        wire="int8",
        order=(1, 2, 0),
        hidden=(32, 40),
    ),
    "fp16_fragments": Case(
        {**FIXED, "outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 2, "wire": "fp16"},
        (9, 3),
        adamw,
        lr=0.7,
        momentum=0.9,
        num_fragments=2,
        wire="fp16",
        hidden=(32, 40),
    ),
    "powersgd": Case(
        {**FIXED, "outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 2, "wire": "powersgd"},
        (9, 3),
        adamw,
        lr=0.7,
        momentum=0.9,
        num_fragments=2,
        wire="powersgd",
        hidden=(24, 32),
    ),
}


def train(name: str, folder: str, settings: dict[str, Any], case: Case, num_steps: int) -> dict[str, Any]:
    run = evenload.init(project_dir=folder, seed=0, strategy="local", **settings)
    model = build(run.rank, case.hidden)  # other weights on each rank: rank 0's must count
    model, loader = run.prepare(model, DataLoader(Points(), batch_size=BATCH))
    optimizer = case.optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.gamma)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    seen: dict[str, Any] = {"rates": [], "losses": [], "used": [], "lengths": len(loader)}
    while loader.loader.cursor().global_step < num_steps:
        for step in loader:

            def loss_fn(batch: Any) -> Any:
                return loss_of(model, batch)

            seen["losses"].append(float(step.backward(loss_fn)))
            plan = step.batch.plan
            seen["used"] += [(step.epoch, *plan.slice_of(m, step.planner.rank)) for m in range(plan.num_micro)]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            # Otherwise a checkpoint is a synchronisation of all fragments, or moves what the wire has lost.
            if case.num_fragments == 1 and case.wire == "fp32" and not case.delay:
                run.checkpoint(every=8)
            if step.index + 1 == num_steps and step.batch.plan.progress.ends:
                break
        seen["rates"].append(scheduler.get_last_lr()[0])
    run.close()
    seen["weights"] = {key: value.detach().clone() for key, value in model.state_dict().items()}
    seen["events"] = (
        [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()] if not run.rank else []
    )
    seen["steps"] = (
        [json.loads(line) for line in Path(folder, "steps.jsonl").read_text().splitlines()] if not run.rank else []
    )
    return seen


def train_all(folder: str) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {name: train(name, f"{folder}/{name}", case.settings, case, case.num_steps) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def trained(island_ranks: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    return [seen["train_all"] for seen in island_ranks]


@functools.cache
def expected(name: str) -> dict[str, torch.Tensor]:
    return dict(simulate(CASES[name])[0].model.state_dict())


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    keys = [key for key, value in wanted.items() if value.is_floating_point()]
    ours, theirs = (torch.cat([state[key].flatten() for key in keys]) for state in (found, wanted))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", list(CASES))
def test_as_in_one_process(name: str, trained: list[dict[str, dict[str, Any]]]) -> None:
    ranks = [seen[name] for seen in trained]
    for seen in ranks:
        assert difference(seen["weights"], expected(name)) < 1e-12
    assert all(torch.equal(ranks[0]["weights"][key], value) for key, value in ranks[1]["weights"].items())
    assert {seen["lengths"] for seen in ranks} == {NUM_SAMPLES // BATCH}
    case = CASES[name]
    reported = [e for e in ranks[0]["events"] if e.get("kind") == "wire"]
    assert [e["fields"]["format"] for e in reported] == ([] if case.wire == "fp32" else [case.wire])
    assert all(e["fields"]["sent_bytes"] < e["fields"]["exact_bytes"] for e in reported)
    # About 1.7e-3, 7e-3 and 2e-4 of normally distributed values.
    low, high = {"bf16": (2e-4, 4e-3), "int8": (5e-4, 3e-2), "fp16": (1e-5, 2e-3)}.get(case.wire, (1e-3, 5.0))
    assert all(low < e["fields"]["difference"] < high for e in reported), reported
    assert len([e for e in ranks[0]["events"] if e.get("kind") == "synchronised"]) == case.num_steps // case.every
    assert [row["num_samples"] for row in ranks[0]["steps"] if "num_samples" in row] == [BATCH] * case.num_steps


@pytest.mark.parametrize("name", list(CASES))
def test_each_sample_once_an_epoch(name: str, trained: list[dict[str, dict[str, Any]]]) -> None:
    spans = sorted(span for seen in trained for span in seen[name]["used"])
    for epoch, group in itertools.groupby(spans, lambda span: span[0]):
        positions = [p for _, low, high in group for p in range(low, high)]
        assert positions == list(range(len(positions))), epoch


def test_schedules_follow_the_global_step(trained: list[dict[str, dict[str, Any]]]) -> None:
    for seen in trained:
        assert seen["by_speed"]["rates"][-1] == pytest.approx(0.02 * 0.9**16, rel=1e-12)
