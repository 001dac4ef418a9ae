"""What the sharing of devices stands on: memory that is measured, jobs that are alike, external processes on a shared device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from evenload.job.processes import all_stats
from evenload.scheduler.core import events
from evenload.scheduler.core.values import Device
from evenload.scheduler.daemon.devices import LocalDevice
from evenload.scheduler.daemon.external_processes import (
    DeviceProcess,
    DeviceUse,
    GpuScan,
    join_refusal,
    runner_of,
)
from evenload.scheduler.daemon.maintenance import external_process_events
from evenload.scheduler.daemon.memory_history import MemoryHistory
from evenload.scheduler.daemon.peaks import job_memory_bytes
from evenload.scheduler.runner import files
from evenload.scheduler.runner.memory import resident_bytes
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore
from tests.unit.scheduler.queue import GIB, Queue, box, spec

MIB = 2**20

FORKS = """
import os, sys
held = bytearray(b"x" * (200 << 20))
worker = os.fork()
if worker == 0:
    sys.stdin.read()
    os._exit(0)
print(worker, flush=True)
sys.stdin.read()
os.waitpid(worker, 0)
"""


def test_memory_that_a_program_shares_with_its_workers_counts_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        both = resident_bytes([program.pid, worker])
        assert 200 * MIB < both < 300 * MIB
        assert runner_of(worker, frozenset([os.getpid()]), all_stats()) == os.getpid()
        assert runner_of(worker, frozenset([worker]), all_stats()) == 0
    assert resident_bytes([program.pid]) == 0


def test_a_peak_is_that_of_its_own_attempt(tmp_path: Path) -> None:
    assert files.read_peak(tmp_path, 7) == 0
    files.write_peak(tmp_path, 7, 100)
    assert files.read_peak(tmp_path, 7) == 100 and files.read_peak(tmp_path, 8) == 0
    (tmp_path / files.PEAK).write_text('{"fence": 7, "peak_bytes": "many"}')
    assert files.read_peak(tmp_path, 7) == 0
    (tmp_path / files.PEAK).write_text("nonsense")
    assert files.read_peak(tmp_path, 7) == 0


def test_what_a_job_takes_of_a_gpu() -> None:
    own, same, other = (
        DeviceProcess(pid, "ann", "x", 2 * GIB, True, runner) for pid, runner in ((11, 1), (12, 1), (21, 2))
    )
    assert job_memory_bytes(DeviceUse((own, same, other), 9 * GIB), 1, is_alone=False) == 4 * GIB
    # A container hides whose the processes are, or the driver what each has: alone, all of it is the job's.
    hidden, untold = DeviceProcess(99, "", "", 3 * GIB), DeviceProcess(11, "ann", "x", None, True, 1)
    assert job_memory_bytes(DeviceUse((hidden,), 3 * GIB), 1, is_alone=True) == 3 * GIB
    assert job_memory_bytes(DeviceUse((untold,), 3 * GIB), 1, is_alone=True) == 3 * GIB
    assert job_memory_bytes(DeviceUse((hidden,), 3 * GIB), 1, is_alone=False) == 0
    assert job_memory_bytes(DeviceUse((DeviceProcess(5, "bob", "y", GIB),), 3 * GIB), 1, is_alone=True) == 0
    assert job_memory_bytes(DeviceUse((), 3 * GIB), 1, is_alone=True) == 0


def test_who_may_be_on_a_shared_device() -> None:
    beside = DeviceProcess(11, "ann", "python x.py", 2 * GIB, True, 1)
    assert join_refusal(DeviceUse((beside,), 2 * GIB), GIB, [1, 2]) == ""
    assert "outside the jobs that share it" in join_refusal(DeviceUse((beside,), 2 * GIB), GIB, [2])
    assert "bob (python y.py)" in join_refusal(
        DeviceUse((beside, DeviceProcess(5, "bob", "python y.py", 1)), 2 * GIB), GIB, [1]
    )
    assert join_refusal(DeviceUse((DeviceProcess(5, "", "", 1),), GIB), GIB, [1]) == "", (
        "it may be theirs, seen from a container"
    )
    assert "no process is known" in join_refusal(DeviceUse((beside,), 5 * GIB), GIB, [1])
    assert join_refusal(DeviceUse((beside,), 2 * GIB + 1), GIB, [1]) == ""
    assert join_refusal(None, GIB, [1]) and join_refusal(DeviceUse(problem="NVML is away"), GIB, [1]) == "NVML is away"


def test_a_shared_device_opens_again_under_its_jobs_and_another_doesnt() -> None:
    device = Device("a", "local", memory_bytes=24 * GIB)
    for shares, opens in ((True, [events.DeviceOpened(5.0, "a")]), (False, [])):
        queue = Queue([device])
        job = queue.submit(share_device=shares)
        queue.settle()
        queue.apply(events.DeviceClosed(0.0, "a", "an external process"))
        found = {"a": LocalDevice(device, "gpu0")}
        ours, external = DeviceProcess(11, "ann", "x", GIB, True, 7), DeviceProcess(12, "bob", "y", GIB)
        clean, dirty = (GpuScan(1.0, {"a": DeviceUse(who, len(who) * GIB)}) for who in ((ours,), (ours, external)))
        assert external_process_events(queue.queue_state, found, dirty, GIB, {}, 5.0, {job: 7}) == []
        assert external_process_events(queue.queue_state, found, dirty, GIB, {}, 5.0) == []
        assert external_process_events(queue.queue_state, found, clean, GIB, {}, 5.0, {job: 7}) == opens


def test_similar_jobs_know_each_others_peaks(tmp_path: Path) -> None:
    program = {"command": ["train", "--seed", "1"]}
    with QueueStore(tmp_path, holder="test") as store, Reader(tmp_path) as reader:
        store.record(events.DeviceAdded(0.0, box(1)[0]))
        names = ("one", "same", "bobs", "unlike", "whole")
        store.record(events.Submitted(0.0, "one", spec(share_device=True)), extra=program)
        store.record(events.Submitted(0.0, "same", spec(share_device=True)), extra=program)
        store.record(events.Submitted(0.0, "bobs", spec(share_device=True, user="bob")), extra=program)
        store.record(events.Submitted(0.0, "unlike", spec(share_device=True)), extra={"command": ["train"]})
        store.record(events.Submitted(0.0, "whole", spec()), extra=program)
        store.record(events.Placed(1.0, "one", ("gpu0.0",), 1))
        store.record(events.JobStarted(1.0, "one"))
        store.record(events.MemoryMeasured(9.0, "one", 3 * GIB))
        assert set(names) == set(store.queue_state.jobs)
        (ended,) = store.record(events.Ended(9.0, "one", is_success=True))
        store.commit()
        memory_history = MemoryHistory(reader)
        told = memory_history.learn(ended, store.queue_state.jobs, 10.0)
        assert [(event.job, event.spec.peak_bytes) for event in told] == [("same", 3 * GIB)]
        for event in told:
            store.record(event)
        assert memory_history.learn(ended, store.queue_state.jobs, 10.0) == [], "it is known already"
        store.commit()
        for known in (memory_history, MemoryHistory(reader)):  # of a daemon that began later too
            assert known.with_known_peak(spec(share_device=True), program["command"]).peak_bytes == 3 * GIB
            assert known.with_known_peak(spec(share_device=True, peak_bytes=1), program["command"]).peak_bytes == 1
            assert known.with_known_peak(spec(share_device=True), ["train"]).peak_bytes == 0
            assert known.with_known_peak(spec(share_device=True, user="bob"), program["command"]).peak_bytes == 0
            assert known.with_known_peak(spec(), program["command"]).peak_bytes == 0


def test_one_that_still_runs_tells_only_where_nothing_else_is_known(tmp_path: Path) -> None:
    program = {"command": ["train"]}
    with QueueStore(tmp_path, holder="test") as store, Reader(tmp_path) as reader:
        store.record(events.DeviceAdded(0.0, box(1)[0]))
        for name, said_bytes in (("one", 0), ("same", 0), ("said", GIB)):
            wanted = spec(share_device=True, memory_bytes=0 if name == "one" else said_bytes)
            store.record(events.Submitted(0.0, name, wanted), extra=program)
        store.record(events.DeviceAdded(0.0, Device("gpu0.0", "gpu-host0", memory_bytes=24 * GIB)))
        store.record(events.Placed(1.0, "one", ("gpu0.0",), 1))
        (running,) = store.record(events.MemoryMeasured(90.0, "one", 3 * GIB))
        store.commit()
        memory_history = MemoryHistory(reader)
        assert [event.job for event in memory_history.learn(running, store.queue_state.jobs, 90.0)] == ["same"]
        assert memory_history.with_known_peak(spec(share_device=True), ["train"]).peak_bytes == 3 * GIB
        assert memory_history.with_known_peak(spec(share_device=True, memory_bytes=GIB), ["train"]).peak_bytes == 0


def test_elements_of_an_array_are_similar_with_any_command(tmp_path: Path) -> None:
    with QueueStore(tmp_path, holder="test") as store, Reader(tmp_path) as reader:
        store.record(events.DeviceAdded(0.0, box(1)[0]))
        for index in range(3):
            wanted = spec(share_device=True, array="a")
            store.record(events.Submitted(0.0, f"j{index}", wanted), extra={"command": ["train", str(index)]})
        store.record(events.Placed(1.0, "j0", ("gpu0.0",), 1))
        store.record(events.MemoryMeasured(9.0, "j0", GIB))
        (ended,) = store.record(events.Ended(9.0, "j0", is_success=True))
        store.commit()
        assert [event.job for event in MemoryHistory(reader).learn(ended, store.queue_state.jobs, 10.0)] == ["j1", "j2"]
