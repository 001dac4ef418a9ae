"""The estimates made of alternating blocks."""

from __future__ import annotations

import json
import random
from statistics import mean

import pytest

from evenload.records.measurement import (
    EVEN,
    EVENLOAD,
    SOLO,
    TimedBlock,
    blocks_from_rows,
    blocks_to_rows,
    bootstrap,
    evaluate,
    format_measurement,
)


def _blocks(num_rounds: int = 9, noise: float = 0.0, drift: float = 0.0) -> list[TimedBlock]:
    """Solo speeds 20 and 10; even 19, evenload 29, static 28.5; a drift slows all arms of a round alike."""
    rng = random.Random(1)
    blocks = []
    for index in range(num_rounds):
        slow = 1 + drift * index

        def seconds(per_s: float, slow: float = slow) -> float:
            return 300 / per_s * slow * rng.gauss(1, noise)

        blocks += [
            TimedBlock(EVEN, index, (300,), (seconds(19),), (15, 15)),
            TimedBlock(EVENLOAD, index, (300,), (seconds(29),), (20, 10)),
            TimedBlock("static:18,12", index, (300,), (seconds(26),), (18, 12)),
            TimedBlock("static:21,9", index, (300,), (seconds(28.5),), (21, 9)),
            TimedBlock(SOLO, index, (300, 300), (seconds(20), seconds(10))),
        ]
    return blocks


def test_speeds_and_ratios() -> None:
    found = evaluate(_blocks())
    assert found.num_rounds == 9
    assert found.speeds[EVENLOAD].value == pytest.approx(29)
    assert [speed.value for speed in found.solo] == pytest.approx([20, 10])
    assert found.solo_sum is not None and found.solo_sum.value == pytest.approx(30)
    assert found.efficiency is not None and found.efficiency.value == pytest.approx(29 / 30)
    assert found.over_even is not None and found.over_even.value == pytest.approx(29 / 19)
    assert found.over_best_alone is not None and found.over_best_alone.value == pytest.approx(29 / 20)
    assert found.best_static == "static:21,9"
    assert found.over_best_static is not None and found.over_best_static.value == pytest.approx(29 / 28.5)
    assert found.shares[EVENLOAD] == (20, 10)


def test_the_best_of_equal_fixed_splits_is_not_ahead_by_chance() -> None:
    arms, rng, ratios = [EVENLOAD, "static:21,9", "static:20,10", "static:19,11"], random.Random(2), []
    for _ in range(80):
        blocks = [
            TimedBlock(arm, index, (300,), (10 * rng.gauss(1, 0.08),), (20, 10)) for index in range(6) for arm in arms
        ]
        found = evaluate(blocks)
        assert found.over_best_static is not None
        ratios.append(found.over_best_static.value)
    assert mean(ratios) == pytest.approx(1, abs=0.01)  # over the highest of the three medians: 0.976


def test_a_drift_of_the_machine_touches_speeds_but_no_ratio() -> None:
    found = evaluate(_blocks(drift=0.1))
    assert found.speeds[EVENLOAD].half_width > 0.1
    assert found.efficiency is not None
    assert found.efficiency.low == pytest.approx(found.efficiency.high) == pytest.approx(29 / 30)


def test_the_interval_holds_the_truth_and_shrinks() -> None:
    few, many = evaluate(_blocks(9, noise=0.02)).efficiency, evaluate(_blocks(25, noise=0.02)).efficiency
    assert few is not None and many is not None
    assert many.low < 29 / 30 < many.high
    assert many.half_width < few.half_width


def test_the_bootstrap_is_deterministic() -> None:
    values = [block.per_s[0] for block in _blocks(noise=0.1) if block.arm == EVEN]
    found = bootstrap(values)
    assert found == bootstrap(values)
    assert found.low < found.value < found.high


def test_an_unfinished_round_is_left_out() -> None:
    blocks = _blocks()
    assert evaluate([*blocks, TimedBlock(EVEN, 9, (300,), (1.0,), (15, 15))]).num_rounds == 9


def test_without_solo_there_is_no_efficiency() -> None:
    found = evaluate([block for block in _blocks() if block.arm != SOLO])
    assert found.efficiency is None and found.solo == () and found.solo_sum is None and found.over_even is not None
    assert "sum" not in format_measurement(found)


def test_blocks_survive_json() -> None:
    blocks = _blocks()
    back = blocks_from_rows(json.loads(json.dumps(blocks_to_rows(blocks))))
    assert back == blocks


def test_the_table_names_what_it_shows() -> None:
    table = format_measurement(evaluate(_blocks()), ("CPU (core 0)", "CPU (core 1)"), (1.0, 0.5))
    assert "rank 1 alone, CPU (core 1)" in table
    assert "20 + 10" in table
    assert "efficiency, Evenload over the sum: 96.7 %" in table
    assert "throttle: requested speeds 1:0.5, delivered 1.000:0.500" in table
    assert "best fixed split (21,9): 1.02 times" in table
