from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.balance.cost import CostSample, OverheadRatio, fit_cost


def points(a: float, c: float, shares: list[int], *, repeat: int, sigma: float, seed: int = 0) -> list[CostSample]:
    rng = random.Random(seed)
    return [
        CostSample(step, n, 1, (a + c * n) * (1 + rng.gauss(0, sigma)))
        for step, n in enumerate(n for n in shares for _ in range(repeat))
    ]


@given(st.floats(0, 1), st.floats(0.01, 1), st.integers(1, 4))
def test_without_noise_the_fit_is_the_cost(a: float, c: float, num_micro: int) -> None:
    steps = [
        CostSample(i, n, k, k * a + c * n)
        for i, (n, k) in enumerate([(8, num_micro), (16, num_micro), (32, num_micro)] * 3)
    ]
    fit = fit_cost(steps)
    for n in (8, 16, 32):
        assert fit.cost.predict_s(n, num_micro) == pytest.approx(num_micro * a + c * n, rel=0.02)
    assert math.isfinite(fit.cost.per_sample_error_s)


def test_one_share_says_nothing_of_a_and_c_apart() -> None:
    fit = fit_cost(points(0.1, 0.01, [32], repeat=10, sigma=0.01))
    assert fit.cost.per_micro_s == 0
    assert fit.cost.per_sample_error_s == math.inf
    assert fit.cost.predict_s(32, 1) == pytest.approx(0.42, rel=0.02)


def test_spikes_do_not_bend_the_fit() -> None:
    steps = points(0.1, 0.01, [16, 64], repeat=10, sigma=0.01)
    steps = [CostSample(p.step, p.num_samples, 1, p.seconds * (4 if p.step % 4 == 1 else 1)) for p in steps]
    fit = fit_cost(steps)
    assert fit.cost.predict_s(16, 1) == pytest.approx(0.26, rel=0.03)
    assert fit.cost.predict_s(64, 1) == pytest.approx(0.74, rel=0.03)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(200):
        cost = fit_cost(points(0.3, 0.01, [32, 128], repeat=12, sigma=0.03, seed=seed)).cost
        hits += abs(cost.per_sample_s - 0.01) <= cost.per_sample_error_s
    assert hits >= 175


def test_a_device_at_a_third_of_its_speed_keeps_its_shape() -> None:
    before = fit_cost(points(0.3, 0.01, [32, 128], repeat=12, sigma=0.01))
    after = fit_cost(points(0.9, 0.03, [128], repeat=3, sigma=0.01), before.shape())
    assert after.cost.predict_s(32, 1) == pytest.approx(1.86, rel=0.1)
    assert math.isfinite(after.cost.per_sample_error_s)
    guess = fit_cost(points(0.9, 0.03, [128], repeat=3, sigma=0.01))
    assert guess.cost.predict_s(32, 1) == pytest.approx(4.74 / 4, rel=0.05)


def test_costs_stay_possible_whatever_the_times() -> None:
    falling = [CostSample(i, n, 1, 1.0 / n) for i, n in enumerate([8, 64] * 4)]
    cost = fit_cost(falling).cost
    assert cost.per_micro_s >= 0
    assert cost.per_sample_s > 0
    rising = fit_cost([CostSample(i, n, 1, n**2.0) for i, n in enumerate([8, 64] * 4)], OverheadRatio(5.0, 1.0)).cost
    assert rising.per_micro_s >= 0
    assert rising.per_sample_s > 0
