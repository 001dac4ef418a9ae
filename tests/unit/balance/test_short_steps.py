from __future__ import annotations

import itertools
import random
from statistics import median

import pytest

from evenload.balance.blocks import StepBlocks
from evenload.balance.decision import Observation
from evenload.balance.neighbours import NeighbourSearch
from evenload.balance.rebalance import Balancer
from tests.unit.balance.quota import QuotaRank, best_fixed, run_quota
from tests.unit.balance.short_steps import KINDS, LEAD, run_kind


@pytest.mark.parametrize("kind", KINDS)
def test_equal_ranks_with_short_steps_stay_equal(kind: str) -> None:
    traces = [run_kind(kind, seed, *size) for seed, size in enumerate([(2, 64), (2, 256), (4, 128), (2, 16)])]
    assert max(trace.farthest for trace in traces) <= 0.1, [set(trace.shares) for trace in traces]
    assert all(len(trace.notes) <= 1 for trace in traces)


@pytest.mark.parametrize(("quota", "period_s"), [(0.5, 0.005), (0.25, 0.005), (0.25, 0.01)])
def test_steps_of_5_ms_find_the_best_shares_within_two_seconds(quota: float, period_s: float) -> None:
    ranks = [QuotaRank(0.00012, 0.0003, 0.0003, part, period_s, noise=0.05) for part in (1.0, quota)]
    ideal = round(64 / (1 + quota))
    best_s = best_fixed(ranks, [(n, 64 - n) for n in range(ideal - 4, ideal + 7)], 600, 1)
    parts = []
    for seed in range(5):
        trace = run_quota(ranks, 1000, seed, balancer=Balancer(64, 2))
        parts.append(best_s / trace.mean_s(400))
    assert median(parts) >= 0.95 and min(parts) >= 0.92, parts


def test_a_rank_that_slows_down_between_short_steps_is_found() -> None:
    ranks = [QuotaRank(0.00012, 0.0003, 0.0003, noise=0.05)] * 2
    trace = run_quota(ranks, 3000, 0, balancer=Balancer(64, 2), slow=lambda step, rank: 1 + 2 * (rank and step >= 1000))
    assert all(step >= 1000 for step, _ in trace.decisions)
    assert abs(trace.shares[-1][0] - 48) <= 3 and trace.shares[1300][0] >= 44
    slower = next(decision for _, decision in trace.decisions if decision.kind == "slower")
    assert slower.rank == 1 and slower.factor is not None and slower.factor > 2.5


def test_too_short_steps_are_named_once_and_stay() -> None:
    rng, balancer, notes = random.Random(0), Balancer(64, 2), []
    for step in range(20_000):
        seconds = 0.0001 * rng.gauss(1, 0.05), 0.0003 * rng.gauss(1, 0.05)
        assert balancer.observe(Observation(step, (32, 32), 1, seconds, 0.0013)) is None
        notes.append(balancer.take_note())
    assert [note for note in notes if note] == [
        "steps of 1.3 ms are too short to balance: no rank computes longer than 0.3 ms in one, which doesn't show its "
        "speed; the shares stay"
    ]


def test_a_move_without_its_gain_is_taken_back_and_the_next_one_waits() -> None:
    """Rank 1 is slower by a fixed part, which no share takes from it."""
    rng, balancer = random.Random(0), Balancer(64, 2)
    shares, coming, moves = balancer.shares, [], []
    for step in range(6000):
        while coming and coming[0][0] <= step:
            shares = coming.pop(0)[1]
        seconds = (0.002 * rng.gauss(1, 0.03), 0.003 * rng.gauss(1, 0.03))
        decision = balancer.observe(Observation(step, shares, 1, seconds, max(seconds) + 0.0003))
        if decision is not None:
            coming.append((step + LEAD, decision.shares))
            moves.append((step, decision))
    assert moves[0][1].shares == (35, 29) and moves[0][1].reason.endswith("on trial: shares 32, 32 → 35, 29 of 64")
    assert moves[1][1].shares == (32, 32)
    assert "the last move did not make the step shorter (3." in moves[1][1].reason
    assert {decision.shares for _, decision in moves} == {(35, 29), (32, 32)}
    waits = [later[0] - earlier[0] for earlier, later in zip(moves[1::2], moves[2::2], strict=False)]
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(waits)), waits


def test_gains_are_foreseen_only_where_steps_are_long() -> None:
    for per_sample_s, foresees in ((0.00002, False), (0.001, True)):
        balancer = Balancer(64, 2)
        for step in range(60):
            balancer.observe(Observation(step, (32, 32), 1, (32 * per_sample_s,) * 2, 33 * per_sample_s))
        assert balancer.foresees == foresees
        assert balancer.rest_s == pytest.approx(per_sample_s)


def test_blocks_last_long_enough_and_keep_splits_apart() -> None:
    blocks, found = StepBlocks(), []
    for step in range(100):
        shares = (32, 32) if step < 50 else (40, 24)
        found.append(blocks.add(Observation(step, shares, 1, (0.001, 0.002 if step % 2 else 0.001), 0.002)))
    merged = [block for block in found if block is not None]
    assert merged[0].num_steps == 1 and all(block.num_steps == 8 for block in merged[1:])
    assert merged[1].seconds == pytest.approx((0.001, 0.0015)) and merged[1].first_step == 1
    assert {block.first_step for block in merged if block.shares == (40, 24)} == set(range(50, 98, 8))


def test_steps_that_other_programs_stretch_are_short_ones() -> None:
    blocks = StepBlocks()
    steps = [Observation(step, (1, 1), 1, (0.03, 0.002), 0.031, delay_s=0.02875) for step in range(600)]
    merged = [block for block in map(blocks.add, steps) if block is not None]
    assert blocks.is_short and {block.num_steps for block in merged[1:]} == {8}


def test_long_steps_are_not_merged() -> None:
    blocks = StepBlocks()
    steps = [Observation(step, (1, 1), 1, (0.016, 0.02)) for step in range(20)]
    assert [blocks.add(step) for step in steps] == steps


def test_a_move_that_must_bring_a_gain_goes_back_without_one() -> None:
    for gain, goes_back in ((0.0, True), (0.02, True), (0.08, False)):
        rng, search = random.Random(0), NeighbourSearch()
        old, new = ((32, 32), 1), ((35, 29), 1)
        for step in range(30):
            search.add(step, old, [(1.0, 1.0)], rng.gauss(1, 0.02))
        search.begin(old, new, least_saved_s=0.04)
        verdict = None
        for step in range(30, 90):
            search.add(step, new, [(1.0, 1.0)], rng.gauss(1 - gain, 0.02))
            verdict = verdict or search.verdict(step, new)
        assert verdict is not None and (verdict.back == old) == goes_back
        assert search.may_try(90) != goes_back
