"""`batch_max` where the devices change inside an epoch: the batch is chosen anew, and each sample is used once all the same."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import evenload
from evenload.balance.batch import CHOICE_STEPS
from evenload.testing import run_ranks
from tests.ranks.adaptive_batch.jobs import BASE, Cloud, Offset, events, plain_steps, step_of
from tests.ranks.elastic.supervised import Supervised
from tests.ranks.elastic.test_losses import Faults

NUM_SAMPLES = 3000
NOISE = 400.0
OVERHEAD_S = 0.02
"""Of each step, far above what a sample costs on a loaded machine, so that a larger batch always pays."""


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    def __init__(self) -> None:
        self.cloud = Cloud(NOISE, num_samples=NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.cloud[index]


def train(
    folder: str,
    num_epochs: int,
    until: int | None = None,
    drop_last: bool = False,
    full: int = 0,
    missed: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train on the devices that there are, and write down what each step used on this rank.

    In step `missed`, worker 2 dies when it has sent its part to worker 0, and not to worker 1.
    """
    fault = Faults(
        Path(os.environ.get("EVENLOAD_WORKER", "")).stem, [("w2", "missed by w1", -2 if missed is None else missed)]
    )
    if missed is not None:
        fault.inject()
    run = evenload.init(project_dir=f"{folder}/run", seed=3, batch_max=64, **settings)
    model, loader = run.prepare(Offset(), DataLoader(Numbered(), batch_size=BASE, shuffle=True, drop_last=drop_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    growth, steps, used, lengths = run._saver.adaptive_batch.growth, [], [], []

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        used.extend(batch[0].tolist())
        return model(batch[1]).mean()

    for _ in range(loader.epoch, num_epochs):
        for step in loader:
            used.clear()
            if step.index == 5:
                Path(folder, "begun").touch()
            fault.step = step.index
            step.backward(loss_fn)
            fault.at("missed by w1")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            with run._context.clock.segment("comm"):
                time.sleep(OVERHEAD_S)
            steps.append((step.index, *step_of(step, growth.now)))
            lengths.append((step.epoch, step.batch.plan.step, loader.batch_size, len(loader)))
            if run.world_size < full:
                time.sleep(0.1)  # so that a rank that joins arrives in the first epoch
            with Path(folder, f"used-{os.getpid()}").open("a") as file:
                print(json.dumps([step.index, step.epoch, used]), file=file)
            if step.index + 1 == until:
                run.checkpoint()
                run.close()
                return {"steps": steps}
    seen = {
        "steps": steps,
        "lengths": lengths,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "progress": growth.progress(),
    }
    run.close()
    return seen


def check(
    folder: Path, seen: dict[str, Any], earlier: list[Any], num_epochs: int, total: int = NUM_SAMPLES
) -> list[int]:
    """Check samples, lengths and weights of a run that ended; return the batches of its first epoch, in order."""
    rows = [json.loads(line) for path in folder.glob("used-*") for line in path.read_text().splitlines()]
    for epoch in range(num_epochs):
        counts = Counter(sample for _, at, samples in rows if at == epoch for sample in samples)
        assert len(counts) == total and set(counts.values()) == {1}, (epoch, len(counts))
    steps = [*earlier, *seen["steps"]]
    assert [index for index, *_ in steps] == list(range(len(steps)))
    for epoch in range(num_epochs):
        spans = [(low, high) for _, at, low, high, _, _ in steps if at == epoch]
        assert spans[0][0] == 0 and spans[-1][1] == total
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
        *_, (_, last, size, length) = (row for row in seen["lengths"] if row[0] == epoch)
        assert length == last + 1 == len(spans)
        assert all(high - low == at_size for _, at, low, high, at_size, _ in steps if at == epoch and high != total)
        assert size == next(at_size for _, at, _, high, at_size, _ in steps if at == epoch and high == total)
    weights = plain_steps(Cloud(NOISE, num_samples=NUM_SAMPLES), [step[1:] for step in steps])
    assert float((weights - seen["weights"]).norm() / weights.norm()) <= 1e-12
    assert seen["progress"] == (num_epochs * total // BASE, BASE)
    return [size for size, _ in itertools.groupby(size for _, epoch, _, _, size, _ in steps if epoch == 0)]


def batch_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in events(str(folder / "run")) if event.get("kind") == "batch"]


def one_rank(folder: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(folder, **kwargs)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_resumed_on_other_devices_chooses_its_batch_inside_the_epoch(tmp_path: Path, drop_last: bool) -> None:
    first = {"num_epochs": 2, "until": 50, "drop_last": drop_last}
    earlier = run_ranks(one_rank, 2, str(tmp_path), first, timeout_s=60)[0]["steps"]
    assert {size for *_, size, _ in earlier} == {BASE}, "a first epoch keeps the user's batch"
    (seen,) = run_ranks(
        one_rank, 1, str(tmp_path), {"num_epochs": 1, "micro_batch": 8, "drop_last": drop_last}, timeout_s=60
    )
    total = seen["steps"][-1][3]
    assert total == NUM_SAMPLES if not drop_last else NUM_SAMPLES - 64 < total <= NUM_SAMPLES
    assert check(tmp_path, seen, earlier, 1, total) == [BASE, 2 * BASE, 4 * BASE]
    grown = next(event for event in batch_events(tmp_path) if event["fields"]["batch_size"] == 2 * BASE)
    assert f"global batch 16 → 32 from step {50 + CHOICE_STEPS} of epoch 0 on" in grown["message"], grown["message"]


def test_a_run_resumed_twice_inside_such_an_epoch(tmp_path: Path) -> None:
    until, earlier = (50, 110, None), []
    for num_ranks, end in zip((2, 1, 1), until, strict=True):
        kwargs = {"num_epochs": 1, "until": end, "micro_batch": 8}
        seen = run_ranks(one_rank, num_ranks, str(tmp_path), kwargs, timeout_s=60)[0]
        earlier += seen["steps"] if end else []
    assert {size for *_, size, _ in earlier} == {BASE, 2 * BASE}
    assert check(tmp_path, seen, earlier, 1)[:2] == [BASE, 2 * BASE]


@pytest.mark.parametrize("change", ["joins", "leaves"])
def test_a_rank_that_joins_or_leaves_lets_the_batch_be_chosen_inside_the_epoch(tmp_path: Path, change: str) -> None:
    run = Supervised(tmp_path, train, str(tmp_path), 2, None, False, 3 if change == "joins" else 0)
    if change == "leaves":
        run.leaves, run.leave_after = {0: "w2"}, tmp_path / "begun"
    run.start(2 if change == "joins" else 3)
    found = run.run(80, {0: "w2"} if change == "joins" else None)
    seen = found["w0"]
    assert check(tmp_path, seen, [], 2)[:2] == [BASE, 2 * BASE], batch_events(tmp_path)
    assert torch.equal(seen["weights"], found["w1"]["weights"])
    if change == "joins":
        assert torch.equal(seen["weights"], found["w2"]["weights"])
        assert seen["steps"][-len(found["w2"]["steps"]) :] == found["w2"]["steps"]


@pytest.mark.parametrize("missed", [58, 59, 187])
def test_ranks_that_learn_of_a_loss_in_different_steps_choose_in_front_of_the_same_one(
    tmp_path: Path, missed: int
) -> None:
    run = Supervised(tmp_path, train, str(tmp_path), 3, None, False, 0, missed)
    run.start(3)
    found = run.run(80)
    assert run.lost == ["w2"]
    for worker in ("w0", "w1"):
        steps = found[worker]["steps"]
        assert [index for index, *_ in steps] == list(range(len(steps)))
    # What worker 1 used in the step that it missed was its part all the same; the last one wrote nothing of that step.
    sizes = [
        (epoch, size)
        for size, epoch in dict.fromkeys((size, epoch) for _, epoch, _, _, size, _ in found["w0"]["steps"])
    ]
    assert sizes[:2] == [(0, BASE), (0 if missed < 100 else 1, 2 * BASE)]
    assert found["w0"]["steps"] == found["w1"]["steps"]
    assert torch.equal(found["w0"]["weights"], found["w1"]["weights"])
    weights = plain_steps(Cloud(NOISE, num_samples=NUM_SAMPLES), [step[1:] for step in found["w0"]["steps"]])
    assert float((weights - found["w0"]["weights"]).norm() / weights.norm()) <= 1e-12
