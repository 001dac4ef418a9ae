"""`evenload queue report` of a queue with real jobs."""

from __future__ import annotations

import csv
import getpass
import io
import json
import time
from pathlib import Path

from evenload.scheduler.client import connect
from evenload.scheduler.store.reader import Reader
from tests.system.cli.queue_box import box_in, until


def test_the_report_has_the_hours_of_the_jobs(tmp_path: Path) -> None:
    """The same from the file and from the daemon, as a table, JSON and CSV; the group is that of queue.toml."""
    user = getpass.getuser()
    with box_in(tmp_path) as box:
        with (box.queue / "queue.toml").open("a") as file:
            file.write(f'[groups.vision]\nusers = ["{user}"]\n')
        numbers = [box.submit("--", "sleep", "0.2") for _ in range(2)]
        for number in numbers:
            box.wait(number, "SUCCEEDED")
        (row,) = json.loads(box.run("queue", "report", "--json").out)
        assert (row["user"], row["group"], row["num_jobs"], row["num_preempted"]) == (user, "vision", 2, 0)
        with Reader(box.queue) as reader:
            attempts = [attempt for number in numbers for attempt in reader.attempts(number)]
        held_s = sum((attempt.ended_s or 0.0) - attempt.began_s for attempt in attempts)
        assert abs(row["device_hours"] * 3600 - held_s) < 0.01 < held_s
        with connect(box.queue, start=False) as line:
            (other,) = line.call("report", by=["group"])["rows"]
        assert (other["user"], other["group"]) == ("", "vision") and abs(other["device_s"] - held_s) < 0.01
        (cells,) = csv.DictReader(io.StringIO(box.run("queue", "report", "--csv", "--by", "user").out))
        assert cells["user"] == user and float(cells["device_hours"]) == row["device_hours"]
        text = box.run("queue", "report", time.strftime("%Y-%m"))
        assert text.out.splitlines()[0].split()[:4] == ["month", "group", "user", "jobs"] and "vision" in text.out
        assert "nothing was submitted" in box.run("queue", "report", "1999-01").out
        for wrong in (("report", "may"), ("report", "--by", "kind"), ("show", "--csv")):
            assert box.run("queue", *wrong).code == 2, wrong


def test_a_spent_budget_leaves_idle_devices(tmp_path: Path) -> None:
    """A job that cannot be preempted waits with that reason until the budget is raised; another uses what is idle."""
    user = getpass.getuser()
    with box_in(tmp_path) as box:
        first = box.submit("--", "sleep", "0.5")
        box.wait(first, "SUCCEEDED")
        assert box.run("queue", "limit", user, "budget_device_hours=0.0001").code == 0
        until(lambda: box.run("queue").out.count("0.0001") == 1, lambda: box.run("queue").out)
        fixed = box.submit("--", "sleep", "0.1")
        until(lambda: f"the budget of {user} is spent" in box.job(fixed)["reason"], lambda: str(box.job(fixed)))
        idle = box.submit("--requeue", "--", "sleep", "0.1")
        box.wait(idle, "SUCCEEDED")
        assert box.job(fixed)["state"] == "PENDING" and "is spent" in box.run("ps").out
        box.run("queue", "limit", user, "budget_device_hours=none")
        box.wait(fixed, "SUCCEEDED")
