"""All jobs as text and JSON: the parts that several processes make are one list, and what can't be made is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenload.errors import QueueError
from evenload.job.processes import boot_id, boottime_s
from evenload.scheduler import clock
from evenload.scheduler.clock import ClockAnchor
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device, JobSpec
from evenload.scheduler.store.writer import QueueStore
from evenload.views.queue import full_list
from evenload.views.queue.view import JobFilter, view_of

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with QueueStore(tmp_path, holder="a test") as store:
        store.record(events.DeviceAdded(0.0, Device("gpu0", "here")))
        for number in range(1, 60):
            name = "größe\x1b[2J" if number == 40 else f"gpt-{number}"
            store.record(events.Submitted(number + 0.1234567, str(number), JobSpec(f"user{number % 3}", name=name)))
        store.record(events.Placed(70.0, "5", ("gpu0",), 1, "first in line"))
        store.commit()
    yield tmp_path


def _in_parts(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    monkeypatch.setattr(full_list, "_MIN_JOBS_TO_SPLIT", 10 if num > 1 else 1000)
    monkeypatch.setattr(full_list.os, "sched_getaffinity", lambda pid: set(range(num)))


@pytest.mark.parametrize("num", [2, 3, 9])
def test_parts_make_one_list(folder: Path, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    _in_parts(monkeypatch, 1)
    lines, objects = "".join(full_list.all_lines(folder)), "".join(full_list.all_json(folder))
    of_user = "".join(full_list.all_lines(folder, [JobState.PENDING], "user2"))
    _in_parts(monkeypatch, num)
    assert "".join(full_list.all_lines(folder)) == lines
    assert "".join(full_list.all_lines(folder, [JobState.PENDING], "user2")) == of_user
    assert json.loads("".join(full_list.all_json(folder)))["jobs"] == json.loads(objects)["jobs"]
    assert [line.split()[0] for line in lines.splitlines()[1:]] == [str(number) for number in range(1, 60)]
    assert "größe?[2J" in lines, "nothing in a name moves the cursor"
    assert len(of_user.splitlines()) == 1 + 19


def test_times_are_the_wall_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has set it three hours ahead of the queue's."""
    now_s = time.time()
    with QueueStore(tmp_path, holder="a test") as store:
        store.anchor = ClockAnchor(boot_id(), now_s - boottime_s())
        store.record(events.Submitted(now_s, "1", JobSpec("ann")))
        store.commit()
    monkeypatch.setattr(clock, "wall_s", lambda: time.time() + 10_800.0)
    (job,) = json.loads("".join(full_list.all_json(tmp_path)))["jobs"]
    (line,) = view_of(tmp_path, JobFilter()).jobs
    assert all(abs(row["submitted_s"] - now_s - 10_800.0) < 1.0 for row in (job, line))
    at = [time.strftime("%Y-%m-%d %H:%M", time.localtime(now_s + 10_800.0 + more_s)) for more_s in (-1, 1)]
    assert any(text in "".join(full_list.all_lines(tmp_path)) for text in at)


def test_a_part_without_jobs_leaves_no_gap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_parts(monkeypatch, 4)
    found = json.loads("".join(full_list.all_json(folder, [JobState.STARTING])))["jobs"]
    assert [(job["id"], job["devices"]) for job in found] == [("5", ["gpu0"])]
    assert json.loads("".join(full_list.all_json(folder, [JobState.FAILED])))["jobs"] == []


def test_what_a_process_could_not_make_is_made_again_and_its_error_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_parts(monkeypatch, 3)
    monkeypatch.setattr(full_list, "_JSON", "no_such_function(id)")
    with pytest.raises(QueueError, match="no_such_function"):
        "".join(full_list.all_json(folder))


def test_who_looks_no_further_leaves_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_parts(monkeypatch, 3)
    some = full_list.all_lines(folder)
    next(some), next(some)
    some.close()  # conftest tells of processes that are left
