from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from evenload.cli.main import main
from evenload.cli.show import show
from evenload.records.recorder import Recorder
from evenload.records.values import RankTimes
from evenload.views.run.summary import summarize_run
from evenload.views.run.summary_text import MAX_SPANS, format_run_summary
from tests.unit.records.make import START_S, make_step

app = typer.Typer()
app.command()(show)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """40 steps: equal shares, then a decision at step 10 that holds from step 12; a ragged last batch."""
    clock = [START_S]
    monkeypatch.setattr("evenload.records.recorder.time.time", lambda: clock[0])
    run = tmp_path / "runs" / "gpt"
    recorder = Recorder(run, total_steps=40)
    recorder.event("devices", "", devices=["big card", "small card"])
    recorder.event("solo_speeds", "", speeds_per_s=[400.0, 140.0])
    for index in range(40):
        clock[0] = make_step(index).time
        if index == 10:
            reason = "rank 1 is 2.0x slower than rank 0: share 128 -> 85 of 256"
            recorder.event("rebalance", reason, step=12, shares=(171, 85), num_micro=2)
        even = RankTimes(compute_s=0.35, wait_s=0.65), RankTimes(compute_s=0.97, wait_s=0.03)
        if index < 12:
            recorder.step(make_step(index, shares=(128, 128), seconds=1.0, ranks=even))
        elif index == 39:
            recorder.step(make_step(index, shares=(67, 33), num_samples=100))
        else:
            recorder.step(make_step(index))
    recorder.log({"val_loss": 1.25}, 39)
    recorder.close()
    return run


def test_the_summary_word_for_word(folder: Path) -> None:
    text = format_run_summary(summarize_run(folder)).replace(str(folder), "runs/gpt")
    assert [line.rstrip() for line in text.splitlines()] == [
        "runs/gpt: 40 steps, 10,084 samples, epoch 0, 0:26 in steps",
        "",
        "loss        4.000 first, 0.8163 last, lowest 0.8163 (step 39)",
        "throughput  387.8 samples/s; 256.0 in the first tenth of the steps, 434.0 in the last",
        "efficiency  72 % of 400.0 + 140.0 samples/s, the sum of the solo speeds; 80 % in the last tenth",
        "imbalance   47 % in the first tenth, 10 % in the last (max / mean - 1 of the ranks' own seconds)",
        "val_loss    1.250 (newest)",
        "",
        "Shares of 256 samples",
        "  steps     rank 0  rank 1  K  reason",
        "  0 to 11      128     128  2  at the start",
        "  12 to 38     171      85  2  rank 1 is 2.0x slower than rank 0: share 128 -> 85 of 256",
        "",
        "Time by segment",
        "                      data  compute    wait   comm  optimizer   memory",
        "  rank 0 big card    1.1 %   64.6 %  32.2 %  0.0 %      2.2 %  3.0 GiB",
        "  rank 1 small card  1.1 %   83.5 %  12.2 %  1.1 %      2.2 %  2.0 GiB",
        "",
        "Events",
        "  0:00  step 12  rank 1 is 2.0x slower than rank 0: share 128 -> 85 of 256",
    ]


def test_the_same_shares_later_have_the_newer_reason(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    import time

    for index, (shares, reason) in enumerate([((1, 1), ""), ((2, 0), "down"), ((1, 1), "up"), ((2, 0), "down again")]):
        if reason:
            recorder.event("rebalance", reason, shares=shares)
        recorder.step(make_step(index, num_samples=2, shares=shares, time=time.time()))
    recorder.close()
    assert [span.reason for span in summarize_run(tmp_path).spans] == ["", "down", "up", "down again"]


def test_an_event_of_several_lines_stays_in_its_column(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.step(make_step(0))
    recorder.event("failed", "rank 1 failed\n  File train.py, line 3\nValueError: no data", step=1)
    recorder.close()
    lines = format_run_summary(summarize_run(tmp_path / "run")).splitlines()
    first = next(index for index, line in enumerate(lines) if line.endswith("rank 1 failed"))
    column = lines[first].index("rank 1 failed")
    assert [line[column:] for line in lines[first : first + 3]] == [
        "rank 1 failed",
        "  File train.py, line 3",
        "ValueError: no data",
    ]
    assert not lines[first + 1][:column].strip()


def test_what_the_run_is_bound_by_is_told(tmp_path: Path) -> None:
    def write(name: str, *ranks: tuple[float, float]) -> str:
        recorder = Recorder(tmp_path / name)
        for index in range(20):
            times = tuple(RankTimes(data_s=data, compute_s=0.2, wait_s=wait) for data, wait in ranks)
            recorder.step(make_step(index, seconds=0.5, ranks=times))
        recorder.close()
        return format_run_summary(summarize_run(tmp_path / name))

    assert (
        "bottleneck  data-bound: 40 % of rank 1's step; in the last tenth data-bound: 40 % of rank 1's step"
        in write("data", (0.0, 0.2), (0.2, 0.0))
    )
    assert "bottleneck  communication-bound: 44 % of rank 1's step;" in write("network", (0.0, 0.3), (0.0, 0.22))
    assert "bottleneck" not in write("well", (0.01, 0.1), (0.02, 0.05))
    table = json.loads(CliRunner().invoke(app, [str(tmp_path / "data"), "--json"]).stdout)
    assert table["whole"]["verdict"] == {"kind": "data", "rank": 1, "fraction": pytest.approx(0.4)}


def test_arms_have_a_table_of_their_own(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for index in range(8):
        arm = ("even", "evenload")[index // 2 % 2]
        recorder.step(make_step(index, arm=arm, seconds=1.0 if arm == "even" else 0.5))
    recorder.close()
    summary = summarize_run(tmp_path)
    assert {arm: summary.samples_per_s for arm, summary in summary.by_arm.items()} == {"even": 256, "evenload": 512}
    assert len(summary.spans) == 4
    text = format_run_summary(summary)
    assert "  even          4      256.0  busy 44 %       10 %" in text
    assert "  2 to 3  evenload     171      85  2" in text


def test_many_changes_are_cut_in_the_middle(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for index in range(100):
        recorder.step(make_step(index, shares=(100 + index, 156 - index)))
    recorder.close()
    summary = summarize_run(tmp_path)
    assert len(summary.spans) == 100
    lines = format_run_summary(summary).split("Shares of 256 samples\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) == 1 + MAX_SPANS + 1
    assert lines[13].strip() == "(76 more)"
    assert lines[12].split()[0] == "11"
    assert lines[14].split()[0] == "88"


def test_ranks_that_left_and_many_ranks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "left")
    recorder.step(make_step(0))
    recorder.step(make_step(1, shares=(256,), ranks=(RankTimes(compute_s=0.5),)))
    recorder.close()
    summary = summarize_run(tmp_path / "left")
    assert [rank.num_steps for rank in summary.ranks] == [2, 1]
    assert "  1         256       -  2" in format_run_summary(summary)
    recorder = Recorder(tmp_path / "many")
    recorder.step(make_step(0, shares=tuple(range(20)), ranks=(RankTimes(compute_s=0.5),) * 20))
    recorder.close()
    assert "0 to 19 on 20" in format_run_summary(summarize_run(tmp_path / "many"))


def test_nan_losses_do_not_hide_the_best_one_and_json_stays_strict(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for index, loss in enumerate([math.nan, 2.0, 3.0, math.inf]):
        recorder.step(make_step(index, loss=loss))
    recorder.close()
    assert "loss        NaN first, inf last, lowest 2.000 (step 1)" in format_run_summary(summarize_run(tmp_path))
    result = CliRunner().invoke(app, [str(tmp_path), "--json"])
    assert result.exit_code == 0
    table = json.loads(result.stdout, parse_constant=lambda constant: pytest.fail(constant))
    assert table["losses"] == {"first": "NaN", "last": "Infinity", "best": 2.0, "best_step": 1}
    assert table["spans"][0]["shares"] == [171, 85]


def test_show_takes_the_run_and_the_folder_above(folder: Path) -> None:
    for path in (folder, folder.parent):
        result = CliRunner().invoke(app, [str(path)])
        assert result.exit_code == 0
        assert result.stdout == format_run_summary(summarize_run(folder)) + "\n"
        assert result.stderr == ""
    Recorder(folder.parent / "other").close()
    result = CliRunner().invoke(app, [str(folder.parent)])
    assert result.exit_code == 0
    assert result.stderr == f"evenload: {folder.parent / 'other'} is the newest of 2 runs in {folder.parent}\n"
    assert "no step was committed yet" in result.stdout


def test_show_live_of_an_ended_run_shows_its_newest_session_and_ends(folder: Path) -> None:
    result = CliRunner().invoke(app, [str(folder), "--live"])
    assert result.exit_code == 0
    first, *_, last = result.stdout.splitlines()
    assert first.startswith("step 1/40 | ")
    assert last.startswith("step 40/40 | ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "evenload: error: nowhere: expected a run folder, found nothing;"),
        (["."], "found no events.jsonl or steps.jsonl in it or directly below it"),
        (["newer"], "schema 99, this Evenload reads schema 1"),
        ([".", "--json", "--live"], "--json, --live, --html, --web, --trace and --to are ways to show a run"),
        (["12", "--web"], "evenload: error: 12: expected a run folder, found nothing;"),
        ([".", "page.html"], "page.html: only --html writes to a file"),
        ([".", "--port", "8000"], "--port needs --web"),
        ([".", "--steps", "1:2"], "--steps needs --trace FILE"),
    ],
)
def test_wrong_use_ends_with_2_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments == ["newer"]:
        (tmp_path / "newer").mkdir()
        (tmp_path / "newer" / "steps.jsonl").write_text('{"schema": 99}\n')
    with pytest.raises(SystemExit) as ended:
        main(["show", *arguments])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert message in err and err.count("\n") == 1
    assert out == ""
