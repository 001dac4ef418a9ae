"""A training run in a real queue takes and gives back devices without a stop: no restart, no checkpoint, the same weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evenload import hardware
from evenload.records.reader import read_events, read_steps
from evenload.scheduler.core import events
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.reader import Reader
from tests.system.scheduler.daemons import Box, box, until
from tests.system.scheduler.test_elastic_jobs import UNTIL
from tests.warm import run

needs_two_cores = pytest.mark.skipif(
    len(hardware.usable_cores()) < 2, reason="one rank for each core of its slots, and there is one core"
)
NUM_STEPS = 640
TRAIN = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenload

run = evenload.init(project_dir="run", seed=0)
torch.manual_seed(1)
rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
loader = DataLoader(TensorDataset(rows), batch_size=16, shuffle=True)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.resume(model=model, optimizer=optimizer)

def loss_fn(batch):
    if os.environ.get("SLOWLY") and not os.path.exists("hurry"):
        time.sleep(len(batch[0]) * (0.006 if step.index < 300 else 0.06))
    return (model(batch[0]) - batch[0]).square().mean()

for epoch in range(loader.epoch, 40):
    for step in loader:
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        if run.is_main:
            with open("steps", "a") as file:
                file.write(f"{step.index}\\n")
if run.is_main:
    torch.save(nn.utils.parameters_to_vector(model.parameters()).detach(), "weights.pt")
"""
SAVES = """        if (step.index + 1) % 50 == 0:
            run.checkpoint()
        if run.is_main:
            with"""
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


@contextmanager
def _two_slots() -> Iterator[Box]:
    """A queue with two devices of one core each, and the settings of every queue."""
    cores = hardware.usable_cores()[:2]
    with box() as queue:
        queue.settings("[cpu]\nslots = 2\n")
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            queue.start()
        finally:
            os.sched_setaffinity(0, before)
        queue.client().close()
        yield queue


def _submit(queue: Box, folder: Path, *command: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    return queue.submit(
        *(command or ("evenload", "run", "train.py")),
        folder=str(folder),
        environment={"PATH": PATH, "SLOWLY": "1"},
        spec={"needs": {"min_devices": 1, "max_devices": 2}},
    )


def _log(queue: Box, job: str) -> list[Any]:
    with Reader(queue.folder) as reader:
        return [logged.entry for logged in reader.log(job=job)]


def _wait_for(queue: Box, job: str, kind: type[events.QueueEvent], num: int = 1) -> None:
    def is_there() -> bool:
        return sum(isinstance(entry, kind) for entry in _log(queue, job)) >= num

    until(is_there, lambda: f"{num} {kind.__name__} of job {job} did not come:\n{queue.story(job)}", patient_s=120.0)


def _is_able(queue: Box, job: str) -> None:
    """Until it has said that it needs no stop."""
    until(lambda: queue.stored(job).spec.resize_s is not None, lambda: queue.story(job), patient_s=120.0)


@needs_two_cores
@pytest.mark.timeout(300)
def test_it_grows_and_shrinks_without_a_stop(tmp_path: Path) -> None:
    import torch

    alone, folder = tmp_path / "alone", tmp_path / "elastic"
    with _two_slots() as queue:
        block = queue.submit("sh", "-c", UNTIL, str(tmp_path / "end-block"))
        queue.wait_for(block, "RUNNING")
        job = _submit(queue, folder)
        _is_able(queue, job)
        (tmp_path / "end-block").touch()
        _wait_for(queue, job, events.Resized, 1)
        short = queue.submit("sh", "-c", UNTIL, str(tmp_path / "end-short"), spec={"estimate_s": 5.0})
        _wait_for(queue, job, events.Resized, 2)
        queue.wait_for(short, "RUNNING")
        (folder / "hurry").touch()
        assert queue.wait_for(job, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED", queue.story(job)
        (tmp_path / "end-short").touch()
        entries, attempts = _log(queue, job), queue.call("job", job=job)["attempts"]
        done = queue.stored(job)
        queue.stop()
        assert audit(queue.folder) == []
        assert "2 ranks from step" in queue.output(job) and "1 rank from step" in queue.output(job)
    resized = [entry for entry in entries if isinstance(entry, events.Resized)]
    assert [len(entry.devices) for entry in resized] == [2, 1] and all(entry.seconds > 0 for entry in resized)
    assert not any(isinstance(entry, events.Yielded | events.ResizeRefused) for entry in entries), (
        "it was never stopped"
    )
    assert not done.preempted_s and done.num_restarts == 0
    assert [len(attempt["devices"]) for attempt in attempts] == [1, 2, 1]
    held = sum(len(a["devices"]) * (a["ended_s"] - a["began_s"]) for a in attempts)
    # It is billed from the start of its program, and its devices are counted from the placement.
    assert held - 0.01 <= done.service_device_s <= held + 10.0, "the rows hold its device-hours"
    assert [int(line) for line in (folder / "steps").read_text().split()] == list(range(NUM_STEPS))

    alone.mkdir()
    (alone / "train.py").write_text(TRAIN)
    run(["train.py"], alone, 100).check_returncode()
    one, other = (torch.load(each / "weights.pt", weights_only=True) for each in (alone, folder))
    assert float((one - other).norm() / one.norm()) <= 1e-12


REFUSES = """
import time
from evenload import job
from evenload.job.client import contract
from evenload.job.devices import write_reply
write_reply(contract(), 0, "refused", "its shares are fixed")
for step in job.steps(None, save=lambda: None):
    time.sleep(0.05)
"""


@needs_two_cores
def test_a_program_that_refuses_is_stopped_and_started_and_the_record_says_why(tmp_path: Path) -> None:
    with _two_slots() as queue:
        block = queue.submit("sh", "-c", UNTIL, str(tmp_path / "end-block"))
        queue.wait_for(block, "RUNNING")
        job = queue.submit(sys.executable, "-c", REFUSES, spec={"needs": {"min_devices": 1, "max_devices": 2}})
        until(lambda: queue.stored(job).rate_per_s > 0, lambda: queue.story(job))
        (tmp_path / "end-block").touch()
        _wait_for(queue, job, events.JobStarted, 2)
        kinds = [type(entry).__name__ for entry in _log(queue, job)]
        at = kinds.index("ResizeRequested")
        assert kinds[at + 1] == "ResizeRefused" and "Yielded" in kinds[at:]
        assert _log(queue, job)[at + 1].reason == "its shares are fixed"
        (first, *_) = queue.call("job", job=job)["attempts"]
        assert first["reason"] == "1 → 2 devices, by a stop and a start: its shares are fixed"
        queue.call("cancel", jobs=[job], now=True)
        queue.wait_for(job, "CANCELLED")


@pytest.mark.long
@needs_two_cores
@pytest.mark.timeout(300)
def test_a_run_below_a_script_is_stopped_and_started_and_the_record_says_why(tmp_path: Path) -> None:
    with _two_slots() as queue:
        block = queue.submit("sh", "-c", UNTIL, str(tmp_path / "end-block"))
        queue.wait_for(block, "RUNNING")
        job = _submit(queue, tmp_path / "run", "sh", "-c", "evenload run train.py; exit $?")
        until(lambda: queue.stored(job).rate_per_s > 0, lambda: queue.story(job), patient_s=120.0)
        (tmp_path / "end-block").touch()
        _wait_for(queue, job, events.JobStarted, 2)
        (refused,) = [entry for entry in _log(queue, job) if isinstance(entry, events.ResizeRefused)]
        assert "another program, such as a shell script, started evenload run" in refused.reason
        queue.call("cancel", jobs=[job], now=True)
        queue.wait_for(job, "CANCELLED")


@pytest.mark.long
@needs_two_cores
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["daemon", "joiner"])
def test_who_is_killed_in_the_middle_of_a_change_loses_nothing(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "run"
    with _two_slots() as queue:
        block = queue.submit("sh", "-c", UNTIL, str(tmp_path / "end-block"))
        queue.wait_for(block, "RUNNING")
        job = _submit(queue, folder)
        _is_able(queue, job)
        (tmp_path / "end-block").touch()
        _wait_for(queue, job, events.ResizeRequested)
        _KILLS[what](queue)
        _wait_for(queue, job, events.Resized)
        (folder / "hurry").touch()
        assert queue.wait_for(job, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED", queue.story(job)
        assert len(queue.call("job", job=job)["attempts"]) == 2
    assert [int(line) for line in (folder / "steps").read_text().split()] == list(range(NUM_STEPS))


def _kill_daemon(queue: Box) -> None:
    queue.kill()
    queue.start()
    queue.client().close()


def _kill_joiner(queue: Box) -> None:
    def workers() -> list[int]:
        return [pid for pid in queue.programs() if b"launch.worker" in _command(pid)]

    until(lambda: len(workers()) == 2, lambda: f"no worker has started:\n{queue.log()}")
    os.kill(max(workers()), 9)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


_KILLS: dict[str, Callable[[Box], None]] = {"daemon": _kill_daemon, "joiner": _kill_joiner}


@needs_two_cores
@pytest.mark.timeout(300)
def test_a_job_whose_ranks_all_start_again_is_one_attempt(tmp_path: Path) -> None:
    """Both ranks are killed at once: the run starts again from its checkpoint, and the queue sees one job that goes on."""
    dies = """
    if step.index == 100 and not os.path.exists(f"died-{run.rank}"):
        open(f"died-{run.rank}", "w").close()
        os.kill(os.getpid(), 9)
"""
    script = TRAIN.replace("    return (model", f"{dies[1:]}    return (model").replace(
        "        if run.is_main:\n            with", SAVES
    )
    with _two_slots() as queue:
        tmp_path.joinpath("train.py").write_text(script)
        job = queue.submit(
            "evenload",
            "run",
            "-d",
            "cpu:2",
            "train.py",
            folder=str(tmp_path),
            environment={"PATH": PATH},
            spec={"needs": {"min_devices": 2, "max_devices": 2}},
        )
        assert queue.wait_for(job, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED", queue.story(job)
        attempts, done, printed = queue.call("job", job=job)["attempts"], queue.stored(job), queue.output(job)
        queue.stop()
        assert audit(queue.folder) == []
    assert "starts again from the checkpoint of step 100" in printed, printed
    assert len(attempts) == 1 and done.num_restarts == 0 and not done.preempted_s
    [attempt] = attempts
    held = len(attempt["devices"]) * (attempt["ended_s"] - attempt["began_s"])
    assert len(attempt["devices"]) == 2 and held - 0.01 <= done.service_device_s <= held + 10.0
    run_folder = tmp_path / "run"
    assert [record.step for record in read_steps(run_folder)] == [*range(NUM_STEPS)]
    [event] = [event for event in read_events(run_folder) if event.kind == "restarted"]
    assert event.step == 100
