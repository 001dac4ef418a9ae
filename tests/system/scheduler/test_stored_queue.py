"""A queue folder of an earlier version goes on under today's daemon (tests/stored)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from tests.paths import TESTS
from tests.system.cli.queue_box import box_in


def test_a_queue_folder_of_an_earlier_version_continues(tmp_path: Path) -> None:
    """The runner of job 5 ended while no daemon ran; its result is read from its attempt's folder."""
    with box_in(tmp_path) as box:
        with tarfile.open(TESTS / "stored" / "queue.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        listed = box.run("ps", "--all", "--json")
        assert listed.code == 0, listed
        states = {job["name"]: job["state"] for job in json.loads(listed.out)["jobs"]}
        assert {name: states[name] for name in ("done", "bad", "long", "held")} == {
            "done": "SUCCEEDED",
            "bad": "FAILED",
            "long": "CANCELLED",
            "held": "PENDING",
        }
        new = box.submit("--name", "new", "--no-snapshot", "--", "python3", "-c", "print('new')")  # starts the daemon
        assert box.wait(new, "SUCCEEDED")["id"] == "6"
        assert box.wait("5", "SUCCEEDED")["attempt"] == 1
        shown = box.run("show", "3")
        assert shown.code == 0 and "42/400" in shown.out and "saved and stopped" in shown.out, shown
        assert box.run("logs", "1").out == "hello from 1\n"
