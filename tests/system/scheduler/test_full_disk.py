"""Disks that are full: small ones of their own are mounted, filled, and emptied again. No job is lost, and none runs twice."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenload.scheduler import paths
from tests.system.scheduler.daemons import Box, box, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which root alone can")

_FILL = "echo ran >> {witness}; cat /dev/zero > {disk}/fill; echo full >> {witness}; exit {code}"


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    paths.make_private(folder)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=711", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _submit(queue: Box, disk: Path, witness: Path, code: int) -> str:
    return queue.submit("sh", "-c", _FILL.format(disk=disk, witness=witness, code=code), folder="/")


def test_a_job_that_fills_the_disk_of_its_attempt_has_ended_once(tmp_path: Path) -> None:
    """Also one that is to start there while no byte is left."""
    with box() as queue, _small_disk(queue.folder / paths.ATTEMPTS) as disk:
        queue.settings("[cpu]\nslots = 2\n")
        queue.start()
        _fill(disk)
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
    with box() as queue, _small_disk(queue.folder) as disk:
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
