"""`SchedulerBackend.wait`: for jobs and arrays, over silence of the backend, and for jobs that it no longer knows."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evenload.errors import QueueError
from evenload.scheduler.backends import interface
from evenload.scheduler.backends.interface import JobStatus, SchedulerBackend
from evenload.scheduler.backends.slurm import backend
from evenload.scheduler.backends.slurm.backend import SlurmBackend
from evenload.scheduler.core.states import JobState

RUNNING, DONE, FAILED = JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED


class Recorded(SchedulerBackend):
    """Answers with one table of states after the other; None for silence."""

    name = "recorded"

    def __init__(self, *answers: dict[str, JobState] | None) -> None:
        self.answers = list(answers)

    def describe(self, ids: Sequence[str]) -> tuple[JobStatus, ...]:
        answer = self.answers.pop(0)
        if answer is None:
            raise QueueError("it does not answer")
        found = {
            name: state for name, state in answer.items() if any(interface.is_element_of(name, job) for job in ids)
        }
        return tuple(JobStatus(name, state, str(state)) for name, state in found.items())

    def build_request(self, *_: Any, **__: Any) -> Any: ...
    def submit(self, *_: Any, **__: Any) -> Any: ...
    def cancel(self, *_: Any, **__: Any) -> Any: ...
    def logs(self, *_: Any, **__: Any) -> Any: ...


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_WAIT_POLL_S", 0.0)


def ended(waiting: SchedulerBackend, *ids: str) -> list[str]:
    return [f"{status.id} {status.state}" for status in waiting.wait(ids)]


def test_each_job_and_element_once_and_over_silence() -> None:
    recorded = Recorded(
        {"1": RUNNING, "2_0": DONE, "2_1": RUNNING},
        None,
        {"1": DONE, "2_0": DONE, "2_1": RUNNING},
        {"2_0": DONE, "2_1": FAILED},
    )
    assert ended(recorded, "1", "2") == ["2_0 SUCCEEDED", "1 SUCCEEDED", "2_1 FAILED"]


def test_a_job_that_is_not_known_any_more() -> None:
    with pytest.raises(QueueError, match="recorded does not know job 1 any more"):
        ended(Recorded({"1": RUNNING}, {}), "1")


def test_a_backend_that_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_SILENT_S", -1.0)
    with pytest.raises(QueueError, match="it does not answer"):
        ended(Recorded({"1": RUNNING}, None), "1")


def test_slurm_preempted_it_for_good(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PreemptMode=CANCEL: it has left Slurm's queue, and its accounting says PREEMPTED."""
    answers = {"squeue": "", "sacct": "7|PREEMPTED|node1\n"}

    def answer(*words: str, **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0, answers[words[0]], "")

    monkeypatch.setattr(backend, "_tool", answer)
    assert ended(SlurmBackend(tmp_path), "7") == ["7 FAILED"]
    answers["squeue"] = "7|COMPLETED|node1|None\n"  # queued again, and done
    assert ended(SlurmBackend(tmp_path), "7") == ["7 SUCCEEDED"]
