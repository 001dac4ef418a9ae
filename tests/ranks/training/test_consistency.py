"""Ranks that no longer hold the same are found within N steps, and told by name; what may differ is left alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import DivergenceError
from evenload.testing import run_ranks
from evenload.training.compute.checksums import QueuedScalars, fold, queue_checksums
from evenload.training.compute.replicated_state import replicated_state
from evenload.training.step.consistency import Consistency, disagreements, tolerances

EVERY = 3


class Net(nn.Module):
    """A bit of everything that a state can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.last = nn.Linear(32, 1)
        self.again = self.last
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(7, dtype=torch.bool))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.tracks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tracks:
            self.average.lerp_(x.detach().mean(0), 0.1)  # of this rank's samples alone
        y = self.frozen(self.norm(self.first(x)).relu())
        return self.again(y) + self.narrow.float().sum() * 1e-3


def flip(tensor: torch.Tensor, bit: int = 0, place: int = 1) -> None:
    tensor.detach().view(-1).view(torch.uint8)[place * tensor.element_size()] ^= 1 << bit


def swap(tensor: torch.Tensor) -> None:
    flat = tensor.detach().view(-1)
    flat[[3, 17]] = flat[[17, 3]]


def drift(optimizer: torch.optim.Optimizer, model: Net) -> None:
    optimizer.state[model.first.bias]["exp_avg"][2] += 1e-4


def other_lr(optimizer: torch.optim.Optimizer, _: Net) -> None:
    optimizer.param_groups[0]["lr"] *= 1.0 + 1e-6


Harm = Callable[[torch.optim.Optimizer, Net], Any]
HARMS: dict[str, tuple[Harm, str]] = {
    "lowest bit of a weight": (lambda _, m: flip(m.first.weight), "parameter first.weight"),
    "two values swapped": (lambda _, m: swap(m.first.weight), "parameter first.weight"),
    "a frozen weight": (lambda _, m: flip(m.frozen.weight, place=900), "parameter frozen.weight"),
    "a tied weight": (lambda _, m: flip(m.again.bias, place=0), "parameter last.bias"),
    "bfloat16": (lambda _, m: flip(m.narrow), "parameter narrow"),
    "a sign of zero": (lambda _, m: m.average.data.neg_(), "buffer average"),
    "a counter": (lambda _, m: m.counter.add_(1), "buffer counter"),
    "a mask": (lambda _, m: m.mask.logical_not_(), "buffer mask"),
    "running statistics": (lambda _, m: flip(m.norm.running_var, bit=6), "buffer norm.running_var"),  # not rounded away
    "optimizer state": (drift, "parameter first.bias"),
    "learning rate": (other_lr, "parameter first.weight"),
}


def heal(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """All ranks as rank 0."""
    model.tracks = False
    state = [value for held in optimizer.state.values() for value in held.values()]
    for tensor in (*model.parameters(), *model.buffers(), *state):
        wire = (
            tensor.detach().reshape(-1).view(torch.uint8)
            if tensor.dim()
            else tensor.detach().reshape(1).view(torch.uint8)
        )
        dist.broadcast(wire, 0)
        tensor.data.copy_(wire.view(tensor.dtype).view(tensor.shape))
    optimizer.param_groups[0]["lr"] = 1e-3


def make_job(folder: str, **settings: Any) -> Any:
    run = evenload.init(project_dir=folder, seed=0, **settings)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(8000, 8, generator=g), torch.randn(8000, 1, generator=g))
    model, loader = run.prepare(Net(), DataLoader(data, batch_size=16))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    def loss_fn(batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    return run, model, loader, optimizer, loss_fn


def harmed_one_after_the_other(folder: str, rank: int) -> dict[str, tuple[int, str]]:
    """Does each harm to one rank; by its name, after how many steps it was found, and what was told."""
    run, model, loader, optimizer, loss_fn = make_job(folder, check_every=EVERY)
    found: dict[str, tuple[int, str]] = {}
    names = iter([*HARMS, "a buffer of the rank's own samples"])
    now, since, calm = "", 0, 0
    for step in loader:
        if not now and calm > 3:
            now = next(names, "")
            if not now:
                break
            since = step.index
            if now in HARMS:
                if run.rank == rank:
                    HARMS[now][0](optimizer, model)
            else:
                model.tracks = True
        try:
            step.backward(loss_fn)
        except DivergenceError as error:
            assert now, error
            found[now] = (step.index - since, str(error))
            heal(model, optimizer)
            now, calm = "", 0
            continue
        optimizer.step()
        optimizer.zero_grad()
        calm += 1
        assert not now or step.index - since <= EVERY, f"{now} was not found"
    run.close()
    return found


def test_every_harm_to_one_rank_is_found_within_n_steps_and_named(tmp_path: Path) -> None:
    first, second = run_ranks(harmed_one_after_the_other, 2, str(tmp_path / "run"), 1)
    assert first == second  # both are told the same
    assert set(first) == {*HARMS, "a buffer of the rank's own samples"}
    for name, (_, expected) in HARMS.items():
        steps, told = first[name]
        assert 0 <= steps <= EVERY
        assert expected in told and told.startswith("ranks 0 and 1 no longer hold the same model"), (name, told)
        assert f"Usual causes for a {expected.split()[0]}" in told
        assert "all were equal at step" in told
    assert "1 of 15 parameters and buffers differs: buffer average" in first["a buffer of the rank's own samples"][1]
    assert "call model.eval() before, or let all ranks" in first["a buffer of the rank's own samples"][1]
    assert "1 of 15 parameters and buffers differs" in first["lowest bit of a weight"][1]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event.get("kind") == "divergence"]
    assert len(told) == len(first) and told[0]["fields"]["tensors"] == ["first.weight"]


def harmed_among_three(folder: str) -> str:
    run, model, loader, optimizer, loss_fn = make_job(folder, check_every=2)
    try:
        for step in loader:
            if step.index == 1 and run.rank == 1:
                flip(model.first.weight)
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            if step.index == 8:
                break
    except DivergenceError as error:
        return str(error)
    return "went on"


def test_of_three_ranks_the_one_that_differs_is_named(tmp_path: Path) -> None:
    told = run_ranks(harmed_among_three, 3, str(tmp_path / "run"))
    assert told[0] == told[1] == told[2]
    assert told[0].startswith(
        "rank 1 no longer holds the same model as the other ranks: at step 1 (all were equal at step 0) 1 of 15 "
    )


def on_unlike_devices(folder: str) -> tuple[int, str]:
    """Rank 1 rounds otherwise, and says by its number of threads that it is another device; then a sign flips."""
    run, model, loader, optimizer, loss_fn = make_job(folder, check_every=2)
    torch.set_num_threads(1 + run.rank)
    g = torch.Generator().manual_seed(5)
    for step in loader:
        if run.rank == 1:
            for p in model.first.parameters():
                p.data.mul_(1 + 1e-7 * torch.randn(p.shape, generator=g))
        if step.index == 11 and run.rank == 1:
            model.first.weight.data.view(-1)[70] *= -1
        try:
            step.backward(loss_fn)
        except DivergenceError as error:
            return step.index, str(error)
        optimizer.step()
        optimizer.zero_grad()
        if step.index == 14:
            break
    return -1, "went on"


def test_unlike_devices_may_round_but_not_differ(tmp_path: Path) -> None:
    told = run_ranks(on_unlike_devices, 2, str(tmp_path / "run"))
    assert told[0] == told[1]
    assert told[0][0] == 12 and "parameter first.weight (norm" in told[0][1], told


def legitimate(folder: str) -> int:
    """Differences that are none: statistics left to each rank, caches, what the user names; and nothing is looked at."""
    run = evenload.init(project_dir=folder, seed=0, batch_norm="local", check_every=1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.register_buffer("own", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    data = TensorDataset(torch.randn(160, 4, generator=torch.Generator().manual_seed(0)), torch.ones(160, 1))
    model, loader = run.prepare(model, DataLoader(data, batch_size=16))
    model.own += run.rank
    model.cache += run.rank
    model.register_buffer("grown", torch.zeros(run.rank + 1), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in loader:
        step.backward(lambda batch: functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    return int(model[1].num_batches_tracked)


def test_what_may_differ_is_left_alone(tmp_path: Path) -> None:
    assert run_ranks(legitimate, 2, str(tmp_path / "run")) == [10, 10]


def another_structure(folder: str) -> str:
    run, model, loader, _, loss_fn = make_job(folder)
    if run.rank == 1:
        model.register_buffer("late", torch.zeros(2))
        model.counter = torch.zeros(3)
    try:
        for step in loader:
            step.backward(loss_fn)
            break
    except DivergenceError as error:
        return str(error)
    return "went on"


def test_another_structure_is_told_by_name(tmp_path: Path) -> None:
    told = run_ranks(another_structure, 2, str(tmp_path / "run"))
    assert told[0].count("different shape or dtype, or missing, on rank 1") == 2
    assert "late" in told[0] and "counter" in told[0] and "not compared before" in told[0]


def switched_off(folder: str) -> tuple[bool, Any]:
    run, model, loader, _, loss_fn = make_job(folder, check_every="off")
    flip(model.first.weight, bit=run.rank)
    for step in loader:
        step.backward(loss_fn)
        model.zero_grad()
        if step.index == 12:
            break
    return True, run._context.engine._consistency._last_step


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    assert run_ranks(switched_off, 2, str(tmp_path / "run")) == [(True, -1)] * 2


class TwoRanks:
    """The exchange of two ranks of which the other, `others_row`, always answers the same."""

    def __init__(self, others_row: float) -> None:
        self.others_row = others_row

    def exchange(self, operation: Any, row: list[float]) -> list[list[float]]:
        return [list(row), [self.others_row] * len(row)]


def when_due(consistency: Consistency, steps: range) -> list[int]:
    found = []
    for step in steps:
        consistency.begin(step, first_call=True, ranks=(0, 1))
        assert consistency.key() == consistency.key()  # an attempt done again tells the same
        if consistency.key() > 0:
            found.append(step)
    return found


def test_it_is_due_in_the_first_two_steps_and_in_every_nth() -> None:
    consistency = Consistency(10, TwoRanks(0.0), print)  # type: ignore[arg-type]
    consistency.attach(lambda: replicated_state([nn.Linear(2, 2)]))
    assert when_due(consistency, range(403, 432)) == [403, 404, 410, 420, 430]
    assert when_due(consistency, range(430, 431)) == []  # a window stays at its step
    for first_call, world_size in ((False, 2), (True, 1)):
        consistency.begin(440, first_call=first_call, ranks=range(world_size))
        assert consistency.key() == 0
    consistency.check(440, [0.0, 0.0])
    consistency.check(440, [0.0, 5.0])  # a rank that has just come


def test_with_a_gpu_on_some_rank_numbers_are_read_one_step_later() -> None:
    model = nn.Linear(2, 2)
    consistency = Consistency(10, TwoRanks(1.0), print)  # type: ignore[arg-type]
    consistency.attach(lambda: replicated_state([model]))
    assert when_due(consistency, range(403, 432)) == [404, 405, 411, 421, 431]
    consistency.begin(440, first_call=True, ranks=(0, 1))
    before = fold(QueuedScalars(queue_checksums(replicated_state([model]).values())).read())
    with torch.no_grad():
        model.weight += 1  # an optimizer's step
    consistency.begin(441, first_call=True, ranks=(0, 1))
    assert consistency.key() == before
    every = Consistency(1, TwoRanks(1.0), print)  # type: ignore[arg-type]
    every.attach(lambda: replicated_state([model]))
    assert when_due(every, range(5)) == [1, 2, 3, 4]


def test_the_state_holds_each_tensor_once_by_name() -> None:
    model = Net()
    names = list(replicated_state([model]))
    # On one rank no BatchNorm takes its statistics over all of them.
    assert len(names) == 12 and not any(name.startswith("norm.r") for name in names)
    assert {"first.weight", "frozen.bias", "narrow", "last.weight", "counter", "mask"} <= {*names}
    assert not {"again.weight", "cache"} & {*names}
    other = nn.Linear(2, 2)
    other.weight = model.first.bias  # shared between models
    assert {"0.first.bias", "1.bias"} <= {*replicated_state([model, other])} and "1.weight" not in replicated_state(
        [model, other]
    )


def test_the_ranks_named_are_those_against_most() -> None:
    marks = {
        "same": [(1.0, 2.0)] * 4,
        "w": [(1.0, 0.0), (2.0, 0.0), (1.0, 0.0), (9.0, 0.0)],
        "nan": [(math.nan, 0.0)] * 4,
    }
    assert disagreements({k: marks[k] for k in ("same", "w")}, None) == {"w": (1, 3)}
    assert disagreements(marks, {"same": 0.0, "w": 1.5, "nan": 0.0}) == {"w": (3,)}
    assert disagreements({"two": [(1.0, 0.0), (2.0, 0.0)]}, None) == {"two": (1,)}
    assert disagreements({"x": [(1.0, 0.0), (math.nan, 0.0)]}, {"x": 9.0}) == {"x": (1,)}


def test_tolerances_follow_the_dtype_and_what_the_model_is_like() -> None:
    state = {"w": torch.ones(100), "d": torch.ones(100).double(), "zero": torch.zeros(100), "n": torch.ones(3).long()}
    marks = {"w": [(0.0, 10.0)], "d": [(0.0, 10.0)], "zero": [(0.0, 0.0)], "n": [(5.0, 0.0)]}
    found = tolerances(state, marks)
    assert found["w"] == pytest.approx(1000 * 2**-23 * 10, rel=0.2)
    assert found["d"] < 1e-11 and found["n"] == 0
    assert 0 < found["zero"] < found["w"]


@pytest.mark.parametrize("value", [0, -1, "on", 2.5, True, None])
def test_a_wrong_setting(value: Any) -> None:
    from evenload.config import resolve
    from evenload.errors import ConfigError

    if value is None:
        assert resolve({"check_every": None}, {}).check_every == 10
        return
    with pytest.raises(ConfigError, match="expected off or a number of steps, at least 1"):
        resolve({"check_every": value}, {})
