from __future__ import annotations

import math

import pytest

from evenload.views.bins import MAX_BINS, TimeBins


def test_sums_survive_every_merge_and_memory_stays_bounded() -> None:
    bins, end_s = TimeBins(), 0.0
    for index in range(5000):
        bins.spread({"seconds": 0.7, "none": 0.0}, end_s, end_s + 0.7)
        bins.sample("value", float(index), end_s)
        end_s += 0.7
    assert MAX_BINS / 2 <= bins.count <= MAX_BINS
    assert sum(bins.sums("seconds")) == pytest.approx(end_s)
    assert all(part == pytest.approx(bins.width_s) for part in bins.sums("seconds")[:-1])
    assert sum(bins.sums("none")) == 0.0
    found = [value for value in bins.extremes("value") if value is not None]
    assert (found[0][0], found[-1][1]) == (0.0, 4999.0)
    assert all(
        low <= mean <= high for mean, (low, high) in zip(bins.means("value"), found, strict=True) if mean is not None
    )


def test_a_coarser_copy_leaves_the_first_as_it_was() -> None:
    bins = TimeBins()
    bins.spread({"seconds": 10.0}, 0.0, 10.0)
    before = bins.sums("seconds")
    copied = bins.coarser(50)
    assert copied.count <= 50 < bins.count
    assert bins.sums("seconds") == before
    assert math.isclose(sum(copied.sums("seconds")), 10.0)
