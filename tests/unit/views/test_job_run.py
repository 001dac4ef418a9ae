"""The training of a queue's job, where several jobs used one run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenload.records.lines import EVENTS_FILE, STEPS_FILE
from evenload.records.recorder import Recorder
from evenload.views.queue.job_summary import JobSummary, run_folder, run_records
from evenload.views.run.summary import summarize_run
from tests.unit.views.make_run import START_S, write_run

HOUR_S = 3600.0


def _summary(folder: Path, job: str, *attempts: tuple[float, float | None]) -> JobSummary:
    program = {"command": ["python", "train.py", "--project-dir", "runs/a"], "folder": str(folder)}
    rows = [{"began_s": began_s, "ended_s": ended_s} for began_s, ended_s in attempts]
    row: dict[str, Any] = {"id": job, "state": "RUNNING", "since_s": 0.0, "first_began_s": rows[0]["began_s"]}
    return JobSummary(row, {}, program, rows, {}, {}, START_S + 9 * HOUR_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Job 1 trained 40 steps and then job 2 its 70 in the same folder; neither session names its job."""
    parts = [tmp_path / name for name in ("first", "second")]
    for part, num, start_s in zip(parts, (40, 70), (START_S, START_S + HOUR_S), strict=True):
        write_run(part, num, faults=(), start_s=start_s)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    for name in (EVENTS_FILE, STEPS_FILE):
        first, second = ((part / name).read_bytes() for part in parts)
        (run / name).write_bytes(first + second.split(b"\n", 1)[1])
    return tmp_path


@pytest.mark.parametrize(("job", "began_s", "num"), [("1", START_S - 5, 40), ("2", START_S + HOUR_S - 5, 70)])
def test_a_job_shows_its_own_sessions(folder: Path, job: str, began_s: float, num: int) -> None:
    summary = _summary(folder, job, (began_s, began_s + 600))
    run = run_folder(summary)
    assert run == folder / "runs" / "a"
    shown = summarize_run(run, run_records(summary, run))
    assert (shown.num_steps, shown.num_sessions) == (num, 1)


def test_a_job_that_never_trained_there_shows_nothing(folder: Path) -> None:
    assert run_folder(_summary(folder, "3", (START_S + 2 * HOUR_S, None))) is None


def test_a_session_names_its_job(tmp_path: Path) -> None:
    """So that two that are there at one time are told apart."""
    run = tmp_path / "runs" / "a"
    Recorder(run, job="7").close()
    now_s = (run / EVENTS_FILE).stat().st_mtime
    for job, wanted in (("7", run), ("8", None)):
        summary = _summary(tmp_path, job, (now_s - 5, now_s + 5))
        assert run_folder(summary) == wanted
