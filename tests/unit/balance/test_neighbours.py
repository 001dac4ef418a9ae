from __future__ import annotations

import random
from statistics import median

import pytest

from evenload.balance.decision import Observation
from evenload.balance.neighbours import Key, NeighbourSearch
from evenload.balance.rebalance import Balancer
from tests.unit.balance.quota import QuotaRank, best_fixed, run_quota


def _two(per_sample_s: float, fixed_s: float, exchange_s: float, quota: float, noise: float) -> list[QuotaRank]:
    return [QuotaRank(per_sample_s, fixed_s, exchange_s, part, noise=noise) for part in (1.0, quota)]


@pytest.mark.parametrize("quota", [0.5, 0.25])
def test_steps_of_25_ms_under_a_quota_come_near_the_best_fixed_shares(quota: float) -> None:
    """Own seconds are 20, 30 or 40 ms there: a line through their medians stopped at 0.87 to 0.99 of the best."""
    ranks = _two(0.00014, 0.002, 0.001, quota, 0.05)
    ideal = round(270 / (1 + quota))
    best_s = best_fixed(ranks, [(n, 270 - n) for n in range(ideal - 8, ideal + 24, 4)], 150, 1)
    traces = [run_quota(ranks, 800, seed, balancer=Balancer(270, 2)) for seed in range(4)]
    parts = [best_s / trace.mean_s(400) for trace in traces]
    assert median(parts) >= 0.97 and min(parts) >= 0.95, parts
    assert max(sum(step >= 400 for step, _ in trace.decisions) for trace in traces) <= 24


@pytest.mark.parametrize(("quota", "noise"), [(0.5, 0.02), (0.25, 0.02), (0.25, 0.06)])
def test_steps_of_half_a_second_find_the_best_shares_within_40(quota: float, noise: float) -> None:
    ranks = _two(0.0098, 0.03, 0.02, quota, noise)
    ideal = round(64 / (1 + quota))
    best_s = best_fixed(ranks, [(n, 64 - n) for n in range(ideal - 1, ideal + 5)], 100, 1)
    parts = []
    for seed in range(5):
        trace = run_quota(ranks, 60, seed, balancer=Balancer(64, 2))
        parts.append(best_s / run_quota(ranks, 100, 1, shares=trace.shares[40]).mean_s(5))
    assert median(parts) >= 0.98 and min(parts) >= 0.94, parts


def _run(search: NeighbourSearch, key: Key, mean_s: float, first: int, count: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for step in range(first, first + count):
        own = tuple(mean_s * rng.gauss(1, 0.01) for _ in key[0])
        search.add(step, key, [own], max(own))


def test_a_move_that_made_the_step_longer_is_taken_back_and_not_repeated() -> None:
    search, old, new = NeighbourSearch(), ((40, 24), 1), ((44, 20), 1)
    _run(search, old, 1.0, 0, 20)
    search.begin(old, new)
    _run(search, new, 1.1, 20, 9)
    verdict = search.verdict(29, new)
    assert verdict is not None and verdict.back == old
    assert search.forbids(30, new, old)
    assert search.forbids(200, ((43, 21), 1), old)
    assert not search.forbids(200, ((38, 26), 1), old)
    search.forget(is_new=True)
    assert not search.forbids(201, new, old)


def test_a_move_that_helped_stays() -> None:
    search, old, new = NeighbourSearch(), ((40, 24), 1), ((44, 20), 1)
    _run(search, old, 1.0, 0, 20)
    search.begin(old, new)
    _run(search, new, 0.95, 20, 9)
    verdict = search.verdict(29, new)
    assert verdict is not None and verdict.back is None
    assert search.forbids(30, old, new), "it is known to take longer"


def test_a_speed_that_drifts_is_no_verdict() -> None:
    search, old, new = NeighbourSearch(), ((40, 24), 1), ((44, 20), 1)
    for step in range(24):
        search.add(step, old, [(1.0, 1.0)], 1 + 0.01 * step)
    search.begin(old, new)
    _run(search, new, 1.3, 24, 30)
    assert search.verdict(53, new) is None


def test_trials_become_rare_where_none_helps() -> None:
    """The rank that waits has a stair above its share: each sample more costs it half a step."""
    rng, balancer = random.Random(0), Balancer(64, 2, shares=(44, 20))
    shares, coming, moved = balancer.shares, [], []
    for step in range(3000):
        while coming and coming[0][0] <= step:
            shares = coming.pop(0)[1]
        seconds = (0.01 * shares[0] * rng.gauss(1, 0.02), (0.3 if shares[1] <= 20 else 0.7) * rng.gauss(1, 0.02))
        decision = balancer.observe(Observation(step, shares, 1, seconds))
        if decision is not None:
            coming.append((step + 2, decision.shares))
            moved.append(step)
    assert shares == (44, 20)
    assert sum(step >= 1000 for step in moved) <= 10, moved
