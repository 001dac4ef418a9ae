"""Times of steps that a GPU reports two steps later: which step they are of, and what a failed rank does to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evenload.training.comm.clock import SEGMENTS, StepClock, UnreadTimes
from evenload.training.step.late_times import LateTimes
from evenload.training.step.report import NO_TIMES, OWN_TIMES, RankReport, Reports, read_table
from evenload.training.step.stats import StepStats


def _times(compute_s: float) -> UnreadTimes:
    return UnreadTimes({**dict.fromkeys(SEGMENTS, 0.0), "compute": compute_s}, (), 0.0)


class Ranks:
    """Ranks that exchange their rows."""

    def __init__(self, num: int) -> None:
        self.late = [LateTimes() for _ in range(num)]
        self.planner: Any = object()
        self.stats: list[StepStats] = []

    def step(self, index: int, compute_s: list[float | None], *, generation: int = 0, again: bool = False) -> StepStats:
        """Run the exchange of a step on all ranks, and return rank 0's stats; None: the rank reports its own times at once."""
        batch: Any = SimpleNamespace(global_step=index, plan=SimpleNamespace(generation=generation))
        if not again:
            self.stats = [StepStats() for _ in self.late]
        rows = []
        for late, stats, own_s in zip(self.late, self.stats, compute_s, strict=True):
            seconds, times_of = dict.fromkeys(SEGMENTS, 0.0), OWN_TIMES
            if own_s is not None:
                seconds, times_of = late.add(batch, self.planner, stats, _times(own_s), compiled=index == 0)
            fields = dict.fromkeys(RankReport._fields, 0.0) | {"seconds": seconds, "times_of": times_of}
            rows.append(RankReport(**{**fields, "metrics": {}, "touched": (), "squared_norm": None}).row())  # type: ignore[arg-type]
        reports: Reports = read_table(np.array(rows), ())
        for late, stats in zip(self.late, self.stats, strict=True):
            stats.add(reports, late.take_sent(reports))
        return self.stats[0]


def test_a_step_has_the_times_of_the_one_two_before_it_with_its_own_stats() -> None:
    ranks = Ranks(2)
    seen, timed = [], []
    for index in range(5):
        seen.append(ranks.step(index, [1.0 + index, 2.0 + index]))
        timed.append(seen[-1].timed)
    assert timed == [None, None, seen[0], seen[1], seen[2]]
    assert seen[0].unusual and not seen[1].unusual  # the first compiled
    assert seen[1].own_seconds() == [2.0, 3.0] and seen[2].own_seconds() == [3.0, 4.0]
    assert seen[2].earlier is None, "no chain of all steps is kept alive"


def test_backwards_and_attempts_of_a_step_add_up() -> None:
    ranks = Ranks(2)
    for index in range(3):
        ranks.step(index, [1.0, 1.0])
        ranks.step(index, [0.5, 0.25], again=True)
    assert ranks.stats[0].timed is not None
    assert ranks.stats[0].timed.unusual and ranks.stats[0].timed.rank_times()[1].compile_s == 1.25


def test_times_of_different_steps_are_not_used_and_ranks_agree_again() -> None:
    ranks = Ranks(2)
    for index in range(4):
        ranks.step(index, [1.0, 1.0])
    ranks.late[1].clear()  # it failed, and has begun anew
    agreed = [ranks.step(index, [1.0, 1.0]).timed is not None for index in range(4, 8)]
    assert agreed == [False, False, True, True]
    assert ranks.step(8, [1.0, None]).timed is None


@pytest.mark.parametrize("what", ["planner", "generation"])
def test_another_loader_or_generation_begins_anew(what: str) -> None:
    ranks = Ranks(1)
    for index in range(4):
        ranks.step(index, [1.0])
    if what == "planner":
        ranks.planner = object()
    found = [ranks.step(index, [1.0], generation=int(what == "generation")).timed for index in range(4, 7)]
    assert found[:2] == [None, None] and found[2] is not None


def test_the_clock_keeps_what_is_not_read() -> None:
    clock = StepClock(torch.device("cpu"))
    with clock.segment("compute"):
        first = clock.cut()
    second = clock.cut()
    assert first.read()["compute"] > 0 and first.read() == first.read()
    assert first.other_s > 0 and first.read()["other"] == pytest.approx(first.other_s)
    both = first.read()["compute"] + second.read()["compute"]
    first.add(second)
    assert first.read()["compute"] == pytest.approx(both)
    assert clock.take()["compute"] == 0
    assert NO_TIMES != OWN_TIMES


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for() -> None:
    clock = StepClock(torch.device("cuda", 0))
    clock.take()
    with clock.segment("compute"):
        torch.cuda._sleep(200_000_000)
    times = clock.cut()
    assert not torch.cuda.current_stream().query(), "the GPU still computes"
    assert times.read()["compute"] > 0.02
