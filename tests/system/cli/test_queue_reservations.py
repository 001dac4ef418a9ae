"""Recurring reservations of a real queue: a job waits for the window's end, and the next window follows."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.system.cli.queue_box import box_in, until


def test_the_next_window_follows(tmp_path: Path) -> None:
    with box_in(tmp_path) as box:
        box.wait(box.submit("--", "true"), "SUCCEEDED")
        labels = [row["label"] for row in json.loads(box.run("queue", "--json").out)["devices"]]
        began_s = time.time()
        made = box.run("queue", "reserve", ",".join(labels), "2s", "nobody-here", "--every", "day")
        assert made.code == 0 and "from now on, every day" in made.out, made
        waiting = box.submit("--time", ":10m", "--", "true")

        def window() -> tuple[float, float]:
            (row,) = json.loads(box.run("queue", "--json").out)["reservations"]
            return row["start_s"], row["end_s"]

        until(lambda: window()[0] > began_s + 3600, lambda: str(window()))
        start_s, end_s = window()
        assert abs(end_s - start_s - 2) < 0.01
        box.wait(waiting, "SUCCEEDED")
        assert box.job(waiting)["first_began_s"] > began_s + 2
        assert ", every day" in box.run("ps").out and "every" in box.run("queue").out
        later = box.run("queue", "reserve", labels[0], "1h", "--at", "2099-01-01 09:00")
        assert later.code == 0 and "nobody (maintenance)" in later.out and "2099" in later.out, later
        assert "overlaps" not in later.out
        assert f" is for {labels[0]} too: only the next windows of both were compared" in later.out
        other = box.run("queue", "reserve", labels[0], "1h", "ann", "--at", "2099-01-01 09:59")
        assert f", for nobody: meanwhile only users of both may use {labels[0]}" in other.out, other
        saturday = box.run("queue", "reserve", labels[0], "1h", "--at", "2099-01-03 09:00", "--every", "weekday")
        assert "1h from 2099-01-05 09:00, every weekday" in saturday.out, saturday
        for wrong in (("--at", "noon"), ("--every", "month"), ("--at", "2020-01-01 09:00")):
            assert box.run("queue", "reserve", labels[0], "1h", *wrong).code == 2
        assert box.run("queue", "show", "--at", "09:00").code == 2
