"""Share assignments and plans: integers, the same on all ranks, ahead of time."""

from __future__ import annotations

import pytest

from evenload.balance.decision import LEAD_STEPS, Decision
from evenload.balance.memory_caps import FIRST_TRIAL, SINGLE_TRIES
from evenload.errors import ConfigError, DataError
from evenload.training.comm.control import Control
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.parallel.ddp import has_idle_rank
from evenload.training.step.planner import Planner


def _planner(
    balance: object = "auto", world_size: int = 3, batch_size: int = 32, micro_batch: object = "auto"
) -> tuple[Planner, list[tuple[Decision, int]]]:
    announced: list[tuple[Decision, int]] = []
    alone = Control(Groups(Membership(0, ("w",), ""), 0, backend="gloo", timeout_s=1))
    planner = Planner(
        alone,
        rank=0,
        world_size=world_size,
        batch_size=batch_size,
        balance=balance,  # type: ignore[arg-type]
        micro_batch=micro_batch,  # type: ignore[arg-type]
        announce=lambda decision, step: announced.append((decision, step)),
    )
    return planner, announced


def test_fixed_shares_and_a_ragged_batch_keep_their_proportions() -> None:
    planner, _ = _planner((24, 6, 2), micro_batch=8)
    plan = planner.plan(0, 3, 3, 96, 32)
    assert plan.shares == (24, 6, 2)
    assert plan.num_micro == 3
    assert [sum(row) for row in plan.micro] == [11, 11, 10]
    assert max(row[0] for row in plan.micro) <= 8
    ragged = planner.plan(0, 4, 4, 128, 10)
    assert sum(ragged.shares) == 10
    assert ragged.slice_of(0)[0] == 128


def test_a_decision_holds_two_steps_after_it_is_told_and_plans_ahead_change() -> None:
    planner, announced = _planner(world_size=2)
    step = 0
    while not planner.has_decision and step < 20:
        plan = planner.plan(0, step, step, 32 * step, 32)
        planner.observe(step, plan, [0.01 * plan.shares[0], 0.03 * plan.shares[1]], left_out=step == 0)
        step += 1
    assert planner.has_decision
    before, revision = planner.plan(0, step + 5, step + 5, 0, 32).shares, planner.revision()
    assert before == (16, 16)
    planner.sync_decision(step)
    assert planner.revision() > revision
    assert planner.plan(0, 0, step + LEAD_STEPS - 1, 0, 32).shares == (16, 16)
    assert planner.plan(0, 0, step + LEAD_STEPS, 0, 32).shares == (24, 8)
    ((decision, from_step),) = announced
    assert from_step == step + LEAD_STEPS
    assert decision.shares == (24, 8)
    assert not planner.has_decision


def test_a_rank_that_is_hopeless_in_its_first_steps_computes_no_further_one_of_equal_shares() -> None:
    planner, announced = _planner(world_size=2)
    for step in range(2):
        plan = planner.plan(0, step, step, 32 * step, 32)
        planner.observe(step, plan, [0.001 * plan.shares[0], 0.1 * plan.shares[1]], left_out=False)
    assert planner.has_decision
    planner.sync_decision(2)
    assert planner.plan(0, 2, 2, 64, 32).shares == (16, 16)
    assert planner.plan(0, 3, 3, 96, 32).shares == (31, 1)
    assert announced[0][1] == 3


def test_out_of_memory_halves_the_cap_of_the_rank_that_failed() -> None:
    planner, _ = _planner((24, 6, 2))
    plan = planner.plan(0, 0, 0, 0, 32)
    smaller = planner.lower_caps(plan, [True, False, False], 0)
    assert smaller.num_micro == 2
    assert smaller.shares == plan.shares
    assert smaller.attempt == 1
    assert max(row[0] for row in smaller.micro) <= 12
    assert planner.plan(0, 1, 1, 32, 32).num_micro == 2
    for _ in range(3):
        smaller = planner.lower_caps(smaller, [True, False, False], 0)
    assert smaller.num_micro == 24


def test_one_sample_that_does_not_fit_once_or_twice_is_no_end() -> None:
    """Another process may hold the memory for a moment."""
    planner, _ = _planner((24, 6, 2))
    plan = planner.plan(0, 0, 0, 0, 32)
    while max(row[0] for row in plan.micro) > 1:
        plan = planner.lower_caps(plan, [True, False, False], 0)
    for step in range(5):
        for _ in range(SINGLE_TRIES - 1):
            plan = planner.lower_caps(plan, [True, False, False], step)
            assert max(row[0] for row in plan.micro) == 1
    with pytest.raises(DataError, match=r"rank 0 ran out of memory 3 times in step 4 with one sample .* leave it out"):
        planner.lower_caps(plan, [True, False, False], 4)


def test_shares_that_do_not_fit_are_told() -> None:
    assert sum(_planner((24, 5, 2))[0].shares) == 32  # proportions
    with pytest.raises(ConfigError, match="2 shares, but there are 3 ranks"):
        _planner((24, 8))


def test_a_saved_assignment_is_taken_where_it_fits() -> None:
    planner, _ = _planner()
    planner.load_state_dict({"shares": [20, 8, 4], "num_micro": 1, "world_size": 3}, step=100)
    assert planner.plan(0, 0, 100, 0, 32).shares == (20, 8, 4)
    other, _ = _planner(world_size=2)
    other.load_state_dict({"shares": [20, 8, 4], "num_micro": 1, "world_size": 3}, step=100)
    assert other.plan(0, 0, 100, 0, 32).shares == (16, 16)


def test_a_compiled_model_gets_shares_in_larger_pieces() -> None:
    planner, _ = _planner(world_size=2, batch_size=1000)
    planner.coarsen()
    for step in range(20):
        plan = planner.plan(0, step, step, 1000 * step, 1000)
        planner.observe(step, plan, [0.01 * plan.shares[0], 0.0217 * plan.shares[1]], left_out=step == 0)
        if planner.has_decision:
            planner.sync_decision(step)
    shares = planner.plan(0, 0, 30, 0, 1000).shares
    assert sum(shares) == 1000
    assert sum(share % 15 != 0 for share in shares) <= 1
    assert 660 <= shares[0] <= 705


def test_caps_rise_again_on_trial_two_steps_ahead() -> None:
    planner, announced = _planner((24, 6, 2))
    planner.lower_caps(planner.plan(0, 0, 0, 0, 32), [True, False, False], 0)
    for step in range(FIRST_TRIAL + 1):
        plan = planner.plan(0, step, step, 0, 32)
        assert plan.num_micro == 2
        planner.observe(step, plan, [1.0, 1.0, 1.0], left_out=False)
    ((decision, from_step),) = announced
    assert from_step == FIRST_TRIAL + LEAD_STEPS
    assert "micro-batches 2 → 1 on trial" in decision.reason
    assert planner.plan(0, 0, from_step - 1, 0, 32).num_micro == 2
    plan = planner.plan(0, 0, from_step, 0, 32)
    assert plan.num_micro == 1
    assert planner.lower_caps(plan, [True, False, False], from_step).num_micro == 2
    assert planner.plan(0, 0, from_step + 1, 0, 32).num_micro == 2


def test_a_rank_that_leaves_is_tried_again_and_its_missing_times_stop_nothing() -> None:
    planner, announced = _planner(world_size=2, batch_size=64)
    planner.may_leave = [True, True]
    for step in range(600):
        plan = planner.plan(0, step, step, 64 * step, 64)
        seconds = [0.001 * plan.shares[0], 0.0 if 1 in plan.out else 0.1 + 0.002 * plan.shares[1]]
        planner.observe(step, plan, seconds, left_out=step == 0)
        if planner.has_decision:
            planner.sync_decision(step)
    kinds = [decision.kind for decision, _ in announced if decision.kind != "measured"]
    assert kinds[0] == "left_out" and "trial" in kinds
    assert planner.plan(0, 0, 600, 0, 64).out == (1,)


def test_a_rank_without_samples_in_the_last_micro_batch() -> None:
    plan = _planner((30, 2, 0))[0].plan(0, 0, 0, 0, 32)
    assert not has_idle_rank(plan, (0, 1))
    assert has_idle_rank(plan, (0, 1, 2))
    assert not has_idle_rank(_planner((24, 6, 2))[0].plan(0, 0, 0, 0, 32), (0, 1, 2))
