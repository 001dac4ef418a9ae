"""Ranks that leave the step where their share is 0: they report nothing, and are tried again at a bounded cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from evenload.balance.decision import Decision, Observation
from evenload.balance.rebalance import Balancer
from evenload.balance.values import Cost
from evenload.errors import ConfigError


@dataclass
class _Job:
    balancer: Balancer
    costs: list[Cost]
    price_s: float = 0.0
    """Of each return: the state is sent."""
    slow: Callable[[int, int], float] = lambda step, rank: 1.0
    seconds: list[float] = field(default_factory=list)
    shares: list[tuple[int, ...]] = field(default_factory=list)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    def run(self, num_steps: int, seed: int = 0, ask_at: int | None = None) -> None:
        rng, shares, coming, out = random.Random(seed), self.balancer.shares, [], set[int]()
        for step in range(num_steps):
            while coming and coming[0][0] <= step:
                shares = coming.pop(0)[1]
            back = {rank for rank in out if shares[rank]}
            out = {rank for rank, share in enumerate(shares) if not share and self.balancer.may_leave[rank]}
            own = tuple(
                None if rank in out else cost.predict_s(share, 1) * self.slow(step, rank) * rng.gauss(1, 0.02)
                for rank, (cost, share) in enumerate(zip(self.costs, shares, strict=True))
            )
            self.seconds.append(max(time_s for time_s in own if time_s is not None) + self.price_s * len(back))
            self.shares.append(shares)
            if step == ask_at:
                self.balancer.left_out.ask(1)
            decision = self.balancer.observe(Observation(step, shares, 1, own))
            if decision is not None:
                self.decisions.append((step, decision))
                coming.append((step + 1 + decision.lead_steps, decision.shares))

    def kinds(self) -> list[tuple[int, str]]:
        return [(step, decision.kind) for step, decision in self.decisions if decision.kind != "refined"]


def _balancer(world_size: int = 2, price_s: float = 0.0, leaving: bool = True, batch: int = 64) -> Balancer:
    balancer = Balancer(batch, world_size, may_leave=[False] + [leaving] * (world_size - 1))
    balancer.left_out.price_s = price_s
    return balancer


FIXED = [Cost(0.0, 0.001), Cost(0.1, 0.002)]
"""The second has 100 ms of fixed cost, more than the whole batch takes the first."""


def test_a_rank_that_leaves_costs_nothing_and_one_that_stays_its_fixed_cost() -> None:
    staying = _Job(_balancer(leaving=False), FIXED)
    staying.run(100)
    assert staying.seconds[-1] == pytest.approx(0.102, rel=0.1)
    leaving = _Job(_balancer(), FIXED)
    leaving.run(100)
    assert leaving.shares[-1] == (64, 0)
    assert leaving.seconds[-1] == pytest.approx(0.064, rel=0.1)
    (decision,) = [decision for _, decision in leaving.decisions if decision.kind == "left_out"]
    assert (decision.rank, decision.expected_s) == (1, pytest.approx(0.064, rel=0.05))


def test_a_rank_that_is_out_has_its_last_cost_and_growing_uncertainty() -> None:
    job = _Job(_balancer(), FIXED)
    job.run(40)
    assert job.balancer.costs is not None
    before = job.balancer.costs[1]
    job.balancer.observe(Observation(40, (64, 0), 1, (0.064, None)))
    after = job.balancer.costs[1]
    assert after.predict_s(1, 1) == pytest.approx(0.102, rel=0.1)
    assert after.per_sample_error_s > before.per_sample_error_s or before.per_sample_error_s == float("inf")


@pytest.mark.parametrize(("slower", "price_s"), [(100.0, 0.0), (100.0, 2.0), (300.0, 0.5)])
def test_trials_cost_at_most_two_percent_of_any_long_time(slower: float, price_s: float) -> None:
    costs = [Cost(0.002, 0.001), Cost(0.002 * slower, 0.001 * slower)]
    job = _Job(_balancer(price_s=price_s), costs, price_s)
    job.run(12_000)
    alone_s = costs[0].predict_s(64, 1)
    assert job.shares[-1] == (64, 0)
    out_since = next(step for step, decision in job.decisions if decision.kind == "left_out") + 3
    for begin in (out_since, 4_000, 8_000):
        spent = sum(job.seconds[begin:]) / (alone_s * len(job.seconds[begin:])) - 1
        assert spent <= 0.02, (begin, spent)
    trials = [step for step, decision in job.decisions if decision.kind == "trial" and decision.shares[1]]
    assert trials and trials[0] >= out_since + 100
    assert all(later - earlier > 128 for earlier, later in pairwise(trials))


def test_a_trial_far_dearer_than_expected_ends_at_its_second_step() -> None:
    # Steps are short, so two make a block; the trial ends with its second step all the same.
    def slow(step: int, rank: int) -> float:
        return 100.0 if rank == 1 and step >= 60 else 1.0

    job = _Job(_balancer(), [Cost(0.0, 0.00017), Cost(0.0, 0.004)], slow=slow)
    job.run(400, ask_at=200)
    (began,) = [step for step, decision in job.decisions if decision.kind == "trial" and decision.shares[1]]
    assert 200 <= began < 210
    assert 2 <= sum(shares[1] > 0 for shares in job.shares[began:]) <= 4  # of 9
    assert job.shares[-1] == (64, 0)


@pytest.mark.parametrize("fixed_s", [0.0, 0.37])
def test_a_hopeless_rank_computes_few_steps_at_first(fixed_s: float) -> None:
    # 0.6 s of a step of 11 ms: six steps of equal shares were 3.6 s.
    job = _Job(_balancer(), [Cost(0.0, 0.00017), Cost(fixed_s, (0.6 - fixed_s) / 32)])
    job.run(20)
    assert sum(shares == (32, 32) for shares in job.shares) <= 3  # the first warms up, the second shows it
    assert job.shares[3] == (63, 1)
    assert job.shares[-1] == (64, 0)
    assert fixed_s == 0.0 or sum(shares[1] > 0 for shares in job.shares) <= 5


def test_what_one_sample_takes_is_known_before_the_first_trial() -> None:
    job = _Job(_balancer(), [Cost(0.0, 0.00017), Cost(0.37, 0.007)])
    job.run(12_000)
    trials = [step for step, decision in job.decisions if decision.kind == "trial" and decision.shares[1]]
    assert len(trials) == 1  # when one percent of the time paid for it
    assert sum(job.seconds[6:]) <= 1.012 * len(job.seconds[6:]) * job.costs[0].predict_s(64, 1)


def test_one_disturbed_step_at_first_is_soon_forgotten() -> None:
    job = _Job(_balancer(), [Cost(0.0, 0.001)] * 2, slow=lambda step, rank: 50.0 if (step, rank) == (1, 1) else 1.0)
    job.run(60)
    assert (63, 1) in job.shares
    assert abs(job.shares[-1][0] - 32) <= 2
    assert not any(decision.kind == "left_out" for _, decision in job.decisions)


def test_one_disturbed_short_step_ends_no_trial() -> None:
    # A time slice of another program is longer than eight steps of 0.7 ms.
    def slow(step: int, rank: int) -> float:
        return 1.0 if rank == 0 else 300.0 if step < 300 else 120.0 if step == 1015 else 1.0

    job = _Job(_balancer(), [Cost(0.00005, 0.00001)] * 2, slow=slow)
    job.run(1_500, ask_at=1_000)
    assert job.shares[1_015][1] == 1
    assert [kind for _, kind in job.kinds() if kind != "trial"] == ["left_out", "returned"]


def test_each_of_the_short_steps_of_a_trial_is_paid() -> None:
    job = _Job(_balancer(), [Cost(0.0002, 0.00002), Cost(0.02, 0.002)])
    job.run(20_000)
    alone_s = job.costs[0].predict_s(64, 1)
    for begin in (100, 10_000):
        assert sum(job.seconds[begin:]) / (alone_s * len(job.seconds[begin:])) <= 1.02


def test_many_ranks_that_are_out_share_one_budget() -> None:
    costs = [Cost(0.002, 0.001)] + [Cost(0.2, 0.1)] * 15
    job = _Job(_balancer(16, price_s=0.2), costs, 0.2)
    job.run(6_000)
    assert job.shares[-1] == (64,) + (0,) * 15
    spent = sum(job.seconds[200:]) / (costs[0].predict_s(64, 1) * len(job.seconds[200:])) - 1
    assert spent <= 0.02, spent
    assert len({decision.rank for _, decision in job.decisions if decision.kind == "trial"}) >= 2


def test_a_rank_that_became_fast_returns_in_a_trial() -> None:
    def slow(step: int, rank: int) -> float:
        return 100.0 if rank == 1 and step < 200 else 1.0

    job = _Job(_balancer(price_s=0.05), [Cost(0.002, 0.001)] * 2, 0.05, slow)
    job.run(2_500)
    assert abs(job.shares[-1][0] - 32) <= 2
    (returned,) = [decision for _, decision in job.decisions if decision.kind == "returned"]
    assert returned.rank == 1
    assert returned.reason.startswith("rank 1 can help again: share 1 → ")


def test_a_rank_is_tried_at_once_when_told() -> None:
    def slow(step: int, rank: int) -> float:
        return 100.0 if rank == 1 and step < 60 else 1.0

    job = _Job(_balancer(), [Cost(0.002, 0.001)] * 2, slow=slow)
    job.run(90, ask_at=70)
    assert abs(job.shares[-1][0] - 32) <= 2
    assert [kind for step, kind in job.kinds() if step >= 70] == ["trial", "returned"]


def test_a_rank_that_is_out_is_tried_when_the_others_become_slower() -> None:
    costs = [Cost(0.0, 0.001), Cost(0.1, 0.002)]
    job = _Job(_balancer(), costs, slow=lambda step, rank: 10.0 if rank == 0 and step >= 60 else 1.0)
    job.run(120)
    assert job.shares[59] == (64, 0)
    assert job.shares[-1][1] > 20


def test_a_rank_out_since_a_resume_is_tried_soon() -> None:
    balancer = Balancer(64, 2, shares=(64, 0), may_leave=[False, True])
    job = _Job(balancer, [Cost(0.002, 0.001)] * 2)
    job.run(60)
    assert abs(job.shares[-1][0] - 32) <= 2


def test_a_trial_that_never_comes_is_given_up() -> None:
    balancer = _balancer()
    job = _Job(balancer, FIXED)
    job.run(40)
    balancer.left_out.ask(1)
    decisions = [balancer.observe(Observation(step, (64, 0), 1, (0.064, None))) for step in range(40, 140)]
    (trial,) = [decision for decision in decisions if decision is not None]
    assert trial.kind == "trial"
    assert balancer.shares == (64, 0)


def test_rank_0_stays() -> None:
    with pytest.raises(ConfigError, match="rank 0 stays"):
        Balancer(64, 2, may_leave=[True, True])


def test_a_rank_that_is_out_and_has_to_stay_is_called_back_once() -> None:
    balancer = _balancer(leaving=False)
    decisions = [balancer.observe(Observation(s, (64, 0), 1, (0.064, None))) for s in range(30)]
    (decision,) = [found for found in decisions if found is not None]
    assert (decision.kind, decision.rank, decision.shares) == ("returned", 1, (64, 0))
    assert decision.reason.startswith("rank 1 has to stay in the step: ")


def test_a_rank_without_samples_leaves_as_soon_as_it_may() -> None:
    balancer, rng = Balancer(64, 2, shares=(64, 0)), random.Random(0)

    def run(first: int) -> list[tuple[str, int | None, tuple[int, ...]]]:
        times = [(0.064 * rng.gauss(1, 0.01), 0.102 * rng.gauss(1, 0.01)) for _ in range(60)]
        found = [balancer.observe(Observation(first + i, (64, 0), 1, own)) for i, own in enumerate(times)]
        return [(decision.kind, decision.rank, decision.shares) for decision in found if decision is not None]

    assert run(0) == []
    balancer.may_leave = (False, True)
    assert run(60)[:1] == [("left_out", 1, (64, 0))]
