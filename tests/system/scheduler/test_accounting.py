"""Bills until the program's end, whenever a daemon notices it, and the steps that were repeated."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenload.scheduler.store.audit import audit
from evenload.views.queue.job_summary import summarize_job
from tests.system.scheduler.daemons import Box, box, kill, until

FORGETFUL = """
import signal, sys, time
from pathlib import Path
from evenload import job
saved = Path(sys.argv[1])
done = int(saved.read_text()) if saved.exists() else 0
for step in job.steps(10**6, start=done, save=lambda: time.sleep(1000)):
    if step == 20:
        saved.write_text("20")
    time.sleep(0.01)
"""


@pytest.fixture
def queue() -> Iterator[Box]:
    with box() as made:
        made.settings("[cpu]\nslots = 2\n[settings]\nmin_run_s = 0\n")
        made.start()
        made.client().close()
        yield made


def test_a_job_is_billed_until_its_program_ended(queue: Box, tmp_path: Path) -> None:
    """Its daemon is dead then, and comes back later; a killed runner's job counts until it was last known to run."""
    short = queue.submit("sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    lost = queue.submit("sleep", "1000")
    for job in (short, lost):
        queue.wait_for(job, "RUNNING")
    began_s = time.time()
    time.sleep(1.5)
    queue.kill()
    (tmp_path / "go").touch()
    until(lambda: len(queue.runners()) == 1, queue.log)
    ended_s = time.time()
    kill(list(queue.runners()))
    time.sleep(4.0)
    queue.start()
    for job in (short, lost):
        done = queue.wait_for(job, "SUCCEEDED", "FAILED")
        (attempt,) = queue.call("job", job=job)["attempts"]
        for seconds in (done["held_s"], attempt["ended_s"] - attempt["began_s"]):
            assert 0.5 < seconds < ended_s - began_s + 1.0
        assert abs(done["since_s"] - attempt["ended_s"]) < 0.01
    (user,) = queue.call("status")["users"]
    assert user["usage_device_s"] < 2 * (ended_s - began_s + 1.0)
    queue.stop()
    assert audit(queue.folder) == []


def test_steps_that_a_resize_repeated_are_lost_work(queue: Box, tmp_path: Path) -> None:
    """It doesn't save within its grace, so all that followed its last save is done again."""
    elastic = {"needs": {"min_devices": 1, "max_devices": 2}, "preemptible": True, "restart_s": 0.0}
    command = (sys.executable, "-c", FORGETFUL, str(tmp_path / "saved"))
    job = queue.submit(*command, spec=elastic, grace_s=0.5)
    until(lambda: queue.state(job)["done"] > 60, queue.log)
    before = queue.state(job)
    other = queue.submit("sleep", "1000")
    until(lambda: queue.state(job)["attempt"] == 2, queue.log)
    until(lambda: queue.state(job)["rate_per_s"] > 0 and queue.state(job)["done"] > 0, queue.log)
    lost = summarize_job(queue.folder, job).lost
    assert lost[1] >= before["done"] - 20, lost
    for name in (job, other):
        queue.call("cancel", jobs=[name], now=True)
        queue.wait_for(name, "CANCELLED")


def test_a_job_that_cannot_save_does_not_run_again_after_its_runner_was_killed(queue: Box) -> None:
    """Unless it was submitted for that."""
    once = queue.submit("sh", "-c", "echo up; sleep 1000")
    again = queue.submit("sh", "-c", "echo up; sleep 1000", requeue=True)
    until(lambda: "up" in queue.output(once) and "up" in queue.output(again), queue.log)
    kill(list(queue.runners()))
    failed = queue.wait_for(once, "FAILED")
    assert "its runner was killed; it can't save" in failed["reason"] and "--requeue" in failed["reason"]
    until(lambda: queue.output(again).count("up") == 2, queue.log)
    assert queue.output(once).count("up") == 1
    queue.call("cancel", jobs=[again], now=True)
    queue.wait_for(again, "CANCELLED")


SLOW_DISK = """
import time
from evenload.scheduler.runner import files
reserve = files.reserve_result
def slow(folder):
    time.sleep(1.5)
    reserve(folder)
files.reserve_result = slow
"""


def test_a_bill_begins_with_the_program(tmp_path: Path) -> None:
    """Its runner needs a while after it was admitted: a slow disk, or a machine that has much to do."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    with box(variables={"PYTHONPATH": str(tmp_path)}) as queue:
        queue.settings("[cpu]\nslots = 2\n")
        queue.start()
        short = queue.submit("sh", "-c", f"date +%s.%N > {tmp_path}/short")
        long = queue.submit("sh", "-c", f"date +%s.%N > {tmp_path}/long; sleep 1000")
        queue.wait_for(short, "SUCCEEDED")
        until(lambda: (tmp_path / "long").exists() and (tmp_path / "long").read_text() != "", queue.log)
        wanted_s = {name: float((tmp_path / name).read_text()) for name in ("short", "long")}

        def off_s(job: str, name: str) -> float:
            (attempt,) = queue.call("job", job=job)["attempts"]
            return float(attempt["began_s"] - wanted_s[name])

        assert abs(off_s(short, "short")) < 0.5
        until(lambda: abs(off_s(long, "long")) < 0.5, queue.log)
        queue.call("cancel", jobs=[long], now=True)
        queue.wait_for(long, "CANCELLED")
        queue.stop()
        assert audit(queue.folder) == []
