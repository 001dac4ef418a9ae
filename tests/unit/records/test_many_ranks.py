"""Records of more than 128 ranks sum them up; every tenth names each rank. All that reads records shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenload.balance.split import even_shares
from evenload.balance.values import StepPlan
from evenload.records.console import ProgressLines
from evenload.records.lines import STEPS_FILE, parse_line, step_line
from evenload.records.loggers.scalars import scalars_of
from evenload.records.reader import RecordTail, last_step_in, read_steps
from evenload.records.recorder import Recorder
from evenload.records.summary import StepBottleneck, summarize_steps
from evenload.records.values import SEGMENTS, RankSpread, RankTimes, StepRecord
from evenload.training.comm.control import CAPACITY
from evenload.training.data.tuning import ReadSettings
from evenload.training.step.report import COLUMNS, Reports
from evenload.training.step.stats import StepStats
from evenload.training.step.step_recorder import StepRecorder
from evenload.views.run.history import RunHistory
from evenload.views.run.panel import render_panel
from evenload.views.run.summary import summarize_run
from evenload.views.run.summary_text import format_run_summary
from evenload.views.run.trace import StepRange, write_trace
from tests.unit.records.make import make_step

NUM_RANKS, NUM_STEPS, SLOW = 130, 25, 77
BATCH = 16 * NUM_RANKS
MOVED_AT = 12
"""The step from which other shares hold."""


def write_run(folder: Path, data_s: float = 0.001, slow_s: float = 0.5) -> None:
    """Rank `SLOW` computes longest; from `MOVED_AT` on it has one sample less."""
    recorder = Recorder(folder)
    steps = StepRecorder(recorder, True)
    shares = list(even_shares(BATCH, NUM_RANKS))
    for step in range(NUM_STEPS):
        if step == MOVED_AT:
            shares[SLOW], shares[0] = shares[SLOW] - 1, shares[0] + 1
        stats = StepStats()
        table = np.zeros((NUM_RANKS, CAPACITY))
        table[:, COLUMNS["memory_bytes"]] = np.arange(NUM_RANKS) + 1000
        table[:, COLUMNS["reading"]] = ReadSettings(2, 2).code()
        reports = Reports(table)
        compute_s = np.linspace(0.2, 0.3, NUM_RANKS) + 0.001 * step
        compute_s[SLOW] = slow_s
        reports.seconds[:, SEGMENTS.index("compute_s")] = compute_s
        reports.seconds[:, SEGMENTS.index("wait_s")] = slow_s + 0.05 - compute_s
        reports.seconds[SLOW, SEGMENTS.index("data_s")] = data_s
        stats.add(reports)
        stats.calls, stats.loss = 1, 1.0 / (step + 1)
        stats.begun_s -= 0.6
        steps.step(step, StepPlan(0, 0, step, 0, step * BATCH, (tuple(shares),)), stats)
    steps.close(ended_well=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "run"
    write_run(folder)
    return folder


def test_each_record_has_the_sum_and_every_tenth_each_rank(folder: Path) -> None:
    steps = read_steps(folder)
    assert [step.step for step in steps] == list(range(NUM_STEPS)) and last_step_in(folder) == NUM_STEPS - 1
    assert [step.step for step in steps if step.ranks] == [0, 10, MOVED_AT, 20]
    for step in steps:
        assert step.num_samples == BATCH and step.num_ranks == NUM_RANKS and step.spread is not None
        assert sum(step.shares) == (BATCH if step.ranks else 0)
        assert step.spread.busiest[0] == step.spread.waits_least[0] == SLOW
        assert step.spread.shares == ((16, 16) if step.step < MOVED_AT else (15, 17))
        assert step.spread.mean.compute_s == pytest.approx(0.25 + 0.001 * step.step, rel=0.02)
        assert step.spread.most.memory_bytes == 1000 + NUM_RANKS - 1
        assert parse_line(step_line(step, step.metrics)) == step
    whole = steps[10]
    assert whole.ranks[SLOW].compute_s == 0.5 and whole.ranks[5].memory_bytes == 1005
    assert len((folder / STEPS_FILE).read_bytes().splitlines()[2]) < 1000


def test_show_says_what_the_records_hold(folder: Path) -> None:
    summary = summarize_run(folder)
    assert summary.num_samples == BATCH * NUM_STEPS and len(summary.ranks) == NUM_RANKS
    assert [(span.first_step, span.last_step, span.shares[SLOW]) for span in summary.spans] == [
        (0, MOVED_AT - 1, 16),
        (MOVED_AT, NUM_STEPS - 1, 15),
    ]
    text = format_run_summary(summary)
    assert "in the 4 of 25 steps whose records have it, for the 16 of 130 ranks that wait least" in text
    assert text.count("\n  rank ") == 16 and text.index("rank 77 ") < text.index("rank 129 ")
    assert summary.late is not None and summary.late.imbalance == pytest.approx(0.5 / 0.27 - 1, rel=0.05)


def test_progress_pages_traces_and_loggers_show_them(folder: Path, tmp_path: Path) -> None:
    records = RecordTail(folder).poll()
    lines, history = ProgressLines(0.0), RunHistory()
    shown = [line for record in records for line in lines.add(record)]
    assert "130 ranks: shares 15 to 17, busy" in shown[-1] and "rank 77 waits least" in shown[-1]
    for record in records:
        history.add(record)
    history.settle()
    device = history.devices[history.present[SLOW]]
    assert (
        device.num_samples
        == 16 * MOVED_AT + 15 * (NUM_STEPS - MOVED_AT)
        == sum(16 if step < MOVED_AT else 15 for step in range(NUM_STEPS))
    )
    computed_s = sum(one.segments_s["compute_s"] for one in history.devices.values())
    steps = read_steps(folder)
    expected_s = sum(NUM_RANKS * step.spread.mean.compute_s for step in steps if step.spread)
    assert computed_s == pytest.approx(expected_s, rel=1e-4)
    assert device.segments_s["compute_s"] == pytest.approx(0.5 * NUM_STEPS, rel=0.02)
    render_panel(steps, lines.info, 100)
    assert write_trace(folder, tmp_path / "trace.json", StepRange(1, 11)) == 10
    spans = [
        row for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if row.get("cat") == "segment"
    ]
    assert {row["args"]["step"] for row in spans} == {10}
    scalars = scalars_of(steps[3], own_loss=False)
    assert scalars["share/most"] == 16 and scalars["compute_s/most"] == 0.5 and len(scalars) < 30


def test_a_rank_that_waits_for_its_samples_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run", data_s=0.2)
    (found,) = [event for event in summarize_run(tmp_path / "run").events if event.kind == "data_bound"]
    assert "of rank 77's step is spent waiting for samples (2 loader workers (prefetch 2))" in found.message
    assert found.fields["rank"] == SLOW
    steps = read_steps(tmp_path / "run")
    bottleneck = summarize_steps(steps[1:]).bottleneck
    assert isinstance(bottleneck, StepBottleneck) and (bottleneck.kind, bottleneck.rank) == ("data", SLOW)


def test_a_page_begins_without_the_first_records() -> None:
    history = RunHistory()
    lines = ProgressLines(0.0)
    spread = _spread_alone()
    for record in (spread, spread):
        lines.add(record)
        history.add(record)
    history.settle()
    assert sum(device.num_samples for device in history.devices.values()) == 2 * BATCH


def _spread_alone() -> StepRecord:
    times = RankTimes(compute_s=0.2)
    spread = RankSpread(NUM_RANKS, (16, 16), 0.2, times, times, (3, times), (3, times), times)
    return replace(make_step(3), ranks=(), shares=(), num_samples=BATCH, spread=spread)
