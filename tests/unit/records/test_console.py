from __future__ import annotations

import math
from pathlib import Path

import pytest

from evenload.records.console import ProgressLines, RunInfo, format_number, format_seconds, plain_line
from evenload.records.recorder import Recorder
from evenload.records.summary import summarize_steps
from evenload.records.values import RankTimes, RunEvent
from tests.unit.records.make import make_step


def test_the_plain_line_word_for_word() -> None:
    info = RunInfo()
    info.add(RunEvent("open", "", fields={"total_steps": 400}))
    window = [make_step(index) for index in range(118, 120)]
    for step in window:
        info.add(step)
    assert plain_line(window, info) == (
        "step 120/400 | loss 0.3101 | 512.0 samples/s | busy 87 % | rank 0: share 171, busy 96 %, wait 4 % | "
        "rank 1: share 85, busy 78 %, wait 22 % | 2:20 left"
    )


def test_efficiency_needs_the_solo_speed_of_each_rank() -> None:
    step = make_step(0)
    assert summarize_steps([step]).efficiency is None
    assert summarize_steps([step], (400.0,)).efficiency is None
    assert summarize_steps([step], (400.0, 140.0)).efficiency == pytest.approx(512 / 540)
    info = RunInfo()
    info.add(RunEvent("solo_speeds", "", fields={"speeds_per_s": [400.0, "140.0"]}))
    info.add(step)
    assert " | efficiency 95 % | " in plain_line([step], info)


def test_busy_and_imbalance_by_hand() -> None:
    ranks = (RankTimes(compute_s=3.0, wait_s=1.0), RankTimes(compute_s=1.0, wait_s=2.0, comm_s=1.0))
    summary = summarize_steps([make_step(0, seconds=4.0, ranks=ranks)])
    assert summary.busy == pytest.approx((3 + 1) / (2 * 4))
    assert summary.imbalance == pytest.approx(3 / 2 - 1)
    assert [(rank.busy, rank.wait) for rank in summary.ranks] == [(0.75, 0.25), (0.25, 0.75)]
    assert summary.samples_per_s == 64


def test_a_window_over_a_change_of_ranks_judges_the_last_ones() -> None:
    alone = make_step(1, shares=(256,), ranks=(RankTimes(compute_s=0.5),))
    summary = summarize_steps([make_step(0), alone])
    assert [(rank.share, rank.busy) for rank in summary.ranks] == [(256, 1.0)]
    assert summary.num_samples == 512


def test_a_rank_that_writes_from_now_on_begins_in_the_middle_of_a_line() -> None:
    plain = ProgressLines(log_every_s=1e9)
    plain.add(make_step(0))
    plain.add(make_step(1))
    plain.add(RunEvent("open", ""))
    plain.add(make_step(2, shares=(256,), ranks=(RankTimes(compute_s=0.5),)))
    (line,) = plain.finish()
    assert "step 3" in line and "rank 1: share 85" in line


def test_the_first_step_then_one_line_an_interval() -> None:
    plain = ProgressLines(log_every_s=10.0)
    shown = [step for step in range(100) if plain.add(make_step(step))]
    assert shown == [0, 20, 40, 60, 80]
    assert len(plain.finish()) == 1
    assert plain.finish() == []


def test_the_first_step_has_no_rate_and_the_last_line_shows_usual_shares() -> None:
    plain = ProgressLines(log_every_s=10.0)
    plain.add(RunEvent("open", ""))
    (first,) = plain.add(make_step(0, seconds=30.0))
    assert first == "step 1 | loss 4.000"
    for index in range(1, 5):
        plain.add(make_step(index))
    plain.add(make_step(5, num_samples=3, shares=(2, 1)))
    (last,) = plain.finish()
    assert "share 171" in last and "share 85" in last and "step 6" in last
    plain.add(make_step(6, num_samples=3, shares=(2, 1)))
    (alone,) = plain.finish()
    assert "share 171" in alone


def test_without_the_runs_length_the_epoch_is_told() -> None:
    info = RunInfo()
    step = make_step(45)
    info.add(step)
    assert plain_line([step], info).startswith("step 46 | loss")
    assert "left" not in plain_line([step], info)
    info.add(RunEvent("data", "", fields={"epoch_steps": 40}))
    assert plain_line([step], info).startswith("step 46 (epoch 1: 6/40) | loss")
    assert plain_line([step], info).endswith("| 0:17 left in the epoch")


def test_the_time_left_counts_what_is_between_the_steps() -> None:
    info = RunInfo()
    info.add(RunEvent("open", "", fields={"total_steps": 110}))
    for index in range(10):
        info.add(make_step(index, time=100.0 + 2 * index))
    assert info.left_s(make_step(9)) == pytest.approx(200)


def test_many_ranks_fit_one_line() -> None:
    ranks = tuple(RankTimes(compute_s=0.4 + index / 1000, wait_s=0.1 - index / 1000) for index in range(64))
    step = make_step(0, shares=tuple(range(64)), ranks=ranks)
    line = plain_line([step], RunInfo())
    assert "64 ranks: shares 0 to 63, busy 80 % to 93 %, rank 63 waits least (7 %)" in line
    assert len(line) < 160


def test_the_instruction_after_a_stop_is_the_last_line() -> None:
    plain = ProgressLines(log_every_s=1e9)
    plain.add(make_step(0))
    assert plain.add(make_step(1)) == []
    progress, instruction = plain.add(
        RunEvent("stopped", "stopped after step 2; start it again: evenload run train.py")
    )
    assert progress.startswith("step 2 | ") and instruction.endswith("start it again: evenload run train.py")
    assert plain.finish() == []


def test_a_line_never_mixes_arms() -> None:
    plain = ProgressLines(log_every_s=10.0)
    for index in range(10):
        plain.add(make_step(index, arm="even", seconds=100.0))
    plain.add(make_step(10, arm="evenload"))
    (line,) = plain.finish()
    assert line.startswith("evenload | step 11 | ")
    assert "512.0 samples/s" in line


def test_a_nan_loss_and_a_step_without_time_are_shown() -> None:
    step = make_step(0, loss=math.nan, seconds=0.0, ranks=(RankTimes(), RankTimes()))
    assert "loss NaN | busy 0 % | rank 0" in plain_line([step], RunInfo())  # no speed without time


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.000"),
        (-2.34567, "-2.346"),
        (123456.7, "123457"),
        (0.0123456, "0.01235"),
        (1e-5, "1.000e-05"),
        (2e12, "2.000e+12"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (192, "3:12"), (3723, "1:02:03"), (200_000, "2 d 07 h")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_recorder_prints_for_a_script_without_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path, console=True, log_every_s=10.0, total_steps=30)
    recorder.event("resume", "resuming at step 0")
    recorder.event("silent", "")
    for index in range(30):
        recorder.step(make_step(index))
    recorder.close()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "evenload: resuming at step 0"
    assert [line.split(" | ")[0] for line in out[1:]] == ["step 1/30", "step 21/30", "step 30/30"]
