"""The noise scale from norms, and the batch that follows: pure numbers, no training."""

from __future__ import annotations

import itertools
import random

import pytest

from evenload.balance.batch import (
    CHOICE_STEPS,
    BatchChoice,
    ChoiceTimes,
    best_split,
    candidates,
    choose_batch,
    efficiency,
    rate_gain,
)
from evenload.balance.noise import LEAST_MEASURED, Moments, NoiseScale, Norms, moments
from evenload.balance.values import Cost


def drawn(shares: tuple[int, ...], noise: float, dim: int, generator: random.Random, parts: int | None = None) -> Norms:
    """A step's norms, where |G|^2 = dim and tr(S) = dim * noise; of the first `parts` parts only, where given."""
    means = [[1.0 + generator.gauss(0.0, (noise / n) ** 0.5) for _ in range(dim)] for n in shares]
    total = sum(shares)
    whole = [sum(n * mean[i] for n, mean in zip(shares, means, strict=True)) / total for i in range(dim)]
    squared_norms = [(float(n), sum(x * x for x in mean)) for n, mean in zip(shares, means, strict=True)]
    return Norms(tuple(squared_norms[:parts]), total, sum(x * x for x in whole))


@pytest.mark.parametrize(
    ("shares", "parts"), [((8, 8), None), ((12, 3, 1), None), ((15, 1), None), ((4, 4, 4, 4), 1), ((9, 0, 7), None)]
)
def test_the_noise_scale_is_unbiased_for_any_shares(shares, parts):
    generator, dim, noise, count = random.Random(2), 60, 8.0, 600
    shares = tuple(n for n in shares if n)
    told = [moments(drawn(shares, noise, dim, generator, parts)) for _ in range(count)]
    assert sum(m.trace for m in told) / count == pytest.approx(dim * noise, rel=0.05)
    assert sum(m.square for m in told) / count == pytest.approx(dim, rel=0.05)


def test_equal_parts_give_the_formula_of_the_paper():
    big, small, whole, part = 16, 4, 5.0, 7.0
    told = moments(Norms(((small, part),) * 4, big, whole))
    assert told.trace == pytest.approx((part - whole) / (1 / small - 1 / big))
    assert told.square == pytest.approx((big * whole - small * part) / (big - small))


@pytest.mark.parametrize(
    "norms",
    [
        Norms((), 16, 1.0),
        Norms(((16.0, 2.0),), 16, 2.0),
        Norms(((8.0, float("inf")), (8.0, 1.0)), 16, 1.0),
        Norms(((8.0, 1.0), (8.0, 1.0)), 16, float("nan")),
        Norms(((0.0, 0.0), (16.0, 2.0)), 16, 2.0),
    ],
)
def test_norms_that_tell_nothing(norms):
    assert moments(norms) is None


def test_averages_come_before_the_ratio_and_doubt_lowers_it():
    generator, scale = random.Random(3), NoiseScale()
    for count in range(200):
        if count < LEAST_MEASURED:
            assert scale.samples is None and scale.at_least is None
        scale.add(drawn((8, 8), 20.0, 200, generator))
    assert scale.samples == pytest.approx(20.0, rel=0.25)
    assert 10.0 < scale.at_least < scale.samples
    again = NoiseScale()
    again.load_state_dict(scale.state_dict())
    assert (again.samples, again.at_least) == (scale.samples, scale.at_least)


def test_gradients_without_signal_or_without_noise():
    generator, noisy, still = random.Random(4), NoiseScale(), NoiseScale()
    for _ in range(20):
        noisy.add(drawn((8, 8), 1e9, 10, generator))
        still.add(Norms(((8.0, 4.0), (8.0, 4.0)), 16, 4.0))
    assert 0 < noisy.at_least <= noisy.samples <= 16_000
    assert still.samples == still.at_least == 0.0
    assert moments(Norms(((8.0, 4.0), (8.0, 4.0)), 16, 4.0)) == Moments(0.0, 4.0)


def test_candidates_are_round_multiples_within_a_factor_of_two():
    assert candidates(16, 64, 16) == [16, 20, 24, 32]
    assert candidates(16, 50, 32) == [16, 20, 24, 32, 48, 50]
    assert candidates(16, 1000, 256) == [128, 160, 192, 256, 384, 512]
    assert candidates(16, 20, 64) == [20]


def overhead(fixed_s, per_sample_s):
    return lambda size: fixed_s + per_sample_s * size


def test_noise_and_overhead_let_the_batch_grow():
    def chosen(noise, fixed_s, **more):
        options = {"base": 32, "limit": 256, "now": 32, "may_try": False} | more
        return choose_batch(noise=noise, seconds_of=overhead(fixed_s, 0.001), **options)

    assert chosen(10_000.0, 0.1).batch_size == 64
    assert chosen(10_000.0, 0.1, now=64).batch_size == 128
    assert chosen(10_000.0, 0.1, limit=40).batch_size == 40
    assert chosen(10_000.0, 0.0).batch_size == 32  # nothing to gain
    assert chosen(5.0, 0.1).batch_size == 32  # a sample more is worth nothing
    assert chosen(5.0, 0.001, now=128).kind == "shrunk"
    grown = chosen(10_000.0, 0.1)
    assert grown.kind == "grown" and grown.expected_per_s > 1.05 * grown.before_per_s
    assert grown.before_per_s == pytest.approx(32 / 0.132)


def test_a_trial_tells_overhead_from_samples_and_is_taken_back():
    trial = choose_batch(
        base=32, limit=128, now=32, noise=1000.0, seconds_of=overhead(0, 0.001), may_try=True, tried_from=None
    )
    assert trial == BatchChoice(40, "trial", pytest.approx(1000.0), pytest.approx(1000.0 * efficiency(1000, 32, 40)))
    back = choose_batch(
        base=32, limit=128, now=40, noise=1000.0, seconds_of=overhead(0, 0.001), may_try=True, tried_from=32
    )
    assert (back.batch_size, back.kind) == (32, "shrunk")
    on = choose_batch(
        base=32, limit=128, now=40, noise=1000.0, seconds_of=overhead(0.1, 0.001), may_try=True, tried_from=32
    )
    assert on.batch_size > 40
    dear = choose_batch(
        base=32, limit=128, now=32, noise=50.0, seconds_of=overhead(0, 0.001), may_try=True, tried_from=None
    )
    assert dear.kind == "kept"


def test_gain_on_the_learning_rate():
    assert rate_gain(1e12, 32, 128, rule="adascale") == pytest.approx(4.0)
    assert rate_gain(0.0, 32, 128, rule="adascale") == pytest.approx(1.0)
    assert rate_gain(96.0, 32, 128, rule="adascale") == pytest.approx(4 * 128 / 224)
    assert rate_gain(96.0, 32, 128, rule="sqrt") == 2.0
    assert rate_gain(96.0, 32, 128, rule="none") == rate_gain(96.0, 32, 32, rule="adascale") == 1.0


def test_fixed_shares_keep_their_proportions():
    costs = [Cost(0.0, 0.001), Cost(0.0, 0.003)]
    assert best_split(64, costs, None, None).shares == (48, 16)
    assert best_split(64, costs, None, (8, 8)).shares == (32, 32)
    assert best_split(64, costs, (8, 8), (8, 8)).num_micro == 4


def test_a_rank_that_leaves_does_not_lengthen_the_steps_of_another_batch() -> None:
    costs = [Cost(0.0, 0.001), Cost(0.5, 0.01)]
    assert best_split(64, costs, None, None).expected_s == pytest.approx(0.51)
    assert best_split(64, costs, None, None, may_leave=(False, True)).expected_s == pytest.approx(0.064)
    assert best_split(64, costs, None, (32, 0), may_leave=(False, True)).expected_s == pytest.approx(0.064)


def test_on_other_devices_the_batch_is_chosen_until_it_stays_or_turns_back() -> None:
    times = ChoiceTimes()
    assert times.is_due(in_epoch=False) and not times.is_due(in_epoch=True), (
        "without a change at the end of an epoch alone"
    )
    times.chose(16, 32)
    assert times.steps_left is None
    for sizes in ((16, 32, 64, 64), (16, 32, 24), (64, 32, 16, 32), (16, 16)):
        times.begin()
        assert not times.is_due(in_epoch=True) and not times.is_due(in_epoch=False)
        for before, size in itertools.pairwise(sizes):
            assert times.steps_left == CHOICE_STEPS
            times.steps_left = 0
            assert times.is_due(in_epoch=True) and times.is_due(in_epoch=False)
            times.chose(before, size)
        assert times.steps_left is None
