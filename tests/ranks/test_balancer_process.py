"""Rank 0 of many ranks decides in a process of its own: the same decisions, and no step waits for them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evenload.balance.decision import LEAD_STEPS, Decision, Observation
from evenload.balance.rank_costs import MANY_RANKS
from evenload.balance.rebalance import Balancer
from evenload.errors import ConfigError
from evenload.training.step.balancer_process import BalancerProcess, take_note
from tests.unit.training.test_planning import _planner

NUM_RANKS = MANY_RANKS + 12
SHARES = (16,) * NUM_RANKS
DEADLINE_S = 60.0
SPEEDS = [random.Random(rank).uniform(1, 2) for rank in range(NUM_RANKS)]


def _observation(step: int, shares: tuple[int, ...] = SHARES) -> Observation:
    rng = random.Random(step)
    seconds = tuple(
        0.01 * (share + 4) * speed * rng.gauss(1, 0.01) for share, speed in zip(shares, SPEEDS, strict=True)
    )
    return Observation(step, shares, 1, seconds)


def _wait(balancer: BalancerProcess) -> None:
    until(lambda: not balancer.is_busy)


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_the_process_decides_what_a_balancer_does_and_ends_with_its_owner() -> None:
    here = Balancer(sum(SHARES), NUM_RANKS)
    there = BalancerProcess(sum(SHARES), NUM_RANKS, None, shares=SHARES)
    flags = (False, *[True] * (NUM_RANKS - 1))
    here.quantum = there.quantum = 4
    here.may_leave = there.may_leave = flags
    expected: list[Decision] = []
    found: list[Decision] = []
    shares, step = SHARES, 0
    while len(expected) < 2:
        if step == 12:
            here.left_out.paid(0.5)
            there.paid(0.5)
            caps = (4,) * NUM_RANKS
            expected += filter(None, [here.set_caps(caps)])
            there.set_caps(caps)
        seen = _observation(step, shares)
        expected += filter(None, [here.observe(seen)])
        found += filter(None, [there.observe(seen)])
        _wait(there)
        shares = expected[-1].shares if expected else shares
        step += 1
    found += filter(None, [there.observe(_observation(step, shares))])
    assert found == expected and max(expected[0].shares) % 4 == 0
    assert expected[1].kind == "memory" and expected[1].num_micro > 1
    assert there.outlook()["over_equal"] > 1
    pid = _pid(there)
    del there
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_steps_during_a_decision_are_left_out_and_do_not_wait() -> None:
    balancer = BalancerProcess(sum(SHARES), NUM_RANKS, None, shares=SHARES)
    balancer.observe(_observation(0))
    _wait(balancer)
    os.kill(_pid(balancer), signal.SIGSTOP)  # a decision that takes long
    assert not any(balancer.observe(_observation(step)) for step in range(1, 200))
    assert balancer.is_busy
    os.kill(_pid(balancer), signal.SIGCONT)
    decision = None
    for step in range(200, 260):
        decision = decision or balancer.observe(_observation(step))
        _wait(balancer)
    assert decision is not None and sum(decision.shares) == sum(SHARES)


def test_a_process_that_was_killed_is_replaced_and_named() -> None:
    balancer = BalancerProcess(sum(SHARES), NUM_RANKS, None, shares=SHARES)
    balancer.observe(_observation(0))
    for attempt in range(5):
        if attempt < 4:
            first = _pid(balancer)
            os.kill(first, signal.SIGKILL)
            until(lambda: not balancer.is_busy)
            balancer.observe(_observation(1))
            kind, text = take_note(balancer) or ("", "")
            assert kind == "process_lost"
            assert ("another one measures anew" if attempt < 3 else "the shares stay as they are") in text
    assert balancer.observe(_observation(2)) is None and take_note(balancer) is None


def test_an_error_of_the_balancer_is_raised_in_the_step() -> None:
    balancer = BalancerProcess(sum(SHARES), NUM_RANKS, None, shares=SHARES)
    balancer.observe(Observation(0, SHARES[1:], 1, (0.1,) * NUM_RANKS))
    _wait(balancer)
    with pytest.raises(ConfigError, match="expected 140, one a rank"):
        balancer.observe(_observation(1))


def test_a_planner_of_many_ranks_decides_in_a_process_and_plans_two_steps_ahead() -> None:
    planner, announced = _planner(world_size=NUM_RANKS, batch_size=sum(SHARES))
    step, deadline_s = 0, time.monotonic() + DEADLINE_S
    while not planner.has_decision:
        assert time.monotonic() < deadline_s
        seen = _observation(step)
        planner.observe(step, planner.plan(0, step, step, 0, sum(SHARES)), seen.seconds, left_out=False)  # type: ignore[arg-type]
        time.sleep(0.002)
        step += 1
    assert planner.outlook()["over_equal"] > 1.05
    planner.sync_decision(step)
    ((decision, from_step),) = announced
    assert (decision.kind, from_step) == ("measured", step + LEAD_STEPS)
    assert planner.plan(0, 0, from_step - 1, 0, sum(SHARES)).shares == SHARES
    assert planner.plan(0, 0, from_step, 0, sum(SHARES)).shares == decision.shares


def _pid(balancer: BalancerProcess) -> int:
    assert balancer.pid is not None
    return balancer.pid
