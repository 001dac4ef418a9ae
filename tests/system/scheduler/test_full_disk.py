"""Disks that are full: small ones of their own are mounted, filled, and emptied again. No job is lost, and none runs twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenload.errors import QueueError
from evenload.scheduler import paths
from tests.system.scheduler.daemons import Box, box, until
from tests.system.scheduler.machine import fill, free, small_disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which root alone can")

_FILL = "echo ran >> {witness}; cat /dev/zero > {disk}/fill; echo full >> {witness}; exit {code}"


def _submit(queue: Box, disk: Path, witness: Path, code: int) -> str:
    return queue.submit("sh", "-c", _FILL.format(disk=disk, witness=witness, code=code), folder="/")


def test_a_job_that_fills_the_disk_of_its_attempt_has_ended_once(tmp_path: Path) -> None:
    """Also one that is to start there while no byte is left."""
    with box() as queue, small_disk(queue.folder / paths.ATTEMPTS, "size=8m") as disk:
        assert disk is not None
        queue.settings("[cpu]\nslots = 2\n")
        queue.start()
        fill(disk)
        witness = tmp_path / "witness"
        job = _submit(queue, disk, witness, 3)
        until(lambda: any("No space" in text for text in queue.call("status")["problems"]), queue.log)
        assert not witness.exists() and queue.state(job)["attempt"] == 1
        (disk / "fill").unlink()
        done = queue.wait_for(job, "SUCCEEDED", "FAILED")
        assert (disk / "fill").stat().st_size > 4e6, "the disk wasn't full"
        assert (done["reason"], done["attempt"]) == ("exit code 3", 1)
        assert witness.read_text() == "ran\nfull\n"
        (disk / "fill").unlink()
        queue.clean()


def test_a_job_that_fills_the_disk_of_the_queue_has_ended_once(tmp_path: Path) -> None:
    """The end is recorded once there is room."""
    with box() as queue, small_disk(queue.folder, "size=8m") as disk:
        assert disk is not None
        queue.settings("[cpu]\nslots = 2\n")
        queue.start()
        witness = tmp_path / "witness"
        job = _submit(queue, disk, witness, 0)
        until(lambda: witness.exists() and "full" in witness.read_text(), queue.log)
        until(lambda: not queue.runners(), queue.log)
        time.sleep(1.0)
        (disk / "fill").unlink()
        done = queue.wait_for(job, "SUCCEEDED", "FAILED")
        assert (done["state"], done["attempt"]) == ("SUCCEEDED", 1)
        assert witness.read_text() == "ran\nfull\n"
        queue.stop()
        queue.clean()


def test_a_job_whose_log_finds_no_room_begins_once_there_is_some(tmp_path: Path) -> None:
    """The disk of the logs has no room for one more file."""
    with box() as queue:
        queue.settings("[cpu]\nslots = 1\n")
        with small_disk(queue.folder / paths.LOGS, "nr_inodes=1"):
            queue.start()
            job = queue.submit("sh", "-c", f"echo ran >> {tmp_path}/witness", folder="/")
            queue.wait_for(job, "RUNNING", "FAILED")
            until(lambda: len(queue.runners()) == 1, queue.log)
            time.sleep(1.0)
            assert queue.state(job)["state"] == "RUNNING" and not (tmp_path / "witness").exists(), queue.story(job)
            subprocess.run(["mount", "-o", "remount,nr_inodes=100", str(queue.folder / paths.LOGS)], check=True)
            assert queue.wait_for(job, "SUCCEEDED", "FAILED")["attempt"] == 1
            assert (tmp_path / "witness").read_text() == "ran\n"
            queue.clean()


_SAVES = """
import sys, time
from pathlib import Path
from evenload import job
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.05)
for step in job.steps(10**6, start=0, save=lambda: None):
    time.sleep(0.01)
    if Path(sys.argv[1], "end").exists():
        break
"""


def test_what_is_learned_while_the_disk_is_full_counts_once(tmp_path: Path) -> None:
    """A first report makes a job preemptible, and an end is one run of the command, also if they are recorded again."""
    with box() as queue, small_disk(queue.folder, "size=8m") as disk:
        queue.settings("[cpu]\nslots = 2\n")
        with small_disk(queue.folder / paths.ATTEMPTS, "size=8m"), small_disk(queue.folder / paths.LOGS, "size=1m"):
            queue.start()
            assert disk is not None
            wait = f"while [ ! -e {tmp_path}/end ]; do sleep 0.05; done"
            short = queue.submit("sh", "-c", wait, folder="/")
            queue.wait_for(short, "RUNNING")
            fill(disk)
            (tmp_path / "end").touch()
            for _ in range(2):  # each of these turns fails to record the end, and answers
                until(lambda: any("is full" in text for text in queue.call("status")["problems"]), queue.log)
                assert queue.state(short)["state"] == "RUNNING"
            with pytest.raises(QueueError, match="is full"):
                queue.submit("true")
            until(lambda: queue.log().count("nothing can be recorded") >= 3, queue.log)
            free(disk)
            queue.wait_for(short, "SUCCEEDED")
            (tmp_path / "end").unlink()
            saves = queue.submit(sys.executable, "-c", _SAVES, str(tmp_path), folder="/")
            queue.wait_for(saves, "RUNNING")
            num = queue.log().count("nothing can be recorded")
            fill(disk)
            (tmp_path / "go").touch()
            until(lambda: queue.log().count("nothing can be recorded") > num, queue.log)
            free(disk)
            again = queue.stored(queue.submit("sh", "-c", wait, folder="/"))
            assert again.spec.estimate_source == "1 run of the same command"
            until(lambda: queue.stored(saves).spec.preemptible, lambda: queue.story(saves))
            (tmp_path / "end").touch()
            queue.wait_for(saves, "SUCCEEDED", "FAILED")
            queue.wait_for(again.id, "SUCCEEDED")
            queue.clean()
