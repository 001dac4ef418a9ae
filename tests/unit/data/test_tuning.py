"""The search for a number of loader workers: given what steps would cost, where it ends and origin soon."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from evenload.training.data.tuning import ReadSettings, SettingsOrigin, StepCost, WorkerTuner, decode_settings

Model = Callable[[int, int], tuple[float, float]]
"""(workers, prefetch) -> seconds a sample of waiting and of computing."""


def far_away(read_s: float, compute_s: float) -> Model:
    """ReadSettings waits for a disk or a network: workers help until they keep up."""

    def cost(num_workers: int, prefetch: int) -> tuple[float, float]:
        if not num_workers:
            return read_s, compute_s
        return max(0.0, read_s / num_workers - compute_s), compute_s

    return cost


def computed(read_s: float, compute_s: float, num_cores: float) -> Model:
    """ReadSettings takes cores: the rank has one, `num_cores` are there for the workers, and each worker costs a little."""

    def cost(num_workers: int, prefetch: int) -> tuple[float, float]:
        if not num_workers:
            return read_s, compute_s
        slowed = 1 + 0.05 * num_workers
        free = min(num_workers, num_cores)
        if free >= 1:
            return max(0.0, read_s / free - compute_s), compute_s * slowed
        return 0.0, (compute_s + read_s) * slowed

    return cost


def cost_of(reading: ReadSettings, wait_s: float, compute_s: float, num_samples: int) -> StepCost:
    """Of a step of one rank."""
    return StepCost(wait_s + compute_s, num_samples, (wait_s,), (compute_s,), (reading,))


def run(tuner: WorkerTuner, model: Model, steps: int = 400, seed: int = 0, noise: float = 0.01) -> list[ReadSettings]:
    rng = random.Random(seed)
    seen = []
    for step in range(steps):
        seen.append(tuner.reading)
        wait_s, compute_s = model(tuner.reading.num_workers, tuner.reading.prefetch)
        if step and seen[-1].depth != seen[-2].depth:
            wait_s += 0.5  # workers start
        num_samples = rng.choice([60, 64])
        scatter = 1 + rng.gauss(0, noise)
        tuner.observe(
            cost_of(tuner.reading, wait_s * num_samples * scatter, compute_s * num_samples * scatter, num_samples)
        )
    return seen


def steps_to_choose(seen: list[ReadSettings]) -> int:
    return next(index for index, reading in enumerate(seen) if reading.origin is SettingsOrigin.CHOSEN)


@pytest.mark.parametrize("most", [2, 4, 16])
@pytest.mark.parametrize("ratio", [0.005, 0.3, 0.9, 1.8, 3.5, 7.0, 30.0])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_it_ends_within_5_percent_of_the_best_of_a_sweep(ratio: float, most: int, first: int) -> None:
    for make in (
        far_away(ratio * 0.002, 0.002),
        computed(ratio * 0.002, 0.002, 1),
        computed(ratio * 0.002, 0.002, 0.5),
    ):
        tuner = WorkerTuner(ReadSettings(first, 2 if first else 0), most)
        seen = run(tuner, make, seed=most)
        sweep = {size: sum(make(size, 2)) for size in (0, 1, 2, 4, 8, 16) if size <= max(most, first)}
        assert sum(make(seen[-1].num_workers, 2)) <= 1.05 * min(sweep.values()), (seen[-1], sweep)
        assert steps_to_choose(seen) <= 90
        assert max(reading.num_workers for reading in seen) <= max(most, first)


def test_nothing_is_tried_where_nothing_is_waited_for() -> None:
    seen = run(WorkerTuner(ReadSettings(), 8), far_away(0.00001, 0.002))
    assert {reading.num_workers for reading in seen} == {0}
    assert steps_to_choose(seen) == 2 + 8


def test_equal_costs_take_the_fewest_workers() -> None:
    assert run(WorkerTuner(ReadSettings(4, 2), 16), far_away(0.001, 0.002))[-1].num_workers == 1


def test_the_queue_is_deepened_where_the_rank_waits_now_and_then() -> None:
    tuner = WorkerTuner(ReadSettings(2, 2), 2)
    for step in range(400):
        late = step % 4 == 0 and tuner.reading.depth < 8
        tuner.observe(cost_of(tuner.reading, 0.1 if late else 0.0, 0.1, 32))
    assert (tuner.reading.num_workers, tuner.reading.prefetch, tuner.reading.origin) == (2, 4, SettingsOrigin.CHOSEN)


def test_it_looks_again_when_reading_gets_slower_but_not_for_ever() -> None:
    tuner = WorkerTuner(ReadSettings(), 8)
    assert run(tuner, far_away(0.0001, 0.002))[-1].num_workers == 1
    assert run(tuner, far_away(0.007, 0.002), steps=150)[-1].num_workers == 4
    for index in range(20):
        run(tuner, far_away(0.05 if index % 2 else 0.0001, 0.002), steps=120)
    assert tuner._num_searches <= 4


def test_refused_workers_are_not_tried_again() -> None:
    tuner = WorkerTuner(ReadSettings(), 8)
    run(tuner, far_away(0.01, 0.002), steps=20)
    tuner.disable_workers()
    assert tuner.reading == ReadSettings(0, 0, origin=SettingsOrigin.CHOSEN)
    assert run(tuner, far_away(0.01, 0.002))[-1].num_workers == 0


def test_steps_without_samples_say_nothing() -> None:
    tuner = WorkerTuner(ReadSettings(), 8)
    for _ in range(100):
        tuner.observe(cost_of(tuner.reading, 1.0, 0.1, 0))
    assert tuner.reading.origin is SettingsOrigin.TRIAL


@pytest.mark.parametrize("origin", list(SettingsOrigin))
@pytest.mark.parametrize("size", [(0, 0), (1, 2), (16, 8), (200, 63)])
def test_a_reading_travels_as_one_number(origin: SettingsOrigin, size: Any) -> None:
    for pinned in (False, True):
        reading = ReadSettings(*size, pinned, origin)
        assert decode_settings(reading.code()) == reading
    assert str(ReadSettings()) == "no loader workers"
    assert str(ReadSettings(1, 2)) == "1 loader worker (prefetch 2)"
    assert str(ReadSettings(4, 2, pinned=True)) == "4 loader workers (prefetch 2, pinned memory)"


def run_together(
    tuners: list[WorkerTuner], cost: Callable[[list[int]], tuple[list[float], list[float]]], steps: int = 300
) -> None:
    """Ranks that see each other's steps; ``cost`` gives each rank's seconds of waiting and computing."""
    rng = random.Random(1)
    for _ in range(steps):
        readings = tuple(tuner.reading for tuner in tuners)
        waits, computes = cost([reading.num_workers for reading in readings])
        scatter = 1 + rng.gauss(0, 0.02)
        seconds = scatter * max(wait + compute for wait, compute in zip(waits, computes, strict=True))
        told = StepCost(seconds, 64, tuple(waits), tuple(computes), readings)
        for tuner in tuners:
            tuner.observe(told)


def test_ranks_that_share_cores_end_with_what_is_best_for_the_step() -> None:
    """Two ranks on two cores: one worker more on one rank slows both, and the more unequal, the slower the step."""

    def cost(workers: list[int]) -> tuple[list[float], list[float]]:
        slowed = 1 + 0.1 * sum(workers)
        read_s, compute_s = 0.030, 0.040
        waits = [read_s if not own else max(0.0, read_s / own * slowed - compute_s) for own in workers]
        # Beside other ranks' workers a rank computes slower, beside its own too.
        return waits, [compute_s * (slowed + 0.4 * abs(workers[0] - workers[1])) for _ in workers]

    tuners = [WorkerTuner(ReadSettings(), 4, rank) for rank in (0, 1)]
    run_together(tuners, cost)
    ends = [tuner.reading.num_workers for tuner in tuners]
    assert {tuner.reading.origin for tuner in tuners} == {SettingsOrigin.CHOSEN}
    waits, computes = cost(ends)
    best = min(sum(side[0] for side in cost([number, number])) for number in (0, 1, 2, 4))
    assert waits[0] + computes[0] <= 1.03 * best, ends


def test_a_fast_rank_gets_the_more_workers() -> None:
    def cost(workers: list[int]) -> tuple[list[float], list[float]]:
        computes = [0.010, 0.080]
        waits = [
            0.080 if not own else max(0.0, 0.080 / own - compute)
            for own, compute in zip(workers, computes, strict=True)
        ]
        return waits, computes

    tuners = [WorkerTuner(ReadSettings(), 16, rank) for rank in (0, 1)]
    run_together(tuners, cost)
    fast, slow = (tuner.reading.num_workers for tuner in tuners)
    assert slow == 1
    assert 1 <= fast <= 8
    assert max(map(sum, zip(*cost([fast, slow]), strict=True))) <= 1.05 * 0.080


def test_a_rank_whose_workers_fail_reads_by_itself_while_the_others_search_on() -> None:
    def cost(workers: list[int]) -> tuple[list[float], list[float]]:
        return [0.05 if not own else 0.05 / (1 + own) for own in workers], [0.01, 0.01]

    tuners = [WorkerTuner(ReadSettings(), 8, rank) for rank in (0, 1)]
    run_together(tuners, cost, steps=15)
    tuners[1].disable_workers()
    run_together(tuners, cost)
    assert tuners[1].reading.num_workers == 0
    assert {tuner.reading.origin for tuner in tuners} == {SettingsOrigin.CHOSEN}
