"""The run of a queue's job: its folder, and the sessions in it that are this job's. Several jobs may use one folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from evenload.records.reader import is_run, read_events

_TOLERANCE_S = 60.0
"""A session opens within the time of an attempt, and so much around it."""


def folder_of_run(
    job: str, program: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]], now_s: float
) -> Path | None:
    """Return the folder of the job's run: the one its command names, else the only one below `runs` with a session of it."""
    command, folder = list(program.get("command", ())), str(program.get("snapshot") or program.get("folder") or "")
    if not folder or not attempts:
        return None
    named = [Path(folder) / after for word, after in pairwise(command) if word == "--project-dir"]
    runs = Path(folder) / "runs"
    if not named and runs.is_dir():
        began_s = attempts[0]["began_s"]
        named = [run for run in runs.iterdir() if is_run(run) and run.stat().st_mtime >= began_s]
    found = [run for run in named if is_run(run) and any(_sessions(run, job, attempts, now_s))]
    return found[0] if len(found) == 1 else None


def of_job(run: Path, job: str, attempts: Sequence[Mapping[str, Any]], now_s: float) -> Callable[[float], bool]:
    """Return whether a record of a run, written at a time, belongs to a session of the job."""
    sessions = [session for session in _sessions(run, job, attempts, now_s) if session is not None]
    return lambda time_s: any(low <= time_s < high for low, high in sessions)


def _sessions(
    run: Path, job: str, attempts: Sequence[Mapping[str, Any]], now_s: float
) -> list[tuple[float, float] | None]:
    """Return for each session in a run's folder when it began and when the next one did; None for another job's."""
    opened = [event for event in read_events(run) if event.kind == "open"]
    ends = [*(event.time for event in opened[1:]), math.inf]
    return [
        (event.time, end_s) if _is_of(event.time, event.fields.get("job", job), job, attempts, now_s) else None
        for event, end_s in zip(opened, ends, strict=True)
    ]


def _is_of(time_s: float, named: Any, job: str, attempts: Sequence[Mapping[str, Any]], now_s: float) -> bool:
    """Return whether a session is the job's: it says so, if it says anything, and opened during one of its attempts."""
    return named == job and any(
        attempt["began_s"] - _TOLERANCE_S
        <= time_s
        <= (now_s if attempt["ended_s"] is None else attempt["ended_s"]) + _TOLERANCE_S
        for attempt in attempts
    )
