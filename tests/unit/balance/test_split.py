from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.balance import split
from evenload.balance.split import (
    Caps,
    even_shares,
    micro_shares,
    num_micro,
    scale_shares,
    slice_sizes,
    split_batch,
)
from evenload.balance.values import Cost, StepPlan
from evenload.errors import ConfigError

SECONDS = st.one_of(st.sampled_from([0.0, 0.1, 0.2, 0.5]), st.floats(0, 1))
COSTS = st.lists(st.builds(Cost, SECONDS, SECONDS), min_size=1, max_size=4)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def time_s(costs: list[Cost], shares: tuple[int, ...], count: int, may_leave: list[bool]) -> float:
    rows = zip(costs, shares, may_leave, strict=True)
    return max(0.0 if leaves and not n else cost.predict_s(n, count) for cost, n, leaves in rows)


def best_by_force(
    num_samples: int, costs: list[Cost], caps: list[int | None], count: int, may_leave: list[bool]
) -> float:
    return min(
        (
            time_s(costs, shares, count, may_leave)
            for shares in compositions(num_samples, len(costs))
            if all(cap is None or n <= count * cap for n, cap in zip(shares, caps, strict=True))
        ),
        default=float("inf"),
    )


@settings(max_examples=300, deadline=None)
@given(COSTS, st.integers(1, 12), st.integers(1, 4), st.data())
def test_split_equals_brute_force(costs: list[Cost], num_samples: int, count: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.sampled_from([None, 1, 2, 3, 5]), min_size=len(costs), max_size=len(costs)))
    may_leave = data.draw(st.lists(st.booleans(), min_size=len(costs), max_size=len(costs)))
    best = best_by_force(num_samples, costs, caps, count, may_leave)
    if best == float("inf"):
        with pytest.raises(ConfigError, match="use at least"):
            split_batch(num_samples, costs, caps, count, may_leave=may_leave)
        return
    split = split_batch(num_samples, costs, caps, count, may_leave=may_leave)
    assert split.expected_s == best
    assert time_s(costs, split.shares, count, may_leave) == best
    assert sum(split.shares) == num_samples
    assert all(cap is None or n <= count * cap for n, cap in zip(split.shares, caps, strict=True))
    assert split == split_batch(num_samples, costs, caps, count, may_leave=may_leave)


@settings(max_examples=150, deadline=None)
@given(COSTS, st.integers(1, 8), st.data())
def test_free_micro_batches_equal_brute_force_over_them_all(
    costs: list[Cost], num_samples: int, data: st.DataObject
) -> None:
    caps = data.draw(st.lists(st.sampled_from([None, 1, 2, 3]), min_size=len(costs), max_size=len(costs)))
    may_leave = data.draw(st.lists(st.booleans(), min_size=len(costs), max_size=len(costs)))
    split = split_batch(num_samples, costs, caps, may_leave=may_leave)
    by_count = {count: best_by_force(num_samples, costs, caps, count, may_leave) for count in range(1, num_samples + 1)}
    assert split.expected_s == min(by_count.values())
    assert split.num_micro == min(count for count, best in by_count.items() if best == split.expected_s)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1e-4, 1)), min_size=1, max_size=40),
    st.integers(1, 5000),
    st.integers(1, 30),
)
def test_large_splits_cannot_be_improved_by_moving_a_sample(
    costs: list[tuple[float, float]], num_samples: int, count: int
) -> None:
    ranks = [Cost(a, c) for a, c in costs]
    split = split_batch(num_samples, ranks, None, count)
    assert sum(split.shares) == num_samples
    # The maximum of rising functions is least where the slowest rank can give no sample to another.
    times = [cost.predict_s(n, count) for cost, n in zip(ranks, split.shares, strict=True)]
    for rank, time_s in enumerate(times):
        if time_s == split.expected_s and split.shares[rank] > count:
            others = [ranks[r].predict_s(split.shares[r] + 1, count) for r in range(len(ranks)) if r != rank]
            assert all(other >= split.expected_s for other in others)


@settings(max_examples=200, deadline=None)
@given(COSTS, st.integers(1, 400), st.integers(1, 4), st.integers(2, 16), st.data())
def test_coarse_shares_are_multiples_and_cost_at_most_a_quantum(
    costs: list[Cost], num_samples: int, count: int, quantum: int, data: st.DataObject
) -> None:
    caps = data.draw(st.one_of(st.none(), st.lists(st.integers(120, 400), min_size=len(costs), max_size=len(costs))))
    if caps is not None and count * sum(caps) < num_samples:
        return
    fine = split_batch(num_samples, costs, caps, count)
    coarse = split_batch(num_samples, costs, caps, count, quantum)
    assert sum(coarse.shares) == num_samples and min(coarse.shares) >= 0
    assert caps is None or all(n <= count * cap for n, cap in zip(coarse.shares, caps, strict=True))
    assert sum(n % quantum != 0 for n in coarse.shares) <= 1 or coarse == fine
    assert coarse.expected_s >= fine.expected_s
    if caps is None:
        worst = max(cost.predict_s(fine.shares[r] + quantum, count) for r, cost in enumerate(costs))
        assert coarse.expected_s <= max(fine.expected_s, worst)
    assert coarse == split_batch(num_samples, costs, caps, count, quantum)


def test_a_device_too_slow_for_one_sample_is_left_out() -> None:
    assert split_batch(32, [Cost(0, 0.01), Cost(0, 0.01), Cost(0.2, 0.1)]).shares == (16, 16, 0)


def test_a_device_that_leaves_costs_nothing_and_one_that_stays_what_its_first_samples_cost() -> None:
    costs = [Cost(0, 0.01), Cost(0.1, 0.002)]
    assert split_batch(4, costs).expected_s == pytest.approx(0.102)
    leaving = split_batch(4, costs, may_leave=[False, True])
    assert (leaving.shares, leaving.expected_s) == ((4, 0), pytest.approx(0.04))
    # A rank that leaves lets K rise: each micro-batch would cost the slow one 0.1 s more.
    capped = split_batch(40, [Cost(0, 0.01), Cost(0.3, 0.01)], [10, 30], may_leave=[False, True])
    assert (capped.shares, capped.num_micro, capped.expected_s) == ((40, 0), 4, pytest.approx(0.4))
    assert split_batch(40, [Cost(0, 0.01), Cost(0.3, 0.01)], [10, 30]).num_micro == 1


def test_equal_ranks_get_equal_shares_and_ties_go_to_the_lower_rank() -> None:
    assert split_batch(10, [Cost(0.1, 0.01)] * 4).shares == even_shares(10, 4) == (3, 3, 2, 2)
    assert split_batch(4, [Cost(0.1, 0.01)] * 4, None, 2).shares == (1, 1, 1, 1)


def test_caps_raise_the_number_of_micro_batches_only_where_it_pays() -> None:
    fast_but_small = [Cost(0.0, 0.01), Cost(0.0, 0.04)]
    assert split_batch(40, fast_but_small, [8, 8]).num_micro == 4
    costly = [Cost(0.4, 0.01), Cost(0.4, 0.04)]
    assert split_batch(40, costly, [8, None]).num_micro < 4


def test_a_cluster_of_a_thousand_ranks() -> None:
    costs = [Cost(0.001 * (r % 7), 0.0001 * (1 + r % 13)) for r in range(1000)]
    split = split_batch(1_000_000, costs)
    assert sum(split.shares) == 1_000_000
    continuous_s = (1_000_000 + sum(c.per_micro_s / c.per_sample_s for c in costs)) / sum(
        1 / c.per_sample_s for c in costs
    )
    assert continuous_s <= split.expected_s <= continuous_s + 0.0013


@given(st.integers(0, 500), st.integers(1, 20))
def test_slices_are_even_and_larger_first(num_samples: int, count: int) -> None:
    slices = slice_sizes(num_samples, count)
    assert sum(slices) == num_samples
    assert max(slices) - min(slices) <= 1
    assert list(slices) == sorted(slices, reverse=True)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 12))
def test_micro_shares_have_their_margins_and_are_as_even_as_integers_can_be(shares: list[int], count: int) -> None:
    slices = slice_sizes(sum(shares), count)
    caps = [max(1, -(-share // count)) for share in shares]
    micro = micro_shares(shares, slices, caps)
    plan = StepPlan(0, 0, 0, 0, 0, micro)
    assert plan.shares == tuple(shares)
    assert tuple(sum(row) for row in micro) == slices
    for row in micro:
        assert all(share // count <= n <= cap for n, share, cap in zip(row, shares, caps, strict=True))
    assert micro == micro_shares(shares, slices, caps)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=5))
def test_any_slices_are_solved_where_a_solution_exists(matrix: list[list[int]]) -> None:
    shares = [sum(row[r] for row in matrix) for r in range(3)]
    caps = [max(1, *(row[r] for row in matrix)) for r in range(3)]
    slices = [sum(row) for row in matrix]
    micro = micro_shares(shares, slices, caps)
    assert [sum(row) for row in micro] == slices
    assert [sum(row[r] for row in micro) for r in range(3)] == shares
    assert all(n <= cap for row in micro for n, cap in zip(row, caps, strict=True))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.lists(st.integers(1, 9), min_size=6))
def test_the_number_of_micro_batches_is_the_smallest_that_fits(shares: list[int], limits: list[int]) -> None:
    caps: Caps = limits[: len(shares)]
    count = num_micro(shares, caps)
    micro_shares(shares, slice_sizes(sum(shares), count), caps)
    if count > 1:
        with pytest.raises(ConfigError, match="use more micro-batches"):
            micro_shares(shares, slice_sizes(sum(shares), count - 1), caps)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(0, 300))
def test_scaled_shares_keep_the_proportions(shares: list[int], num_samples: int) -> None:
    scaled = scale_shares(shares, num_samples)
    assert sum(scaled) == num_samples
    for share, new in zip(shares, scaled, strict=True):
        assert abs(new - share * num_samples / sum(shares)) < 1
        assert share or not new
    if num_samples <= sum(shares):
        assert all(new <= share for share, new in zip(shares, scaled, strict=True))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: split_batch(8, [Cost(0, 1)] * 2, [0, 4]), "at least 1 sample"),
        (lambda: split_batch(8, [Cost(0, 1)] * 2, [4]), "one for each rank"),
        (lambda: split_batch(8, [Cost(0, float("nan"))]), "rank 0 costs"),
        (lambda: split_batch(8, [Cost(-1, 1)]), "rank 0 costs"),
        (lambda: split_batch(0, [Cost(0, 1)]), "global batch of 0"),
        (lambda: split_batch(8, []), "0 ranks"),
        (lambda: split_batch(8, [Cost(0, 1)], None, 0), "at least 1"),
        (lambda: micro_shares([4, 4], [4, 3]), "sum to 8"),
        (lambda: micro_shares([8, 0], [4, 4], [2, 2]), "rank 0 has 8"),
        (lambda: scale_shares([0, 0], 4), "expected shares"),
        (lambda: slice_sizes(4, 0), "micro-batches"),
        (lambda: even_shares(4, 0), "0 ranks"),
    ],
)
def test_wrong_use_is_told(call: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()  # type: ignore[operator]


def test_many_ranks_get_the_shares_that_lists_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        costs = [Cost(rng.choice((0.0, 0.01, 0.5)), rng.choice((0.0, 0.001, 0.003)) * rng.random()) for _ in range(200)]
        caps = [rng.choice((None, 4, 40)) for _ in costs]
        found = []
        for most in (128, 1000):
            monkeypatch.setattr(split, "_MANY_RANKS", most)
            found.append(split_batch(800, costs, caps, None if seed % 2 else 2))
        assert found[0] == found[1]
