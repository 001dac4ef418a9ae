"""Deadlines and prices with the real daemon: `submit --deadline`, `ps`, `show` and `queue report`."""

from __future__ import annotations

import json
from pathlib import Path

from evenload.scheduler.daemon.devices import find_devices
from evenload.scheduler.daemon.queue_file import QueueFile
from tests.system.cli.queue_box import SLOTS, box_in


def test_jobs_take_the_cheapest_device_that_is_in_time(tmp_path: Path) -> None:
    """One of two slots is fast and dear. What was saved is in the report; a deadline out of reach is named at once."""
    fast, slow = (one.label for one in find_devices(QueueFile(cpu_slots=SLOTS)) if not one.is_gpu)
    with box_in(tmp_path) as box:
        with (box.queue / "queue.toml").open("a") as file:
            file.write(f'[[device]]\nmatch = "{fast}"\nkind = "fast"\nprice_per_hour = 3000.0\n')
            file.write(f'[[device]]\nmatch = "{slow}"\nkind = "slow"\nspeed = 0.5\nprice_per_hour = 1000.0\n')
        refused = box.run("submit", "--deadline", "8h", "--", "true")
        assert refused.code == 2 and "this queue's policy is default; evenload queue set policy=cost" in refused.err
        assert box.run("queue", "set", "policy=cost").code == 0
        patient = box.submit("--deadline", "24h", "--estimate", "1h", "--", "sleep", "1")
        hurried = box.run("submit", "--deadline", "30m", "--estimate", "1h", "--name", "late", "--", "sleep", "1000")
        why = "its deadline can't be met: on 1 × fast, its fastest choice, it would end"
        assert f"deadline: {why}" in hurried.out, hurried
        (late,) = (row["id"] for row in json.loads(box.run("ps", "--json").out)["jobs"] if row["name"] == "late")
        assert why in box.run("ps").out and why in box.run("show", late).out
        box.wait(patient, "SUCCEEDED")
        box.wait(late, "RUNNING")
        for number, label in ((patient, slow), (late, fast)):
            assert label in box.run("show", number).out.splitlines()[-1]
        assert "before it" in box.run("show", patient).out
        (row,) = json.loads(box.run("queue", "report", "--json", "--by", "user").out)
        assert row["cost"] > 0.25 and row["saved"] > 0.1
        assert box.run("cancel", "--now", late).code == 0
