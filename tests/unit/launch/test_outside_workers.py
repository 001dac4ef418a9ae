"""Workers that are no members: what their ends mean."""

import subprocess
from types import SimpleNamespace

import pytest

from evenload.training.launch.failure import FailureReport
from evenload.training.launch.outside_workers import OutsideWorkers
from evenload.training.launch.process import WorkerProcess
from tests.unit.launch.test_membership_decider import started, switch_all


class Worker:
    def __init__(self):
        self.code, self.failure, self.ended_s = None, None, 0.0

    def poll(self):
        return self.code

    def read_failure(self):
        return self.failure


@pytest.fixture
def made():
    decider, lines, forgotten = started(3), [], []
    workers = {name: Worker() for name in decider.members}
    outside = OutsideWorkers(workers, forgotten.append, lambda got: None, lambda name: "cpu", lines.append)
    yield decider, outside, workers, forgotten, lines


def test_a_worker_that_dies_before_it_could_leave_is_a_lost_member(made):
    decider, outside, workers, forgotten, _ = made
    change = decider.request_leave("worker-1")[0].change
    assert change.left == ("worker-1",) and {*decider.expected} == {"worker-0", "worker-1", "worker-2"}
    assert decider.rank_of("worker-1") == 1
    workers["worker-1"].code = -9
    outside.poll(decider, workers)
    assert forgotten == []  # `RunMembers.absorb` deals with it


@pytest.mark.parametrize("has_said_so", [True, False])
def test_how_a_worker_ends_that_has_left_is_no_matter(made, has_said_so):
    decider, outside, workers, forgotten, lines = made
    change = decider.request_leave("worker-1")[0].change
    if has_said_so:
        decider.ended("worker-1")
    else:
        switch_all(decider, change)
    workers["worker-1"].failure = FailureReport(1, "ZeroDivisionError", "in its exit function")
    outside.poll(decider, workers)
    assert forgotten == []  # it still runs
    workers["worker-1"].code = 1
    outside.poll(decider, workers)
    assert forgotten == ["worker-1"] and "cpu, which had left, failed: ZeroDivisionError" in lines[0]


def test_a_process_that_the_system_cannot_end_is_not_waited_for():
    worker = WorkerProcess.__new__(WorkerProcess)
    worker.poll = lambda: None
    worker.kill_group = lambda: None

    def wait(timeout=None):
        assert timeout is not None, "it would wait for ever"
        raise subprocess.TimeoutExpired("python", timeout)

    worker._process, worker.code = SimpleNamespace(wait=wait), None
    worker.kill()
    assert worker.code is None
