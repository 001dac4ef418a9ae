"""The machine's clock is set back and forward while jobs run, wait, and are billed. Only the daemon sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenload.scheduler import clock
from evenload.scheduler.store.audit import audit
from evenload.views.queue.job_summary import summarize_job
from tests.system.scheduler.daemons import Box, box, until

HOUR_S = 3600.0


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Box]:
    with box() as made:
        made.set_by = tmp_path / "set_by"
        made.set_by.write_text("0")
        made.settings("[cpu]\nslots = 1\n[settings]\nmin_run_s = 0\n")
        made.start()
        made.client().close()
        yield made


def _set(queue: Box, by_s: float) -> None:
    assert queue.set_by is not None
    part = queue.set_by.with_suffix(".part")
    part.write_text(str(by_s))
    part.replace(queue.set_by)


@pytest.mark.parametrize("by_s", [-3 * HOUR_S, 3 * HOUR_S])
def test_a_clock_that_is_set_changes_no_duration(queue: Box, by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits, preemption, bills and the daemon's restart go by the time that has passed; people see the wall clock."""
    began_s = time.monotonic()
    limited = queue.submit("sleep", "1000", spec={"hard_limit_s": 6.0})
    queue.wait_for(limited, "RUNNING")
    later = queue.submit("true", spec={"not_before_s": time.time() + 2 * HOUR_S, "priority": -1})
    delay = {"not_before_s": time.time() + HOUR_S, "delays": ["not_before_s"]}
    delayed = queue.submit("true", spec={**delay, "priority": 1})
    changed = queue.submit("true", spec={"not_before_s": time.time() + 20 * HOUR_S})
    queue.call("change", job=changed, **delay)
    device, start_s = queue.call("status")["devices"][0]["id"], time.time() + 5 * HOUR_S
    queue.call("reserve", devices=[device], start_s=start_s, end_s=start_s + HOUR_S)
    _set(queue, by_s)
    time.sleep(2.5)
    row = queue.state(limited)
    assert row["state"] == "RUNNING" and row["held_s"] < 60
    assert abs(row["since_s"] - (time.time() + by_s)) < 60, "people see another time than their clock"
    (shown,) = queue.call("status")["reservations"]
    assert abs(shown["start_s"] - start_s) < 1
    for job in (delayed, changed):
        shown_s = queue.call("job", job=job)["spec"]["not_before_s"]
        assert abs(shown_s - by_s - delay["not_before_s"]) < 5, "an hour from the submission, by the clock of now"
    queue.kill()
    _set(queue, by_s + 1.5 * by_s)  # once more, while no daemon runs
    queue.start()
    done = queue.wait_for(limited, "FAILED", "SUCCEEDED")
    assert "time limit of 6 s" in done["reason"]
    assert 6.0 <= done["held_s"] <= time.monotonic() - began_s
    (attempt,) = queue.call("job", job=limited)["attempts"]
    assert 0.0 <= done["held_s"] - (attempt["ended_s"] - attempt["began_s"]) < 5.0  # until its program could start
    if by_s > 0:
        queue.wait_for(later, "SUCCEEDED")  # its time of day has come
    else:
        assert queue.state(later)["state"] == "PENDING"
    assert queue.state(delayed)["state"] == queue.state(changed)["state"] == "PENDING"
    shown_s = queue.call("job", job=delayed)["spec"]["not_before_s"]
    queue.stop()
    monkeypatch.setattr(clock, "wall_s", lambda: time.time() + 2.5 * by_s)
    assert abs(summarize_job(queue.folder, delayed).spec["not_before_s"] - shown_s) < 5, "without a daemon"
    assert audit(queue.folder) == []


def test_preemption_goes_on_after_a_clock_was_set_back(queue: Box, tmp_path: Path) -> None:
    """And a notification has the wall clock's times."""
    low = queue.submit("sleep", "1000", spec={"priority": -1}, requeue=True)
    queue.wait_for(low, "RUNNING")
    _set(queue, -3 * HOUR_S)
    high = queue.submit(
        "true", notify=[f"command:sh -c 'cat > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/message'"]
    )
    assert queue.wait_for(high, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED"
    until(lambda: queue.state(low)["attempt"] == 2, queue.log)
    assert queue.state(low)["held_s"] < 60
    until((tmp_path / "message").exists, queue.log)
    message = json.loads((tmp_path / "message").read_text())
    assert abs(message["ended_s"] - (time.time() - 3 * HOUR_S)) < 60
