from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError, StepError
from evenload.records import lines
from evenload.records.reader import RecordTail, find_run, read_events, read_steps
from evenload.records.recorder import Recorder
from evenload.records.values import LateMetrics, OwnStep, RankTimes, RunEvent, StepRecord
from tests.small_disk import small_disk
from tests.unit.records.make import make_step


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a" / "run", total_steps=7)
    recorder.event("rebalance", "rank 1 slowed 2.9x", step=3, shares=(171, 85), factor=2.9, path=Path("x"))
    steps = [make_step(index, metrics={"accuracy": 0.25 * index}) for index in range(4)]
    for step in steps:
        recorder.step(step)
    recorder.close()
    assert read_steps(tmp_path / "a" / "run") == steps
    opened, event, closed = read_events(tmp_path / "a" / "run")
    assert (opened.kind, opened.message, opened.fields["total_steps"]) == ("open", "", 7)
    assert (event.kind, event.message, event.step) == ("rebalance", "rank 1 slowed 2.9x", 3)
    assert event.fields == {"shares": [171, 85], "factor": 2.9, "path": "x"}
    assert closed.kind == "close"
    for name in ("events.jsonl", "steps.jsonl"):
        first = rows(tmp_path / "a" / "run" / name)[0]
        assert first["schema"] == 1


def test_steps_of_a_rank_alone_are_written_as_their_records_are(tmp_path: Path) -> None:
    times = (0.0, 0.001234, 0.0, 0.0, 0.000456, 0.0, 0.0)
    losses = [0.1, math.inf, 1e-30]
    steps = [
        OwnStep(index, 0, index, 6, loss, 0.0017, times, 123, {"x": 0.5} if index else {}, 1e9 + index)
        for index, loss in enumerate(losses)
    ]
    together, singly = Recorder(tmp_path / "together"), Recorder(tmp_path / "singly")
    for recorder in (together, singly):
        recorder.log({"logged": 3.0}, 1)
        recorder.log({"text": "a"}, 2)
    together.own_steps(steps)
    for step in steps:
        singly.step(step.record())
    for recorder in (together, singly):
        recorder.close()
    assert read_steps(tmp_path / "together") == read_steps(tmp_path / "singly")
    own = read_steps(tmp_path / "together")
    assert [dict(step.metrics) for step in own] == [{}, {"x": 0.5, "logged": 3.0}, {"x": 0.5}]


numbers = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=50, deadline=None)
@given(loss=numbers, metric=numbers, field=numbers, name=st.text(max_size=5))
def test_any_number_survives_as_strict_json(loss: float, metric: float, field: float, name: str) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = lines.step_line(make_step(1, loss=loss), {name: metric})
    json.loads(line, parse_constant=refuse)
    back = lines.parse_line(line)
    assert isinstance(back, StepRecord)
    assert repr(back.loss) == repr(loss)
    assert repr(back.metrics) == repr({name: metric})
    line = lines.event_line(RunEvent("x", name, fields={"a": [{"b": (field,)}]}))
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=refuse)
    event = lines.parse_line(line)
    assert isinstance(event, RunEvent)
    assert event.message == name
    assert repr(float(event.fields["a"][0]["b"][0])) == repr(field)


def test_a_rank_without_a_folder_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(None, console=True)
    recorder.event("x", "hello")
    recorder.log({"loss": 1.0}, 0)
    recorder.step(make_step(0))
    recorder.settings({"a": 1})
    recorder.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_log_becomes_part_of_its_step_before_and_after(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.log({"lr": 0.1, "accuracy": 2.0}, 0)
    recorder.log({"lr": 0.2}, 1)
    recorder.step(make_step(0, metrics={"accuracy": 1.0}))
    recorder.log({"val_loss": math.nan}, 0)
    recorder.step(make_step(1))
    recorder.log({"lr": 0.3}, 2)
    recorder.close()
    first, second = read_steps(tmp_path)
    assert first.metrics.pop("val_loss") != 0  # type: ignore[attr-defined]
    assert first.metrics == {"accuracy": 2.0, "lr": 0.1}
    assert second.metrics == {"lr": 0.2}
    # One line a step; only what came late, or never got a record, has a line of its own.
    assert [("log" in row) for row in rows(tmp_path / "steps.jsonl")[1:]] == [False, True, False, True]


def test_log_of_steps_that_were_passed_over_is_kept(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.log({"a": 1.0}, 3)
    recorder.step(make_step(5))
    recorder.close()
    assert {"step": 3, "log": {"a": 1.0}}.items() <= rows(tmp_path / "steps.jsonl")[1].items()


@pytest.mark.parametrize("folder", [None, "run"])
def test_log_refuses_what_is_no_number_and_cannot_be_shown(tmp_path: Path, folder: str | None) -> None:
    recorder = Recorder(None if folder is None else tmp_path / folder)
    with pytest.raises(StepError, match=r"run.log: 'note' is b'hello'; expected a number"):
        recorder.log({"note": b"hello"}, 0)
    with pytest.raises(StepError, match=r"'x' is \[1, 2\]"):
        recorder.log({"x": [1, 2]}, 0)
    recorder.close()


def test_log_of_a_tensor_of_many_elements_says_so(tmp_path: Path) -> None:
    class Tensor:
        def __float__(self) -> float:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

        def __repr__(self) -> str:
            return "tensor([1., 2.])"

    recorder = Recorder(tmp_path)
    with pytest.raises(StepError, match=r"'x' is tensor\(\[1., 2.\]\); expected a number, or a tensor with one"):
        recorder.log({"x": Tensor()}, 0)
    recorder.close()


def test_a_second_session_appends_and_the_steps_done_again_replace_the_lost_ones(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for index in range(6):
        recorder.step(make_step(index))
    recorder.close()
    before = (tmp_path / "steps.jsonl").read_bytes()
    recorder = Recorder(tmp_path)
    recorder.step(make_step(3, loss=9.0))
    recorder.log({"val_loss": 5.0}, 3)
    recorder.close()
    assert (tmp_path / "steps.jsonl").read_bytes().startswith(before)
    assert b"schema" not in (tmp_path / "steps.jsonl").read_bytes()[len(before) :]
    steps = read_steps(tmp_path)
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert (steps[3].loss, steps[3].metrics) == (9.0, {"val_loss": 5.0})
    assert [event.kind for event in read_events(tmp_path)] == ["open", "close", "open", "close"]


def test_arms_do_not_rewind_one_another(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for arm in ("even", "evenload"):
        for index in range(2):
            recorder.step(make_step(index, arm=arm))
    recorder.close()
    assert [(step.arm, step.step) for step in read_steps(tmp_path)] == [
        ("even", 0),
        ("even", 1),
        ("evenload", 0),
        ("evenload", 1),
    ]


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_ended_on_reopen_and_skipped(tmp_path: Path, cut: int) -> None:
    recorder = Recorder(tmp_path)
    recorder.step(make_step(0))
    recorder.step(make_step(1))
    recorder.close()
    path = tmp_path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert [step.step for step in read_steps(tmp_path)] == [0]
    tail = RecordTail(tmp_path)
    tail.poll()
    recorder = Recorder(tmp_path)
    recorder.step(make_step(1, loss=7.0))
    recorder.close()
    steps = read_steps(tmp_path)
    assert [step.step for step in steps] == [0, 1]
    # With only the newline missing the line was whole, and is told after the reopening.
    followed = [record for record in tail.poll() if isinstance(record, StepRecord)]
    assert [step.loss for step in followed][-1] == steps[1].loss == 7.0
    assert len(followed) == (2 if cut == 1 else 1)


def test_a_crash_inside_the_first_line_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b'{"sche')
    (tmp_path / "events.jsonl").write_bytes(b"")
    recorder = Recorder(tmp_path)
    recorder.step(make_step(0))
    recorder.close()
    assert [step.step for step in read_steps(tmp_path)] == [0]


def test_another_schema_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"schema": 99}\n')
    for use in (lambda: Recorder(tmp_path), lambda: read_steps(tmp_path), lambda: RecordTail(tmp_path).poll()):
        with pytest.raises(ConfigError, match="schema 99, this Evenload reads schema 1; use the version"):
            use()
    assert path.read_text() == '{"schema": 99}\n'


def test_unknown_keys_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    line = lines.step_line(make_step(0), {})
    assert lines.parse_line(line[:-2] + b',"new":1}\n') == make_step(0)
    for junk in (b"\n", b"12\n", b"null\n", b"{}\n", b'{"step": 1}\n', b"\xff\xfe\n", line[:40]):
        assert lines.parse_line(junk) is None


def test_settings_are_toml_whole_or_not_at_all(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    table = {"seed": 1, "balance": (24, 6), "none": None, "sources": {"seed": "init(seed=1)"}, "at": Path("a/b")}
    recorder.settings(table)
    recorder.close()
    assert tomllib.loads((tmp_path / "config.toml").read_text()) == {
        "seed": 1,
        "balance": [24, 6],
        "sources": {"seed": "init(seed=1)"},
        "at": "a/b",
    }
    assert not list(tmp_path.glob("*.partial"))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the run folder .*file.* is not writable .*; set project_dir"):
        Recorder(tmp_path / "file")


def test_close_twice_and_writing_afterwards_is_harmless(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.close()
    recorder.close()
    recorder.event("x", "late")
    recorder.step(make_step(0))
    recorder.log({"a": 1}, 0)
    assert [event.kind for event in read_events(tmp_path)] == ["open", "close"]


def test_events_of_several_threads_stay_whole_lines(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)

    def write(name: str) -> None:
        for _ in range(200):
            recorder.event("x", name * 50)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert sorted(event.message[:1] for event in read_events(tmp_path))[2:] == ["a"] * 200 + ["b"] * 200 + ["c"] * 200


def test_find_run_takes_the_run_or_the_newest_below(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a run folder, found nothing;"):
        find_run(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"found no events.jsonl or steps.jsonl"):
        find_run(tmp_path)
    for name in ("old", "new"):
        Recorder(tmp_path / name).close()
    import os

    for file in (tmp_path / "old").iterdir():
        os.utime(file, (1, 1))
    assert find_run(tmp_path) == (tmp_path / "new", 2)
    assert find_run(tmp_path / "old") == (tmp_path / "old", 1)
    with pytest.raises(ConfigError, match="found a file;"):
        find_run(tmp_path / "old" / "steps.jsonl")


def test_busy_is_the_own_seconds() -> None:
    times = RankTimes(data_s=1, compute_s=2, wait_s=4, comm_s=8, optimizer_s=16, compile_s=32, other_s=64)
    assert times.busy_s == 51


def test_late_metrics_are_followed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step(make_step(0))
    recorder.log({"val_loss": 2.0}, 0)
    recorder.close()
    logged = [record for record in RecordTail(tmp_path).poll() if isinstance(record, LateMetrics)]
    assert [(record.step, record.metrics) for record in logged] == [(0, {"val_loss": 2.0})]


def test_a_folder_that_is_removed_while_it_is_written_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    recorder = Recorder(folder, total_steps=7)
    recorder.step(make_step(0))
    shutil.rmtree(folder)
    for index in (1, 2):
        recorder.step(make_step(index))
    recorder.event("lost", "rank 1 is gone")
    recorder.close()
    assert [record.step for record in read_steps(folder)] == [1, 2]
    assert [event.kind for event in read_events(folder)] == ["lost", "close"]
    assert capsys.readouterr().out.count("RECORDS REMOVED") == 2


def test_records_wait_while_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", 100_000):
        folder = tmp_path / "disk" / "run"
        recorder = Recorder(folder, total_steps=7)
        recorder.step(make_step(0))
        filler = tmp_path / "disk" / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        recorder.settings({"seed": 0})
        assert not list(folder.glob("*config*"))
        for index in range(1, 60):
            recorder.step(make_step(index))
        filler.unlink()
        recorder.step(make_step(60))
        recorder.close()
        assert [record.step for record in read_steps(folder)] == [*range(61)]
        (event,) = [event for event in read_events(folder) if event.kind == "settings_not_written"]
        assert "config.toml ([Errno 28] No space left on device" in event.message
    assert capsys.readouterr().out.count("RECORDS WAIT") == 1


def test_records_wait_while_a_removed_folder_cannot_be_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, open_file = tmp_path / "run", Path.open
    recorder = Recorder(folder, total_steps=7)
    shutil.rmtree(folder)

    def refuse(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "ab":
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, mode, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        for index in range(3):
            recorder.step(make_step(index))
    recorder.step(make_step(3))
    recorder.close()
    assert [record.step for record in read_steps(folder)] == [0, 1, 2, 3]
    assert "RECORDS WAIT" in capsys.readouterr().out
