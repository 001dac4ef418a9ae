"""A resized job on GPUs that a file stands in for: its own memory comes back late, and it is still the one that goes on."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.system.scheduler.daemons import box, until
from tests.system.scheduler.external_box import _CARDS
from tests.system.scheduler.test_elastic_jobs import UNTIL

GIB = 2**30
BACK_S = 1.0
PROGRAM = (
    _CARDS
    + """
from evenload import job
state = folder / "state"
done = json.loads(state.read_text()) if state.exists() else 0
mine = [int(name.split("-")[1][0]) for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
with cards() as found:
    for number in mine:
        assert not found[number]["used"] and not found[number]["pids"], found
        found[number].update(pids=[os.getpid()], used=2**30)

def save(step):
    state.write_text(json.dumps(step))
    with cards() as found:
        for number in mine:
            found[number].update(pids=[], clears_s=time.time() + float(sys.argv[2]))

for step in job.steps(100000 if len(mine) == 1 else done + 50, start=done, save=save):
    time.sleep(0.05 / len(mine))
save(step)
"""
)


def _clear(folder: Path) -> None:
    """What the driver does: memory of processes that are gone comes back, in its time."""
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads((folder / "cards.json").read_text())
        for card in found:
            if card["clears_s"] and time.time() > card["clears_s"]:
                card.update(used=0, clears_s=0.0)
        part = folder / "cards.part"
        part.write_text(json.dumps(found))
        part.replace(folder / "cards.json")


@pytest.mark.timeout(180)
def test_its_own_memory_that_comes_back_late_costs_it_nothing(tmp_path: Path) -> None:
    card = {"Name": "NVIDIA H200", "total": 139 * GIB, "pids": [], "used": 0, "clears_s": 0.0}
    (tmp_path / "cards.json").write_text(json.dumps([card] * 2))
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "stand_in_nvml"), str(ROOT)]),
        "STAND_IN_GPUS_FILE": str(tmp_path / "cards.json"),
    }
    with box(variables=variables) as queue:
        queue.settings("[watch]\nevery_s = 0.3\n")
        queue.start()
        first = queue.submit("sh", "-c", UNTIL, str(tmp_path / "end-first"))
        queue.wait_for(first, "RUNNING")
        command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), str(BACK_S)]
        job = queue.submit(*command, spec={"needs": {"min_devices": 1, "max_devices": 2}})
        until(lambda: queue.stored(job).rate_per_s > 0, lambda: queue.story(job))
        (tmp_path / "end-first").touch()

        def has_ended() -> bool:
            _clear(tmp_path)
            return queue.stored(job).state in ("SUCCEEDED", "FAILED")

        until(has_ended, lambda: queue.story(job))
        told = queue.call("job", job=job)
        assert told["job"]["state"] == "SUCCEEDED", queue.story(job)
        assert [(len(row["devices"]), row["ending"]) for row in told["attempts"]] == [(1, "Yielded"), (2, "Ended")]
