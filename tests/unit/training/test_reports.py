"""`Reports`: what goes by column equals what goes by rank."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest

from evenload.errors import DesyncError, StepError
from evenload.training.comm.clock import SEGMENTS, ProcessorDelay, Segment
from evenload.training.parallel.strategy import AWAY, OK, RAISED
from evenload.training.step.exchange import check_trained, totals_of
from evenload.training.step.report import OwnReport, RankReport, Reports, exact_sum, read_table
from evenload.training.step.stats import StepStats


def report(rng: random.Random, metrics: tuple[str, ...] = ("a", "b"), **fields: float) -> RankReport:
    return RankReport(
        status=int(fields.get("status", OK)),
        weighted=bool(fields.get("weighted", 0)),
        units=fields.get("units", rng.uniform(0.1, 9)),
        loss_sum=fields.get("loss_sum", rng.gauss(0, 1e3)),
        touched_key=fields.get("touched_key", 5.0),
        has_decision=False,
        elapsed_s=rng.random(),
        memory_bytes=float(rng.randrange(1 << 40)),
        state_key=0.0,
        reading=0.0,
        stop_requested=bool(fields.get("stop_requested", 0)),
        may_leave=rng.random() < 0.5,
        has_zero=rng.random() < 0.5,
        seconds={name: rng.random() for name in SEGMENTS},
        metrics={name: rng.gauss(0, 1) for name in metrics},
        delay_s=fields.get("delay_s", 0.0),
    )


def test_a_delay_is_at_most_the_time_that_passed() -> None:
    begun_s, delay = time.perf_counter(), ProcessorDelay()
    for _ in range(3):
        sum(range(100_000))
        assert 0 <= delay.take_s() <= time.perf_counter() - begun_s


def read(reports: list[RankReport], names: tuple[str, ...] = ("a", "b")) -> Reports:
    return read_table(np.array([one.row() for one in reports]), names)


@pytest.mark.parametrize("num_ranks", [1, 2, 37, 1000])
def test_columns_hold_what_each_rank_reported(num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    sent = [report(rng) for _ in range(num_ranks)]
    reports = read(sent)
    assert list(reports) == sent and len(reports) == num_ranks
    assert reports.column("loss_sum") == [one.loss_sum for one in sent]
    assert reports.flags("may_leave") == tuple(one.may_leave for one in sent)
    assert reports.metric("b") == [one.metrics["b"] for one in sent]
    assert reports.first("elapsed_s") == sent[0].elapsed_s
    assert list(reports.of([0, num_ranks - 1])) == [sent[0], sent[-1]]
    totals = totals_of(reports, 1)
    units = math.fsum(one.units for one in sent)
    assert (totals.units, totals.loss) == (units, math.fsum(one.loss_sum for one in sent) / units)
    assert totals.same_touched and not reports.agreed.failed


def test_the_report_of_a_rank_alone_reads_like_its_row() -> None:
    sent = report(random.Random(5), stop_requested=1)
    alone, row = OwnReport(sent), read([sent])
    assert list(alone) == list(row) == [sent] and len(alone) == 1 and alone.names == row.names
    for name in ("status", "units", "loss_sum", "touched_key", "memory_bytes", "stop_requested"):
        assert (alone.column(name), alone.first(name)) == (row.column(name), row.first(name))
        assert (alone.any(name), alone.all(name), alone.flags(name)) == (row.any(name), row.all(name), row.flags(name))
        assert alone.is_same(name) and row.is_same(name)
    assert alone.metric("b") == row.metric("b") and (alone.seconds == row.seconds).all()
    assert totals_of(alone, 1) == totals_of(row, 1)
    assert OwnReport(report(random.Random(5), status=RAISED)).agreed.failed and not alone.agreed.failed
    with pytest.raises(StepError, match="at most"):
        OwnReport(report(random.Random(5), metrics=tuple(map(str, range(80)))))


@pytest.mark.parametrize(
    ("compute_s", "delays_s", "expected"),
    [
        ((0.025, 0.055), (0.0, 0.05), 0.03),  # a quota holds the second: the first takes as long as it needs
        ((0.007, 0.009), (0.005, 0.007), 0.007),  # a busy machine
        ((0.007, 0.002), (0.0, 0.0), 0.0),
        ((0.007, 0.002), (0.0, 0.002), 0.0),
    ],
)
def test_a_delay_is_what_made_the_step_longer(
    compute_s: tuple[float, ...], delays_s: tuple[float, ...], expected: float
) -> None:
    rng, stats = random.Random(0), StepStats()
    sent = [report(rng, delay_s=delay_s) for delay_s in delays_s]
    times: dict[Segment, float] = dict.fromkeys(SEGMENTS, 0.0)
    stats.add(read([one._replace(seconds={**times, "compute": s}) for one, s in zip(sent, compute_s, strict=True)]))
    assert stats.delay_s == pytest.approx(expected)


def test_times_add_up_over_the_backwards_of_a_step() -> None:
    rng, stats = random.Random(0), StepStats()
    both = [[report(rng, delay_s=delay_s) for delay_s in (0.125, 0.5, 0.25)] for _ in range(2)]
    for sent in both:
        stats.add(read(sent))
    for name in SEGMENTS:
        expected = [one.seconds[name] + other.seconds[name] for one, other in zip(*both, strict=True)]
        assert [getattr(times, f"{name}_s") for times in stats.rank_times()] == expected
    assert [times.memory_bytes for times in stats.rank_times()] == [one.memory_bytes for one in both[1]]
    assert stats.whole_seconds() == sum(
        getattr(stats.rank_times()[0], f"{n}_s") for n in ("compute", "optimizer", "wait", "comm")
    )
    ranks, spread = stats.rank_times(), stats.spread((1, 2))
    assert (spread.num_ranks, spread.shares, spread.first) == (3, (1, 2), ranks[0])
    busiest, waits_least = spread.busiest[0], spread.waits_least[0]
    assert spread.busiest[1] == ranks[busiest] and ranks[busiest].busy_s == max(times.busy_s for times in ranks)
    assert spread.waits_least[1] == min(ranks, key=lambda times: times.wait_s + times.comm_s) == ranks[waits_least]
    assert spread.most.memory_bytes == stats.most_memory_bytes == max(times.memory_bytes for times in ranks)
    assert spread.most.wait_s == max(times.wait_s for times in ranks)
    assert spread.mean.data_s == pytest.approx(sum(times.data_s for times in ranks) / 3)
    own_s = stats.own_seconds()
    alone_s = [seconds - 2 * delay_s for seconds, delay_s in zip(own_s, (0.125, 0.5, 0.25), strict=True)]
    assert stats.delay_s == pytest.approx(max(0.0, max(own_s) - max(alone_s)))
    assert not stats.stop_requested
    stats.add(read([report(rng), report(rng, stop_requested=1), report(rng)]))
    assert stats.stop_requested


def test_a_loss_that_is_not_finite_stays_so() -> None:
    rng = random.Random(1)
    reports = read([report(rng), report(rng, loss_sum=math.nan)])
    assert math.isnan(totals_of(reports, 1).loss)
    assert (
        exact_sum([math.inf, -math.inf]) != exact_sum([math.inf, -math.inf]) and exact_sum([1e308, 1e308]) == math.inf
    )


def test_ranks_that_differ_are_named() -> None:
    rng = random.Random(2)
    with pytest.raises(StepError, match="a weight on ranks 1, 2 only"):
        totals_of(read([report(rng), report(rng, weighted=1), report(rng, weighted=1)]), 1)
    with pytest.raises(StepError, match="all weights are 0"):
        totals_of(read([report(rng, units=0.0)]), 1)
    with pytest.raises(DesyncError, match="rank 2 differs from rank 1"):
        keys = (0.0, float(1 << 33), float(1 << 34))
        check_trained(read([report(rng, touched_key=key) for key in keys]), 1)
    with pytest.raises(StepError, match="different metrics"):
        read([report(rng), report(rng, metrics=("c",))])


def test_a_rank_that_failed_or_is_away_need_not_know_the_metrics() -> None:
    rng = random.Random(3)
    failed = read([report(rng), report(rng, metrics=(), status=RAISED)])
    assert failed.agreed.failed and failed.column("status") == [OK, RAISED]
    away = read([report(rng), report(rng, metrics=(), status=AWAY)], names=())
    assert away.names == () and not away.agreed.failed
    assert read([report(rng), report(rng, metrics=(), status=AWAY)]).names == ("a", "b")
