"""What a logger gets of a run's records: each step once, whatever was done again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.records.lines import late_metrics_line, step_line
from evenload.records.loggers import scalars as scalars_module
from evenload.records.loggers.scalars import LoggerPosition, read_records, to_scalars
from evenload.records.values import LateMetrics, Record
from tests.unit.records.make import make_step

START = LoggerPosition()


def steps_of(
    records: list[Record], position: LoggerPosition = START, accepts_rewrites: bool = False
) -> tuple[list[tuple[int, bool]], LoggerPosition]:
    points, position = to_scalars(records, position, accepts_rewrites)
    return [(point.step, point.replaces) for point in points], position


def test_steps_done_again_within_a_batch_count_as_last_done() -> None:
    records: list[Record] = [make_step(index) for index in (0, 1, 2, 3, 1, 2)]
    assert steps_of(records)[0] == [(0, False), (1, False), (2, False)]


def test_steps_given_before_are_left_out_or_told_again() -> None:
    position = LoggerPosition(newest=3)
    records: list[Record] = [make_step(2), LateMetrics(2, {"val": 1.0}), make_step(3), make_step(4)]
    assert steps_of(records, position) == ([(4, False)], LoggerPosition(newest=4))
    assert steps_of(records, position, accepts_rewrites=True)[0] == [(2, True), (2, False), (3, False), (4, False)]


def test_a_place_that_has_more_than_was_believed_gets_the_rest() -> None:
    assert steps_of([make_step(index) for index in range(6)], LoggerPosition(newest=3))[0] == [(4, False), (5, False)]


def test_metrics_of_a_step_that_was_never_committed_wait_for_the_next_session() -> None:
    records: list[Record] = [make_step(0), LateMetrics(1, {"loss": 3.0})]
    given, position = steps_of(records)
    assert (given, position.newest) == ([(0, False)], 0)
    assert steps_of([LateMetrics(2, {"a": 1.0}), make_step(3)], position)[0] == [(2, False), (3, False)]


@settings(max_examples=60, deadline=None)
@given(
    sessions=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=30),
)
def test_however_it_is_cut_each_step_comes_once(sessions: list[tuple[int, int]], cuts: list[int]) -> None:
    """Sessions go back by some steps and do some; a logger that replaces ends with the last of each, one that doesn't has
    each once."""
    records: list[Record] = []
    done = 0
    for number, (back, forward) in enumerate(sessions):
        done = max(0, done - back)
        for step in range(done, done + forward):
            records.append(make_step(step, loss=float(number)))
        done += forward
    survivors: dict[int, float] = {}
    for record in records:
        survivors = {step: loss for step, loss in survivors.items() if step < record.step}  # type: ignore[union-attr]
        survivors[record.step] = record.loss  # type: ignore[union-attr]
    for accepts_rewrites in (True, False):
        position, at, place, num_given = LoggerPosition(), 0, dict[int, float](), 0
        for cut in [*cuts, len(records)]:
            points, position = to_scalars(records[at : at + cut], position, accepts_rewrites)
            at += cut
            for point in points:
                if point.replaces:
                    place = {step: loss for step, loss in place.items() if step < point.step}
                assert point.step not in place
                place[point.step] = point.scalars["loss"]
                num_given += 1
        if accepts_rewrites:
            assert place == survivors
        else:
            assert set(place) >= set(survivors)
            assert num_given == len(place)


def test_a_file_is_read_in_blocks_and_a_torn_line_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [step_line(make_step(index), {}) for index in range(5)] + [late_metrics_line(LateMetrics(4, {"a": 1.0}))]
    path.write_bytes(b"".join(lines) + b'{"step": 5')
    monkeypatch.setattr(scalars_module, "BLOCK_BYTES", 40)  # far less than a line
    offset, records = 0, []
    while (block := read_records(path, offset))[1] != offset:
        records += block[0]
        offset = block[1]
    assert [record.step for record in records] == [0, 1, 2, 3, 4, 4]  # type: ignore[union-attr]
    assert offset == sum(map(len, lines))


def test_the_mark_keeps_what_it_does_not_change() -> None:
    _, position = to_scalars([make_step(0, metrics={"loss": 1.0})], LoggerPosition(run_id="x", offset=7), False)
    assert position == replace(LoggerPosition(run_id="x", offset=7), newest=0, own_loss=True)
