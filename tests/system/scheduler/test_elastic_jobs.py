"""Elastic jobs in a real queue: they grow onto idle devices, give them back, and no step is done twice or left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenload import hardware
from evenload.balance.speed_curve import rates_from
from evenload.scheduler.learned_restarts import lost_s
from tests.system.scheduler.daemons import Box, box, until

ELASTIC = """
import json, os, pathlib, sys, time
from evenload import job
folder = pathlib.Path(sys.argv[1])
state, hurry = folder / "state", folder / "hurry"
done = json.loads(state.read_text()) if state.exists() else 0
num = len(os.sched_getaffinity(0))
print("slots", num, flush=True)
for step in job.steps(int(sys.argv[2]), start=done, save=lambda step: state.write_text(json.dumps(step))):
    os.close(os.open(folder / f"step{step}", os.O_CREAT | os.O_EXCL))
    time.sleep(0 if hurry.exists() else 0.05 / num)
"""
"""As fast as it has slots; a step that is done twice fails."""
UNTIL = 'while [ ! -e "$0" ]; do sleep 0.05; done'
STEPS = 4000

needs_two_cores = pytest.mark.skipif(
    len(hardware.usable_cores()) < 2, reason="two slots of one core would not differ in what a program sees"
)


@pytest.fixture(params=["default", "goodput"])
def queue(request: pytest.FixtureRequest) -> Iterator[Box]:
    with box() as made:
        made.settings(f'[cpu]\nslots = 2\n[settings]\npolicy = "{request.param}"\nmin_run_s = 0.0\n')
        made.start()
        made.client().close()
        yield made


def _wait_for_size(queue: Box, name: str, size: int) -> None:
    """Until it computes on so many devices, and its speed there is recorded."""

    def is_there() -> bool:
        job = queue.stored(name)
        return job.state == "RUNNING" and len(job.devices) == size and job.rate_per_s > 0

    until(is_there, lambda: f"job {name} doesn't compute on {size} devices:\n{queue.story(name)}")


@needs_two_cores
@pytest.mark.timeout(180)
def test_it_grows_shrinks_and_does_every_step_once(queue: Box, tmp_path: Path) -> None:
    first = queue.submit("sh", "-c", UNTIL, str(tmp_path / "end-first"))
    queue.wait_for(first, "RUNNING")
    wide: dict[str, Any] = {"needs": {"min_devices": 1, "max_devices": 2}}
    elastic = queue.submit(sys.executable, "-c", ELASTIC, str(tmp_path), str(STEPS), spec=wide)
    _wait_for_size(queue, elastic, 1)
    start_s = queue.stored(elastic).spec.restart_s
    assert start_s is not None and 0 < start_s < 60, "its start was measured"

    (tmp_path / "end-first").touch()
    _wait_for_size(queue, elastic, 2)
    grown = queue.stored(elastic)
    assert len(grown.rates) == 2 and grown.rates[1] > 1.2 * grown.rates[0], "both speeds were measured"
    assert not grown.preempted_s, "a job that grows wasn't preempted"
    assert grown.spec.restart_s is not None and grown.spec.restart_s < 60

    queue.kill()
    queue.start()  # it knows from the record what the other has learned
    second = queue.submit("sh", "-c", UNTIL, str(tmp_path / "end-second"), spec={"estimate_s": 5.0})
    queue.wait_for(second, "RUNNING")
    _wait_for_size(queue, elastic, 1)
    shrunk = queue.stored(elastic)
    assert len(shrunk.rates) == 2 and shrunk.rates[1] > 1.2 * shrunk.rates[0]
    (tmp_path / "hurry").touch()
    done = queue.wait_for(elastic, "SUCCEEDED", "FAILED")
    assert done["state"] == "SUCCEEDED", queue.story(elastic)
    (tmp_path / "end-second").touch()
    queue.wait_for(second, "SUCCEEDED")
    assert sum(1 for path in tmp_path.iterdir() if path.name.startswith("step")) == STEPS
    told = queue.call("job", job=elastic)
    assert [len(attempt["devices"]) for attempt in told["attempts"]] == [1, 2, 1]
    counts = [int(line.split()[1]) for line in queue.output(elastic).splitlines() if line.startswith("slots")]
    assert counts[0] == counts[2] < counts[1], "each attempt sees the cores of its slots alone"


@pytest.mark.parametrize(
    ("seconds", "steps", "rate", "expected"),
    [
        (5.0, 2.0, 1.0, 3.0),
        (5.0, 2.0, 0.0, 5.0),
        (1.0, 5.0, 1.0, 0.0),
    ],  # among them: no speed known, clocks that differ
)
def test_lost_is_what_was_not_worked(seconds: float, steps: float, rate: float, expected: float) -> None:
    assert lost_s(seconds, steps, rate) == expected


@pytest.mark.parametrize(
    ("measured", "given", "expected"),
    [
        ({1: 10.0}, (), (10.0, 10.0 * 2**0.9, 10.0 * 3**0.9)),
        ({2: 10.0}, (1.0, 2.0, 3.0), (5.0, 10.0, 15.0)),  # the owner's shape, at the measured speed
        ({1: 10.0, 2: 20.0}, (), (10.0, 20.0, 20.0 * 1.5**0.9)),  # better than expected: not beyond what was seen
        ({1: 10.0, 2: 10.0}, (), (10.0, 10.0, 10.0)),  # two devices were no faster than one: three won't be either
        ({}, (1.0,), (1.0,)),
        ({1: 0.0}, (), ()),
    ],
)
def test_a_curve_from_what_was_measured(
    measured: dict[int, float], given: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    assert rates_from(measured, 3, given) == pytest.approx(expected)


def test_a_stop_waits_until_the_program_had_its_first_seconds(tmp_path: Path) -> None:
    """It takes a moment to import what it needs; a signal before that would end it with nothing saved."""
    slow = 'sleep 0.5; trap "touch saved; exit 75" TERM; while true; do sleep 0.05; done'
    with box() as queue:
        queue.settings("[cpu]\nslots = 1\n")
        queue.start()
        low = queue.submit("sh", "-c", slow, folder=str(tmp_path), spec={"priority": -1}, requeue=True)
        queue.wait_for(low, "RUNNING")
        high = queue.submit("true")
        queue.wait_for(high, "SUCCEEDED")
        assert (tmp_path / "saved").exists(), queue.output(low)
        queue.wait_for(low, "RUNNING")
        queue.call("cancel", jobs=[low])  # its owner's wish waits for nothing
        assert queue.wait_for(low, "CANCELLED")["attempt"] == 2
