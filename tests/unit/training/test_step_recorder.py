"""Steps of a few milliseconds are written together; nothing is lost where a run ends, or another rank writes on."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenload.balance.values import StepPlan
from evenload.records.reader import last_step_in, read_events, read_steps
from evenload.records.recorder import Recorder
from evenload.records.values import RunEvent
from evenload.training.step import step_recorder as module
from evenload.training.step.stats import StepStats
from evenload.training.step.step_recorder import StepRecorder


def end_step(recorder: StepRecorder, index: int, *, at_once: bool = False) -> None:
    stats = StepStats()
    stats.calls, stats.loss = 1, float(index)
    recorder.step(index, StepPlan(0, 0, index, 0, 4 * index, ((4,),)), stats, at_once=at_once)


def written(folder: Path) -> list[int]:
    return [step.step for step in read_steps(folder)]


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are written every hour, so that none is due in a test."""
    monkeypatch.setattr(module, "_WRITE_EVERY_S", 3600.0)


@pytest.mark.usefixtures("hour")
def test_short_steps_are_written_together(tmp_path: Path) -> None:
    recorder = StepRecorder(Recorder(tmp_path), True)
    end_step(recorder, 0)
    assert written(tmp_path) == [0]
    for index in (1, 2, 3):
        recorder.log({"a": index}, index)
        end_step(recorder, index)
    recorder.log({"b": 5}, 3)  # by the line of its step, which is not written yet
    assert written(tmp_path) == [0]
    recorder.event("any", "something happened", step=3)
    assert written(tmp_path) == [0, 1, 2, 3]
    end_step(recorder, 4, at_once=True)
    assert written(tmp_path) == [0, 1, 2, 3, 4]
    end_step(recorder, 5)
    recorder.close(ended_well=False)
    steps = read_steps(tmp_path)
    assert [step.step for step in steps] == [step.loss for step in steps] == [0, 1, 2, 3, 4, 5]
    assert dict(steps[3].metrics) == {"a": 3.0, "b": 5.0}
    assert [a.time < b.time for a, b in itertools.pairwise(steps)] == [True] * 5, "when they ended"


def test_longer_steps_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WRITE_EVERY_S", 0.0)
    recorder = StepRecorder(Recorder(tmp_path), True)
    for index in range(3):
        end_step(recorder, index)
        assert written(tmp_path) == [*range(index + 1)]
    recorder.close(ended_well=True)


@pytest.mark.usefixtures("hour")
def test_a_rank_that_takes_over_writes_the_steps_that_the_other_had_not(tmp_path: Path) -> None:
    killed = Recorder(tmp_path)
    first, second = StepRecorder(killed, True), StepRecorder(None, False)
    for index in range(6):
        for recorder in (first, second):
            end_step(recorder, index)
    # Rank 0 is killed: it has written the first step alone.
    second.take_over(Recorder(tmp_path), last_step=0)
    end_step(second, 6)
    second.close(ended_well=True)
    assert written(tmp_path) == [*range(7)]
    killed.close()


@pytest.mark.usefixtures("hour")
def test_a_rank_that_leaves_writes_its_steps_unless_the_next_one_has(tmp_path: Path) -> None:
    for is_late in (False, True):
        folder = tmp_path / str(is_late)
        first, second = StepRecorder(Recorder(folder), True), StepRecorder(None, False)
        for index in range(6):
            for recorder in (first, second):
                end_step(recorder, index)
        if not is_late:
            first.hand_over()
        second.take_over(Recorder(folder, takes_over=True), last_step_in(folder))
        for index in (6, 7):
            end_step(second, index, at_once=True)
        if is_late:
            first.hand_over()
        first.close(ended_well=True)
        second.close(ended_well=True)
        assert written(folder) == [*range(8)]


@pytest.mark.usefixtures("hour")
def test_events_of_steps_are_written_in_the_order_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StepRecorder(Recorder(tmp_path), True)
    monkeypatch.setattr(
        recorder, "_bottleneck", SimpleNamespace(take=lambda record, _: [RunEvent("seen", str(record.step), 0.0)])
    )
    for index in range(4):
        end_step(recorder, index)
    recorder.close(ended_well=True)
    assert [event.step for event in read_events(tmp_path) if event.kind == "seen"] == [0, 1, 2, 3]
