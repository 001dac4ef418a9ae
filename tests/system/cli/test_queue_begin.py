"""`submit --begin` and `change --begin` with the real daemon."""

from __future__ import annotations

import json
from pathlib import Path

from tests.system.cli.queue_box import box_in


def test_a_job_waits_for_its_time(tmp_path: Path) -> None:
    with box_in(tmp_path) as box:
        soon = box.submit("--begin", "3s", "--", "sleep", "1000")
        night = box.submit("--begin", "8h", "--", "true")
        (row,) = (row for row in json.loads(box.run("ps", "--json").out)["jobs"] if row["id"] == night)
        assert row["state"] == "PENDING" and "not to start for another" in row["reason"], row
        assert "not before 20" in box.run("show", night).out
        running = box.wait(soon, "RUNNING")
        assert running["since_s"] - running["submitted_s"] > 2.0

        late = box.run("change", soon, "--begin", "1h")
        assert (
            late.code != 0 and f"job {soon} is RUNNING: when it begins can be changed only while it waits" in late.err
        )
        over = box.run("change", night, "--begin", "2020-01-01 09:00")
        assert over.code == 2 and "a time that is to come" in over.err
        assert box.run("change", night, "--begin", "1s").code == 0
        box.wait(night, "SUCCEEDED")
        assert box.run("cancel", "--now", soon).code == 0


def test_a_begin_without_effect_is_refused(tmp_path: Path) -> None:
    with box_in(tmp_path) as box:
        after = box.run("submit", "--begin", "9h", "--deadline", "8h", "--", "true")
        assert after.code == 2 and "--begin 9h is not before --deadline 8h" in after.err, after
        elsewhere = box.run("submit", "--begin", "9h", "--backend", "slurm", "--", "true")
        assert elsewhere.code == 2 and "only the local queue holds jobs until a time" in elsewhere.err, elsewhere
