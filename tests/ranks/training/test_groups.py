"""Process groups, the control channel and state on its way between ranks, over real gloo processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evenload.errors import CheckpointError, DesyncError, PeerLostError
from evenload.testing import run_ranks
from evenload.training.checkpoint.broadcast import broadcast_state
from evenload.training.checkpoint.registry import Registry
from evenload.training.comm.broadcast import broadcast
from evenload.training.comm.control import CAPACITY, Control, Operation
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.comm.link import LinkMeter
from evenload.training.launch.environment import detect
from evenload.training.parallel.model_split.buckets import BucketSegments


def _groups() -> tuple[Groups, int]:
    spec = detect()
    groups = Groups(Membership(0, spec.workers, spec.store), spec.rank, backend="gloo", timeout_s=20)
    return groups, spec.rank


def _sum(groups: Groups, value: float) -> float:
    tensor = torch.tensor([value])
    groups.sum_async(tensor).wait()
    return float(tensor)


def _abort() -> tuple[str, float]:
    groups, rank = _groups()
    if rank == 1:
        time.sleep(1.5)  # never joins the sum
        groups.abort("over")
        return "", 0.0
    pending = groups.sum_async(torch.ones(1000))
    threading.Timer(0.3, groups.abort, ("the generation was aborted",)).start()
    start = time.perf_counter()
    with pytest.raises(PeerLostError, match="aborted") as caught:
        pending.wait()
    return str(caught.value), time.perf_counter() - start


def test_abort_wakes_a_rank_that_waits_for_a_peer() -> None:
    (message, waited_s), _ = run_ranks(_abort, 2)
    assert "aborted" in message
    assert waited_s < 1.2


CALLS: dict[str, Callable[[Groups], object]] = {
    "broadcast": lambda groups: broadcast([torch.ones(3)], groups),
    "checkpoint": lambda groups: broadcast_state({"a": 1}, groups),
    "link": lambda groups: LinkMeter(groups, always=True).measure(torch.device("cpu")),
    "buckets": lambda groups: BucketSegments([nn.Linear(2, 2)], groups),
}


def _abort_in(names: list[str]) -> dict[str, float]:
    """Return after how many seconds a rank leaves each call, of which its only peer learns nothing."""
    spec = detect()
    took_s: dict[str, float] = {}
    membership = Membership(0, spec.workers, spec.store)
    groups = Groups(membership, spec.rank, backend="gloo", timeout_s=8.0, is_watched=False)
    for number, name in enumerate(names, 1):
        if spec.rank == 0:
            timer = threading.Timer(0.3, groups.abort, ("a rank is lost",))
            timer.start()
            began_s = time.monotonic()
            with pytest.raises(PeerLostError, match="a rank is lost"):
                CALLS[name](groups)
            took_s[name] = time.monotonic() - began_s
            timer.join()
        groups.rebuild(replace(membership, number=number), spec.rank)
    return took_s


def test_abort_wakes_a_rank_in_every_other_wait_for_a_peer() -> None:
    took_s = run_ranks(_abort_in, 2, list(CALLS))[0]
    assert sorted(took_s) == sorted(CALLS) and max(took_s.values()) < 3, took_s


def _late_transfer() -> list[float]:
    """A rank comes later than `timeout_s` to an exchange, a sum and a transfer, in which the other waits."""
    spec = detect()
    groups = Groups(Membership(0, spec.workers, spec.store), spec.rank, backend="gloo", timeout_s=1.0, is_watched=True)
    tensor, found = torch.full((1000,), 1.0 + spec.rank), []
    for _ in range(2):
        time.sleep(2.5 * spec.rank)
        found.append(float(Control(groups).exchange(Operation.ANY, [2.0])[1][0]))
        time.sleep(2.5 * spec.rank)
        groups.sum_async(tensor, on_host=True).wait()
        time.sleep(2.5 * spec.rank)
        if spec.rank:
            work = dist.isend(tensor, group=groups.control, group_dst=0)
        else:
            work = dist.irecv(tensor, group=groups.control, group_src=1)
        assert work is not None
        groups.begin_transfer(work).wait()
    if spec.rank == 0:
        with pytest.raises(RuntimeError, match=r"ime(d )?out"):  # the script's own collectives keep the limit
            dist.all_reduce(tensor)
    else:
        time.sleep(2.5)
    return found


def test_a_supervised_rank_waits_longer_than_the_limit_but_in_the_scripts_collectives() -> None:
    assert run_ranks(_late_transfer, 2) == [[2.0, 2.0]] * 2


def _desync() -> tuple[str, str]:
    groups, rank = _groups()
    control = Control(groups)
    control.set_position(1, 7 if rank == 0 else 8)
    with pytest.raises(DesyncError) as in_step:
        control.exchange(Operation.BACKWARD if rank == 0 else Operation.CLOSE)
    control.set_position(rank, -1)
    with pytest.raises(DesyncError) as between_steps:
        control.exchange(Operation.AGREE)
    groups.close()
    return str(in_step.value), str(between_steps.value)


def test_ranks_at_different_places_learn_who_does_what() -> None:
    (zero, between), other = run_ranks(_desync, 2)
    assert (zero, between) == other
    assert "rank 0 begins an epoch at epoch 0; rank 1 begins an epoch at epoch 1" in between
    assert "rank 0 is in step.backward at epoch 1, step 7" in zero
    assert "rank 1 has ended its script at epoch 1, step 8" in zero
    assert "run.any" in zero


def _exchange() -> Any:
    groups, rank = _groups()
    control = Control(groups)
    many = [float(rank * 1000 + index) for index in range(CAPACITY * 2 + 3)]
    rows = control.exchange(Operation.MEASURE, many)
    integers = control.agree([2**52 + 1, -3, 0] if rank == 0 else None)
    empty = control.agree([] if rank == 0 else None)
    groups.close()
    return rows, integers, empty


def test_exchanges_carry_any_number_of_values_and_exact_integers() -> None:
    for rows, integers, empty in run_ranks(_exchange, 2):
        assert rows == [[float(r * 1000 + i) for i in range(CAPACITY * 2 + 3)] for r in range(2)]
        assert integers == [2**52 + 1, -3, 0]
        assert empty == []


def _send_state() -> list[float]:
    groups, rank = _groups()
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    registry = Registry(lambda: 5)
    registry.register("model", model)
    registry.register("optimizer", optimizer)
    state = optimizer.state_dict()["state"][0]
    sent = [float(model.weight.sum()), float(state["exp_avg"].sum()), optimizer.param_groups[0]["lr"], 5]
    if rank == 0:
        began_s = time.monotonic()
        registry.send(groups, [1], {"much": torch.zeros(1 << 22)})
        assert time.monotonic() - began_s < 0.5  # rank 1 has not come yet
        with torch.no_grad():
            model.weight.zero_()
        registry.wait_until_sent()
    else:
        time.sleep(1)
        assert registry.receive(groups, source=0)["much"].numel() == 1 << 22
    groups.close()
    if rank == 0:
        return sent
    state = optimizer.state_dict()["state"][0]
    return [
        float(model.weight.sum()),
        float(state["exp_avg"].sum()),
        optimizer.param_groups[0]["lr"],
        registry.last_step,
    ]


def test_a_peers_state_arrives_whole_while_the_sender_goes_on() -> None:
    zero, one = run_ranks(_send_state, 2)
    assert zero == one


def test_a_registry_says_what_does_not_fit() -> None:
    registry = Registry(lambda: 0)
    model = nn.Linear(2, 2)
    registry.register("model", model)
    with pytest.raises(CheckpointError, match="two different objects"):
        registry.register("model", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="steps is 3, which has no state_dict"):
        registry.register("steps", 3)
    with pytest.raises(CheckpointError, match="ema would be lost"):
        registry.load({"model": model.state_dict(), "ema": {}})
    with pytest.raises(CheckpointError, match="does not fit"):
        registry.load({"model": nn.Linear(3, 2).state_dict()})
