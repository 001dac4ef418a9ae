"""Small jobs that share a device in a real queue: measured, let together, sent away where memory runs out, found again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenload.errors import EvenloadError
from evenload.scheduler.store.audit import audit
from evenload.views.queue.job_summary import job_text, summarize_job
from evenload.views.queue.text import text
from evenload.views.queue.view import JobFilter, view_of
from tests.paths import ROOT
from tests.system.scheduler.daemons import Box, box, until
from tests.system.scheduler.external_box import _CARDS

MIB, GIB = 2**20, 2**30
SIZE = 1000 * MIB
"""Memory of the one slot of cores, as these tests set it."""

HOLDER = """
import pathlib, sys, time
held = bytearray(int(sys.argv[2]) << 20)
held[::4096] = b"x" * len(held[::4096])
folder = pathlib.Path(sys.argv[1])
while not (folder / "end").exists():
    time.sleep(0.05)
"""
"""Holds memory until it may end. Its third argument makes it another command."""

GROWING = """
import json, os, pathlib, sys, time
from evenload import job
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
state = folder / f"state-{name}"
done = json.loads(state.read_text()) if state.exists() else 0

def hold(mib):
    held.append(bytearray(mib << 20))
    held[-1][::4096] = b"x" * len(held[-1][::4096])

held = []
hold(100)
for step in job.steps(100000, start=done, save=lambda step: state.write_text(json.dumps(step))):
    time.sleep(0.05)
    if (folder / f"grow-{name}").exists() and len(held) < 2:
        hold(600)
    if (folder / "end").exists():
        break
"""


@pytest.fixture
def queue() -> Iterator[Box]:
    with box() as made:
        _set(made, share_after_s=1.0)
        made.start()
        made.client().close()
        yield made


def _set(queue: Box, **settings: Any) -> None:
    queue.settings(
        "[cpu]\nslots = 1\n[settings]\n"
        + "".join(f"{name} = {value}\n" for name, value in settings.items())
        + f'[[device]]\nmatch = "cpu"\nmemory_bytes = {SIZE}\n'
    )


def _holder(queue: Box, folder: Path, mib: int, name: str = "", **spec: Any) -> str:
    command = [sys.executable, "-c", HOLDER, str(folder), str(mib), name]
    return queue.submit(*command, spec={"share_device": True, **spec})


@pytest.mark.timeout(180)
def test_jobs_are_measured_and_then_share(queue: Box, tmp_path: Path) -> None:
    first = _holder(queue, tmp_path, 150, "first")
    third = _holder(queue, tmp_path, 50, "third", needs={"memory_bytes": 300 * MIB})
    queue.wait_for(third, "RUNNING")
    assert queue.stored(first).peak_bytes > 0, "before it was measured it was alone"
    second = _holder(queue, tmp_path, 100, "second")  # of which nothing is known: it needs a device of its own
    assert 150 * MIB < queue.stored(first).peak_bytes < 250 * MIB
    rows = {job: queue.state(job) for job in (first, second, third)}
    assert rows[first]["shares"] == [third] and rows[third]["shares"] == [first]
    assert rows[first]["devices"] == rows[third]["devices"] and rows[second]["state"] == "PENDING"
    (device,) = queue.call("status")["devices"]
    assert (device["job"], device["jobs"], device["excess_bytes"]) == (first, [first, third], 0)
    shown = "\n".join(text(view_of(queue.folder, JobFilter())))
    assert f"jobs {first}, {third}" in shown and f"shares with {third}, uses 0.1" in shown
    story = job_text(summarize_job(queue.folder, first))
    assert "may share its device" in story and "of its device at peak" in story and f"job {third}" in story
    (tmp_path / "end").touch()
    for job in rows:
        assert queue.wait_for(job, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED"
    # All that ended were measured to the end, and the next ones like them are known from the start.
    (tmp_path / "end").unlink()
    again = [_holder(queue, tmp_path, 150, "first"), _holder(queue, tmp_path, 100, "second")]
    for job in again:
        queue.wait_for(job, "RUNNING")
    assert [queue.stored(job).spec.peak_bytes for job in again] == [queue.stored(j).peak_bytes for j in (first, second)]
    assert queue.state(again[0])["shares"] == [again[1]]
    (tmp_path / "end").touch()
    for job in again:
        queue.wait_for(job, "SUCCEEDED")
    queue.stop()
    assert audit(queue.folder) == []


@pytest.mark.timeout(180)
def test_an_array_learns_from_its_first_element(queue: Box, tmp_path: Path) -> None:
    # Long before `share_after_s` would make it known: an element that has ended was measured.
    program = {"command": [sys.executable, "-c", HOLDER, str(tmp_path), "80"], "folder": str(tmp_path)}
    job = {"spec": {"share_device": True}, "program": program}
    (tmp_path / "end").touch()
    names = queue.call("submit", jobs=[job] * 3, array=True)["jobs"]
    queue.wait_for(names[0], "SUCCEEDED")
    for name in names[1:]:
        queue.wait_for(name, "SUCCEEDED")
        assert queue.stored(name).spec.peak_bytes >= 80 * MIB


@pytest.mark.timeout(180)
def test_a_sweep_of_long_jobs_does_not_wait_for_the_first_to_end(queue: Box, tmp_path: Path) -> None:
    job = {
        "spec": {"share_device": True},
        "program": {"command": [sys.executable, "-c", HOLDER, str(tmp_path), "80"], "folder": str(tmp_path)},
    }
    names = queue.call("submit", jobs=[job] * 3, array=True)["jobs"]
    for name in names:
        queue.wait_for(name, "RUNNING")
    assert queue.call("status")["devices"][0]["jobs"] == names
    (tmp_path / "end").touch()
    for name in names:
        queue.wait_for(name, "SUCCEEDED")


@pytest.mark.timeout(180)
def test_one_that_grows_too_large_saves_and_waits_with_what_is_known_of_it(queue: Box, tmp_path: Path) -> None:
    jobs = [
        queue.submit(
            sys.executable, "-c", GROWING, str(tmp_path), name,
            spec={"share_device": True, "needs": {"memory_bytes": 300 * MIB}},
        )
        for name in "ab"
    ]  # fmt: skip
    for job in jobs:
        queue.wait_for(job, "RUNNING")
        until(lambda job=job: queue.stored(job).spec.preemptible and queue.stored(job).peak_bytes, queue.log)  # type: ignore[misc]
    for name in "ab":
        (tmp_path / f"grow-{name}").touch()
    old, young = jobs
    found = queue.wait_for(young, "PENDING")
    assert found["peak_bytes"] > 650 * MIB, found
    assert queue.state(old)["state"] == "RUNNING" and queue.state(old)["attempt"] == 1
    (attempt,) = queue.call("job", job=young)["attempts"]
    assert attempt["ending"] == "Yielded" and "those that share its device may need 1." in attempt["reason"]
    (tmp_path / "end").touch()
    for job in jobs:
        queue.wait_for(job, "SUCCEEDED")
    assert queue.stored(young).attempt == 2 and queue.stored(young).done > 1


@pytest.mark.timeout(180)
def test_those_that_can_not_save_stay_and_everybody_is_told(queue: Box, tmp_path: Path) -> None:
    jobs = [_holder(queue, tmp_path, 600, name, needs={"memory_bytes": 300 * MIB}) for name in "ab"]
    for job in jobs:
        queue.wait_for(job, "RUNNING")
    until(lambda: queue.call("status")["devices"][0]["excess_bytes"] > 150 * MIB, queue.log)
    until(lambda: "none of them can be stopped" in queue.log(), queue.log)
    assert "the memory is overcommitted by 0.2 GB" in "\n".join(text(view_of(queue.folder, JobFilter())))
    (tmp_path / "end").touch()
    for job in jobs:
        assert queue.wait_for(job, "SUCCEEDED", "FAILED")["attempt"] == 1


@pytest.mark.timeout(180)
def test_a_new_daemon_finds_all_who_share(queue: Box, tmp_path: Path) -> None:
    jobs = [_holder(queue, tmp_path, 50, name, needs={"memory_bytes": 200 * MIB}) for name in "abcd"]
    for job in jobs:
        queue.wait_for(job, "RUNNING")
    holders = queue.call("status")["devices"][0]["jobs"]
    queue.kill()
    assert audit(queue.folder) == []
    queue.start()
    assert queue.call("status")["devices"][0]["jobs"] == holders and sorted(holders) == sorted(jobs)
    assert all(queue.state(job)["state"] == "RUNNING" for job in jobs)
    until(lambda: all(queue.stored(job).peak_bytes for job in jobs), queue.log)
    (tmp_path / "end").touch()
    for job in jobs:
        assert queue.wait_for(job, "SUCCEEDED", "FAILED")["attempt"] == 1


def test_who_shares_has_one_device(queue: Box) -> None:
    with pytest.raises(EvenloadError, match="share_device: such a job has one device; this one requests 2"):
        queue.submit("true", spec={"share_device": True, "needs": {"min_devices": 1, "max_devices": 2}})


ON_GPU = (
    _CARDS
    + """
me, gib = os.getpid(), int(sys.argv[2])
number = int(os.environ["CUDA_VISIBLE_DEVICES"].split("-")[1][0])
with cards() as found:
    card = found[number]
    card["pids"].append(me)
    card["sizes"][str(me)] = gib * 2**30
    card["used"] += gib * 2**30
while not (folder / f"end-{gib}").exists():
    time.sleep(0.05)
with cards() as found:
    card = found[number]
    card["pids"].remove(me)
    card["used"] -= gib * 2**30
"""
)


@pytest.mark.timeout(180)
def test_on_a_gpu_jobs_beside_are_known_and_external_processes_are_not(tmp_path: Path) -> None:
    card: dict[str, Any] = {"Name": "NVIDIA H200", "total": 100 * GIB, "pids": [], "sizes": {}, "used": 0}
    cards = tmp_path / "cards.json"
    cards.write_text(json.dumps([card]))
    (tmp_path / "program.py").write_text(ON_GPU)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "stand_in_nvml"), str(ROOT)]),
        "STAND_IN_GPUS_FILE": str(cards),
    }

    def change(**changes: Any) -> None:
        """The GPU as something outside of the queue makes it."""
        (found,) = json.loads(cards.read_text())
        part = tmp_path / "cards.mine"
        part.write_text(json.dumps([{**found, **changes}]))
        part.replace(cards)

    with box(variables=variables) as made:

        def submit(gib: int, **spec: Any) -> str:
            command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), str(gib)]
            return made.submit(*command, spec={"share_device": True, **spec})

        made.settings("[watch]\nevery_s = 0.3\n[settings]\nshare_after_s = 1.0\n")
        made.start()
        first = submit(20)
        until(lambda: made.stored(first).peak_bytes == 20 * GIB, lambda: made.story(first))
        second = submit(30, needs={"memory_bytes": 40 * GIB})
        made.wait_for(second, "RUNNING")
        until(lambda: made.stored(second).peak_bytes == 30 * GIB, lambda: made.story(second))
        assert made.call("status")["devices"][0]["jobs"] == [first, second]
        # An external process comes: nobody joins until it has gone.
        (found,) = json.loads(cards.read_text())
        change(pids=[*found["pids"], os.getpid()], sizes={**found["sizes"], str(os.getpid()): GIB}, used=51 * GIB)
        third = submit(10, peak_bytes=10 * GIB)
        until(lambda: made.call("status")["devices"][0]["closed"], lambda: made.story(third))
        assert made.wait_for(third, "PENDING")["state"] == "PENDING"
        assert {made.state(job)["state"] for job in (first, second)} == {"RUNNING"}
        change(pids=found["pids"], sizes=found["sizes"], used=50 * GIB)
        made.wait_for(third, "RUNNING")
        # The first leaves, the others stay; then all do, and the device is free again.
        (tmp_path / "end-20").touch()
        made.wait_for(first, "SUCCEEDED")
        assert made.call("status")["devices"][0]["jobs"] == [second, third]
        for gib, job in ((30, second), (10, third)):
            (tmp_path / f"end-{gib}").touch()
            made.wait_for(job, "SUCCEEDED")
        whole = made.submit("true")
        made.wait_for(whole, "SUCCEEDED")
        assert audit(made.folder) == []
