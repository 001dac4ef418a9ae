"""The first micro-batch of the next step is copied while the present one computes: once, and only under the plan that holds.

The order of calls is the same on every device that is not the CPU, so `meta` shows it without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from evenload.balance.values import StepPlan
from evenload.training.data import global_batch, read_ahead
from evenload.training.data.batches import open_container
from evenload.training.data.device_copies import StartedCopy, finish_copy, start_copy
from tests.unit.data.fakes import Board, Numbers, Planner, lockstep, make_ranks, plan_of

META = torch.device("meta")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The samples of each copy, in the order in which they were started."""
    copies: list[list[int]] = []

    def start(data: Any, device: torch.device) -> StartedCopy:
        copies.append(data.tolist())
        return start_copy(data, device)

    monkeypatch.setattr(read_ahead, "start_copy", start)
    monkeypatch.setattr(global_batch, "start_copy", start)
    return copies


def ranks_of(board: Board, num_workers: int = 1, num_samples: int = 20, device: torch.device = META) -> Any:
    data = DataLoader(Numbers(num_samples), batch_size=4, num_workers=num_workers)
    return make_ranks(board, data, device=device)


def test_the_next_step_is_copied_ahead_once(started: list[list[int]]) -> None:
    for step in lockstep(ranks_of(Board((1,), num_micro=2))):
        (batch,) = step
        low = 4 * batch.epoch_step
        started.clear() if batch.epoch_step == 0 else None
        for _ in range(2):  # two calls of backward
            for micro_index in range(2):
                assert batch.micro(micro_index).data.device == META
            batch.copy_next()
        first = [] if batch.epoch_step else [[low, low + 1]]
        following = [] if batch.epoch_step == 4 else [[low + 4, low + 5]]
        assert started == [*first, [low + 2, low + 3], *following, [low, low + 1], [low + 2, low + 3]]
        started.clear()


def test_without_workers_or_on_the_cpu_nothing_is_read_ahead(started: list[list[int]]) -> None:
    on_cpu = ranks_of(Board((1,)), device=torch.device("cpu"))
    for ranks, num_copies in ((ranks_of(Board((1,)), num_workers=0), 5), (on_cpu, 0)):  # a CPU has nothing to copy to
        started.clear()
        for step in lockstep(ranks):
            step[0].micro(0)
            step[0].copy_next()
        assert started == [[low, low + 1, low + 2, low + 3] for low in range(0, 20, 4)][:num_copies]


def test_a_changed_plan_drops_the_copy(started: list[list[int]]) -> None:
    board = Board((1, 3))
    ranks = ranks_of(board)
    used = []
    for step in lockstep(ranks):
        started.clear()
        for batch in step:
            batch.micro(0)
        used.append([list(samples) for samples in started])
        for batch in step:
            batch.copy_next()
        if step[0].epoch_step == 1:
            board.decide(step[0].global_step + 1, (3, 1))
    # Step 0 copies its own; step 1 finds its own copied; step 2 has another plan; step 3 finds its own.
    assert used == [[[0], [1, 2, 3]], [], [[8, 9, 10], [11]], [], []]


def test_a_rank_that_is_left_out_next_copies_nothing(started: list[list[int]]) -> None:
    class Leaving(Planner):
        def plan(self, epoch: int, epoch_step: int, *where: int) -> StepPlan:
            return replace(super().plan(epoch, epoch_step, *where), out=(1,) if epoch_step else ())

    class LeavingBoard(Board):
        def planner(self, rank: int) -> Planner:
            return Leaving(self, rank)

    for step in lockstep(ranks_of(LeavingBoard((4, 0)))):
        if step[0].epoch_step:
            assert step[1].spans() == []
        for batch in step:
            started.clear()
            batch.copy_next()
        assert started == []


def test_a_step_planned_anew_drops_the_copies(started: list[list[int]]) -> None:
    (rank,) = ranks_of(Board((1,)))
    used = []
    for step in lockstep([rank]):
        (batch,) = step
        started.clear()
        batch.micro(0)
        used.append(len(started))
        batch.copy_next()
        if batch.epoch_step == 1:  # memory ran out: the step is done again in smaller micro-batches
            plan = batch.plan
            batch.replan(plan_of(plan.epoch, plan.step, plan.start, 4, (1,), 2))
            assert [batch.whole(m).device for m in range(2)] == [META, META]
    assert used == [1, 0, 1, 0, 0]


def test_an_error_in_the_next_steps_samples_is_raised_in_the_next_step() -> None:
    class Failing(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 6:
                raise ValueError("sample 6")
            return index

    (rank,) = make_ranks(Board((1,)), DataLoader(Failing(12), batch_size=4, num_workers=1), device=META)
    iterator = lockstep([rank])
    (first,) = next(iterator)
    first.micro(0)
    first.copy_next()
    (second,) = next(iterator)
    with pytest.raises(ValueError, match="sample 6"):
        second.micro(0)
    iterator.close()
    rank.close()


def test_the_end_of_the_epoch_and_a_loop_that_is_left() -> None:
    (rank,) = ranks_of(Board((1,)), num_samples=8)
    for batch in rank:
        batch.micro(0)
        batch.copy_next()
        rank.commit(batch)
        break
    steps = [batch.micro(0).num_samples for step in lockstep([rank]) for batch in step]
    assert steps == [4, 4]
    rank.close()


@pytest.mark.parametrize("device", [META, torch.device("cpu")])
def test_containers_are_new_and_other_values_stay(device: torch.device) -> None:
    batch = {"x": torch.zeros(2), "name": "one", "parts": [torch.ones(1), 3]}
    copy = start_copy(batch, device)
    moved = finish_copy(copy, device)
    assert moved["x"].device == device and moved["parts"][0].device == device
    assert (moved["name"], moved["parts"][1]) == ("one", 3)
    assert open_container(moved) is not None and moved is not batch and moved["parts"] is not batch["parts"]
    assert batch["x"].device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_runs_beside_the_computation_and_is_right(pinned: bool) -> None:
    device = torch.device("cuda", 0)
    busy = torch.randn(4096, 4096, device=device)
    found = []
    for value in range(20):
        data = torch.full((1 << 20,), float(value))
        copy = start_copy([data.pin_memory() if pinned else data], device)
        for _ in range(4):
            busy = (busy @ busy).clamp_(-1, 1)
        (moved,) = finish_copy(copy, device)
        found.append(moved.sum() / (1 << 20))
        moved.zero_()
    assert [float(value) for value in found] == [float(value) for value in range(20)]


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_computation() -> None:
    device = torch.device("cuda", 0)
    busy = torch.randn(8192, 8192, device=device)
    data = torch.zeros(1 << 24).pin_memory()
    finish_copy(start_copy(data, device), device)
    torch.cuda.synchronize(device)
    for _ in range(20):
        busy = (busy @ busy).clamp_(-1, 1)
    copy = start_copy(data, device)
    computed = torch.cuda.Event()
    computed.record(torch.cuda.current_stream(device))
    assert copy.event is not None
    copy.event.synchronize()
    assert not computed.query(), "the copy ended after the computation that was launched before it"


@pytest.mark.gpu
def test_steps_on_a_gpu_hold_the_same_samples() -> None:
    device = torch.device("cuda", 0)
    for options in ({}, {"pin_memory": True}):
        data = DataLoader(Numbers(37), batch_size=8, shuffle=True, num_workers=1, **options)
        found = {}
        for where in (torch.device("cpu"), device):
            ranks = make_ranks(Board((2, 1), num_micro=2), data, device=where)
            found[where] = []
            for step in lockstep(ranks):
                for batch in step:
                    found[where] += [batch.micro(m).data.tolist() for m in range(2)]
                    batch.copy_next()
        assert found[device] == found[torch.device("cpu")]
