"""Gradients that come late, more often, in another order, on some ranks only, or of parameters that were not there before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks
from evenload.training.parallel import buckets

BATCH = 8
STEPS = 6


class Network(nn.Module):
    """Registered in the reverse order of its use; runs its middle layer `depth` times in re-entrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.middle, self.first = nn.Linear(6, 1), nn.Linear(6, 6), nn.Linear(4, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.depth = 1
        self.uses_experts = False
        self.added: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.added(self.first(x))
        for _ in range(self.depth):
            h = checkpoint(self.middle, torch.tanh(h), use_reentrant=True)
        if self.uses_experts:
            chosen = (x[:, 0] * 10).long().abs() % 3
            h = sum(expert(h) * (chosen == n)[:, None] for n, expert in enumerate(self.experts) if (chosen == n).any())
        return self.head(h)  # type: ignore[no-any-return]


Before = Callable[[Network, int, int], None]


def _deeper(model: Network, step: int, rank: int) -> None:
    model.depth = (1, 1, 2, 3, 3, 2)[step]


def _experts(model: Network, step: int, rank: int) -> None:
    model.uses_experts = True


def _adds(model: Network, step: int, rank: int) -> None:
    if step == 3:
        torch.manual_seed(70 + rank)  # rank 0's weights must count
        model.added = nn.Linear(6, 6).double()


def _adds_another(model: Network, step: int, rank: int) -> None:
    if step == 3 and rank == 1:
        model.added = nn.Linear(6, 6).double().requires_grad_(False)


def _freezes(model: Network, step: int, rank: int) -> None:
    model.middle.requires_grad_(step % 2 == 0)


def _drops(model: Network, step: int, rank: int) -> None:
    """As LayerDrop does, equally on all ranks; the first step has no middle layer."""
    model.depth = step % 2


CASES: dict[str, Before] = {
    "deeper": _deeper,
    "experts": _experts,
    "adds": _adds,
    "freezes": _freezes,
    "drops": _drops,
}


def _train(name: str, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = 1
    run = evenload.init(project_dir=folder, seed=0, balance="even")
    torch.manual_seed(run.rank)
    bare = Network().double()
    x = torch.randn(BATCH * STEPS, 4, generator=torch.Generator().manual_seed(0)).double()
    model, loader = run.prepare(bare, DataLoader(TensorDataset(x), batch_size=BATCH))
    strategy = run._context.engine.strategy
    redone, reducers, hooked, num_sums, num_touched = [], [], [], [], []
    groups, begin_sum, sums = strategy._groups, strategy._groups.sum_async, list[torch.Tensor]()

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        sums.append(tensor)
        return begin_sum(tensor, **options)

    groups.sum_async = counted
    model.first.bias.register_hook(lambda grad: hooked.append(grad.clone()))
    for step in loader:
        CASES[name](model, step.index, run.rank)
        sums.clear()
        step.backward(lambda batch: (model(batch[0]) ** 2).mean())
        num_sums.append(len(sums))
        num_touched.append(sum(p.grad is not None for p in model.parameters()))
        assert torch.equal(hooked[-1], model.first.bias.grad), "the hook saw another gradient"
        redone.append(step.stats.redone)
        reducers.append(strategy._reducer)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.05 * p.grad
        model.zero_grad()
    order = list(strategy._arrivals.order)
    names = [slot.name for slot in reducers[-1].slots]
    outcome = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "redone": redone,
        "reducers": len(set(map(id, reducers))),
        "order": [names[index] for index in order],
        "buckets": [[slot.name for slot in bucket.slots] for bucket in reducers[-1].buckets],
        "expected": dict(zip(names, strategy._arrivals.expected[0], strict=True)),
        "hooked": len(hooked),
        "num_sums": num_sums,
        "num_touched": num_touched,
    }
    run.close()
    return outcome


def _train_all(folder: str) -> dict[str, dict[str, Any]]:
    return {name: _train(name, f"{folder}/{name}") for name in CASES}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("arrivals")
    return [run_ranks(_train_all, num, str(folder / str(num))) for num in (1, 2)] + [[folder]]  # type: ignore[list-item]


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(outcomes: Any, name: str) -> None:
    (alone,), both, _ = outcomes
    for outcome in both:
        torch.testing.assert_close(outcome[name]["weights"], alone[name]["weights"], rtol=1e-12, atol=1e-14)
        assert outcome[name]["hooked"] == STEPS, "a hook on a parameter runs once in each call"


@pytest.mark.parametrize(
    ("name", "late"),
    [("deeper", [2]), ("experts", []), ("adds", [3]), ("freezes", [])],
)
def test_a_step_is_computed_twice_once(outcomes: Any, name: str, late: list[int]) -> None:
    _, both, (folder,) = outcomes
    for outcome in both:
        found = [step for step, redone in enumerate(outcome[name]["redone"]) if redone]
        # Experts come into use when their first samples do.
        assert found == late if name != "experts" else len(found) <= 2
    lines = (folder / "2" / name / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event.get("kind") == "late_gradient"]
    assert len(events) == (1 if late else len(events) and 1)


@pytest.mark.parametrize(("name", "first"), [("drops", 2), ("experts", 3), ("freezes", 1)])
def test_slots_without_a_gradient_cost_no_sums(outcomes: Any, name: str, first: int) -> None:
    """Each parameter is a bucket: a step sums those that some rank touched, and nothing else, also where ranks touched others."""
    for outcome in outcomes[1]:
        found = [
            n - touched for n, touched in zip(outcome[name]["num_sums"], outcome[name]["num_touched"], strict=True)
        ]
        assert not any(found[first:]), found


def test_a_gradient_that_came_twice_waits_for_the_end(outcomes: Any) -> None:
    for outcome in outcomes[1]:
        expected = outcome["deeper"]["expected"]
        assert expected["middle.weight"] == 2 and expected["head.weight"] == 1 and expected["experts.0.weight"] == 0


def test_buckets_are_in_the_order_of_arrival(outcomes: Any) -> None:
    for outcome in outcomes[1]:
        order = outcome["freezes"]["order"]
        assert [name.split(".")[0] for name in order] == ["head"] * 2 + ["middle"] * 2 + ["first"] * 2
        assert [name for (name,) in outcome["freezes"]["buckets"]][:6] == order
        assert order == outcomes[1][0]["freezes"]["order"]


def test_freezing_in_turns_keeps_the_reducer(outcomes: Any) -> None:
    for outcome in outcomes[1]:
        assert outcome["freezes"]["reducers"] == 1
        assert outcome["adds"]["reducers"] == 2


def _add_unequally(folder: str) -> str:
    CASES["unequal"] = _adds_another
    with pytest.raises(evenload.errors.EvenloadError) as caught:
        _train("unequal", folder)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_different_parameters_added_are_named(tmp_path: Path) -> None:
    for message in run_ranks(_add_unequally, 2, str(tmp_path)):
        assert "DesyncError: the ranks train different parameters in step 3: rank 1 differs from rank 0" in message
