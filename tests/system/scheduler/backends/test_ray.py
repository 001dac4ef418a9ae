"""The backend on a real Ray of two nodes on one host: the one job file runs, gives way to a higher class, and resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from evenload.scheduler.backends.ray.output import output_path
from tests.system.scheduler.backends.programs import COUNTING, expected_result, steps_done, write_counting, write_job
from tests.system.scheduler.backends.ray_box import LIMIT_S, RayBox
from tests.system.scheduler.backends.slurm_cluster import wait_until

pytestmark = pytest.mark.timeout(240)


def test_the_one_file_is_preempted_and_resumes(ray_box: RayBox, tmp_path: Path) -> None:
    """A job of a higher class takes all devices (bar 9)."""
    total = 120
    path = write_counting(tmp_path, total, 0.05)
    job = ray_box.submit(path)
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 3, "steps", LIMIT_S)
    wait_until(lambda: ray_box.one(job)["step"], "a report", LIMIT_S)
    (tmp_path / "urgent").mkdir()
    urgent = ray_box.submit(write_job(tmp_path / "urgent", ["sleep", "1"], devices="4", priority="1"))
    ray_box.wait_for(urgent, "SUCCEEDED")
    assert len(steps_done(tmp_path / "out")) < total, "it was to be preempted in its midst"
    ended = ray_box.wait_for(job, "SUCCEEDED")
    assert (tmp_path / "out" / "result").read_text() == expected_result(total)
    assert steps_done(tmp_path / "out") == list(range(total)), "a step was lost or done twice"
    assert ended["attempt"] == 2
    log = ray_box.log(job)
    assert log.count("begins at step") == 2 and "a job that goes first needs its devices" in log


def test_a_cancelled_job_saves(ray_box: RayBox, tmp_path: Path) -> None:
    job = ray_box.submit(write_counting(tmp_path, 100_000, 0.05))
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 3, "steps", LIMIT_S)
    waiting = ray_box.submit(write_job(tmp_path, ["true"], after=f'"{job}"'))
    assert ray_box.call("cancel", waiting) is None
    assert ray_box.state(waiting) == "CANCELLED"
    assert ray_box.call("cancel", job) is None
    ray_box.wait_for(job, "CANCELLED")
    saved = json.loads((tmp_path / "out" / "state.json").read_text())["step"]
    assert saved == len(steps_done(tmp_path / "out")) > 0
    assert ray_box.call("cancel", job)["text"] == f"job {job} has ended: CANCELLED"
    assert ray_box.call("output", "999") == {"error": "QueueError", "text": "no job 999 in this queue"}
    refused = ray_box.submit(write_job(tmp_path, ["true"], devices="5"))
    assert "it asks for 5 devices of kind cpu; this queue has 4 such of its 4 devices" in refused["text"]


def test_jobs_are_shown_and_changed_as_in_the_local_queue(ray_box: RayBox, tmp_path: Path) -> None:
    """Devices with their jobs, reasons and places in line; held, released, changed; by name, as far as they are one's own."""
    big = ray_box.submit(write_job(tmp_path, ["sleep", "1000"], devices="4", name='"big"'))
    wait_until(lambda: ray_box.state(big) == "RUNNING", "a start", LIMIT_S)
    first, second = (ray_box.submit(write_job(tmp_path, ["true"], devices="4", name=f'"{name}"')) for name in "ab")
    rows = ray_box.call("rows")
    assert [device["job"] for device in rows["devices"]] == [big] * 4
    assert len({device["label"] for device in rows["devices"]}) == 4
    waiting = {job["id"]: job for job in rows["jobs"] if job["state"] == "PENDING"}
    assert [waiting[job]["position"] for job in (first, second)] == [1, 2]
    assert all("needs 4 devices" in row["reason"] for row in waiting.values())
    assert rows["counts"]["PENDING"] == 2
    assert ray_box.call("hold", "a", True) == [first]
    assert ray_box.call("change", "b", {"priority": 0, "name": "c", "estimate_s": 5.0}) == [second]
    held = {job["id"]: job for job in ray_box.call("rows")["jobs"]}
    assert held[first]["is_held"] and (held[second]["name"], held[second]["position"]) == ("c", 1)
    assert "can be changed only while it waits" in ray_box.call("change", big, {"needs": {"min_devices": 1}})["text"]
    assert "5 devices" in ray_box.call("change", "c", {"needs": {"min_devices": 5, "max_devices": 5}})["text"]
    assert ray_box.call("cancel", "big", "now") is None
    ray_box.wait_for(second, "SUCCEEDED")
    assert (ray_box.state(big), ray_box.state(first)) == ("CANCELLED", "PENDING")
    assert ray_box.call("hold", first, False) == [first]
    ray_box.wait_for(first, "SUCCEEDED")


def test_an_elastic_job_grows_and_shrinks(ray_box: RayBox, tmp_path: Path) -> None:
    """It takes devices that are free, gives some to a job that goes first, and takes them again, each step done once."""
    total = 600
    path = write_counting(tmp_path, total, 0.1, devices='"1:2"', nodes="1")
    faster = COUNTING.replace("time.sleep(step_s)", "time.sleep(step_s / int(os.environ['OMP_NUM_THREADS']))")
    (tmp_path / "count.py").write_text(faster.replace("import json", "import json, os"))
    job = ray_box.submit(path)
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 3, "steps", LIMIT_S)
    wait_until(lambda: ray_box.one(job)["step"], "a report", LIMIT_S)
    assert _sizes(ray_box, job) == [2]
    (tmp_path / "second").mkdir()
    other = ray_box.submit(write_job(tmp_path / "second", ["sleep", "2"], devices="3", priority="1"))
    ray_box.wait_for(other, "SUCCEEDED")
    ray_box.wait_for(job, "SUCCEEDED")
    assert steps_done(tmp_path / "out") == list(range(total)), "a step was lost or done twice"
    assert _sizes(ray_box, job) == [2, 1, 2]


def _sizes(ray_box: RayBox, job: str) -> list[int]:
    """The number of devices of each of its attempts."""
    return [len(attempt["devices"]) for attempt in ray_box.call("job rows", job)[0]["attempts"]]


def test_a_gang_on_several_nodes_and_an_array(ray_box: RayBox, tmp_path: Path) -> None:
    words = "import os; print(os.environ['NODE_RANK'], os.environ['NUM_NODES'], os.environ['OMP_NUM_THREADS'])"
    gang = ray_box.submit(write_job(tmp_path, [sys.executable, "-c", words], devices="4"))
    words = "import os, sys; print(sys.argv[1], os.environ['EVENLOAD_ARRAY_INDEX']); sys.exit(int(sys.argv[1]) - 1)"
    array = ray_box.submit(
        write_job(tmp_path, [sys.executable, "-c", words, "{index}"], array='"1-2"', after=f'"{gang}"')
    )
    ended = ray_box.wait_for(gang, "SUCCEEDED")
    assert len(set(ended["hosts"])) <= 2
    second = output_path(ray_box.root, gang, 1, 1)
    assert [ray_box.log(gang), second.read_text()] == ["0 2 2\n", "1 2 2\n"]
    ray_box.wait_for(f"{array}_1", "SUCCEEDED")
    assert ray_box.wait_for(f"{array}_2", "FAILED")["reason"] == "exit code 1"
    assert ray_box.log(f"{array}_1") == "1 1\n"
    assert [row["id"] for row in ray_box.call("describe", [array])] == [f"{array}_1", f"{array}_2"]


def test_the_queue_is_killed(ray_box: RayBox, tmp_path: Path) -> None:
    """Ray starts it again; it knows all jobs, what ran starts again from its last save."""
    total = 60
    job = ray_box.submit(write_counting(tmp_path, total, 0.05))
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 3, "steps", LIMIT_S)
    before = ray_box.call("describe", [])
    ray_box.call("kill the queue")
    ray_box.wait_for(job, "SUCCEEDED")
    assert [row["id"] for row in ray_box.call("describe", [])] == [row["id"] for row in before]
    assert (tmp_path / "out" / "result").read_text() == expected_result(total)
    assert ray_box.one(job)["attempt"] == 2
