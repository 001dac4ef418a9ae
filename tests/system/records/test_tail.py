from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenload.records import lines
from evenload.records.reader import RecordTail
from evenload.records.recorder import Recorder
from evenload.records.values import RunEvent, StepRecord
from tests.paths import ROOT
from tests.unit.records.make import START_S, make_step

WRITER = """
import sys, time
from pathlib import Path
from evenload.records.recorder import Recorder
from tests.unit.records.make import make_step

recorder = Recorder(Path(sys.argv[1]))
for index in range(5):
    recorder.step(make_step(index))
    recorder.event("reported", f"after {index}")
print("written", flush=True)
sys.stdin.read()
"""


def step_numbers(records: list) -> list[int]:
    return [record.step for record in records if isinstance(record, StepRecord)]


def test_another_process_is_followed_at_once_and_past_its_death(tmp_path: Path) -> None:
    folder = tmp_path / "later" / "run"
    tail = RecordTail(folder)
    assert tail.poll() == []
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        # The writer lives and has flushed nothing: what it wrote is there.
        records = tail.poll()
        assert step_numbers(records) == [0, 1, 2, 3, 4]
        told = [record.message for record in records if isinstance(record, RunEvent) and record.kind == "reported"]
        assert told == [f"after {index}" for index in range(5)]
        assert tail.poll() == []
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        with Path(folder / "steps.jsonl").open("ab") as file:
            file.write(lines.step_line(make_step(5), {})[:30])
        assert tail.poll() == []
        recorder = Recorder(folder)
        recorder.step(make_step(5))
        recorder.close()
        assert step_numbers(tail.poll()) == [5]
    finally:
        writer.kill()
        writer.communicate(timeout=10)


def test_a_line_is_read_when_its_newline_is_there(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path)
    line = lines.step_line(make_step(0), {})
    for size in range(0, len(line), 40):
        with Path(tmp_path / "steps.jsonl").open("ab") as file:
            file.write(line[size : size + 40])
        assert step_numbers(tail.poll()) == ([0] if size + 40 >= len(line) else [])


def test_a_folder_moved_aside_and_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recorder = Recorder(folder)
    for index in range(3):
        recorder.step(make_step(index))
    recorder.close()
    tail = RecordTail(folder)
    assert step_numbers(tail.poll()) == [0, 1, 2]
    folder.rename(tmp_path / "aside")
    assert tail.poll() == []
    recorder = Recorder(folder)
    for index in range(5):
        recorder.step(make_step(index))
    recorder.close()
    assert step_numbers(tail.poll()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_steps", [0, 1, 7, 400, 1000])
@pytest.mark.parametrize("num_new", [0, 1, 300])
def test_since_leaves_out_what_is_older(tmp_path: Path, num_steps: int, num_new: int) -> None:
    recorder = Recorder(tmp_path)
    for index in range(num_steps + num_new):
        recorder.step(make_step(index))
    recorder.close()
    tail = RecordTail(tmp_path, since_s=START_S + 0.5 * (num_steps + 1))
    assert step_numbers(tail.poll()) == list(range(num_steps, num_steps + num_new))
    assert tail.poll() == []


def test_since_does_not_read_through_an_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path)
    for index in range(2000):
        recorder.step(make_step(index))
    parsed = []
    monkeypatch.setattr("evenload.records.reader.parse_line", lambda line: parsed.append(1) or lines.parse_line(line))
    assert step_numbers(RecordTail(tmp_path, since_s=START_S + 1000.5).poll()) == []
    recorder.close()
    assert 0 < len(parsed) < 300


def test_events_and_steps_come_by_their_times(tmp_path: Path) -> None:
    now = time.time()
    recorder = Recorder(tmp_path)
    recorder.step(dataclasses.replace(make_step(0), time=now - 5))
    recorder.event("x", "between")
    recorder.step(dataclasses.replace(make_step(1), time=now + 5))
    recorder.close()
    kinds = [record.kind if isinstance(record, RunEvent) else record.step for record in RecordTail(tmp_path).poll()]
    assert kinds == [0, "open", "x", "close", 1]
