"""Members that don't respond at the end of a run: the others go on, or the run fails at once, and never waits for ever."""

import socket
from types import SimpleNamespace

import pytest

from evenload.rendezvous.peer_monitor import PeerMonitor
from evenload.training.launch import late_losses, run_members
from evenload.training.launch.membership_messages import Finished, MessageChannel
from evenload.training.launch.run_members import RunMembers
from tests.unit.launch.test_membership_decider import started

NAMES = ("worker-0", "worker-1", "worker-2")


class Worker:
    def __init__(self, name):
        ours, self.end = socket.socketpair()
        self.channel = MessageChannel(ours, blocking=False)
        self.name = name
        self.stopped = self.killed = False

    def poll(self):
        return None

    def is_stopped(self):
        return self.stopped

    def kill(self):
        self.killed = True

    def read_failure(self):
        return None

    def close(self):
        pass


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def time(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (late_losses, run_members):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def made(tmp_path, clock):
    lines = []
    host = SimpleNamespace(
        print_line=lines.append, folder=tmp_path, outputs=SimpleNamespace(set_ranks=lambda workers: None)
    )
    members = RunMembers(host, PeerMonitor(), lambda: "host:1")
    workers = {name: Worker(name) for name in NAMES}
    members._workers.update(workers)
    members._late.goes_on = True
    members._decider = started(3)
    yield members, workers, lines
    for worker in workers.values():
        worker.end.close()
        worker.channel._socket.close()


def poll(members, clock, seconds):
    for _ in range(int(seconds / 0.25) + 1):
        members.poll()
        clock.now_s += 0.25


def close_run(worker, members):
    worker.end.close()
    members.poll()
    assert worker.channel.ended


def test_a_stalled_rank_fails_the_run_where_another_has_closed_it(made, clock):
    members, workers, _ = made
    members._can_start_again = lambda: True
    members._receive(members._decider, Finished("worker-1"))
    close_run(workers["worker-1"], members)
    workers["worker-2"].stopped = True
    poll(members, clock, 5.0)
    assert workers["worker-2"].killed and members._decider.pending is None, "nobody waits for worker-1, which has gone"
    assert members.end_cause.lost and "rank 2 (cpu)" in members.end_cause.text and "SIGSTOP" in members.end_cause.text


def test_a_stalled_rank_is_waited_for_where_the_run_cannot_start_again(made, clock):
    members, workers, lines = made
    members._receive(members._decider, Finished("worker-1"))
    close_run(workers["worker-1"], members)
    workers["worker-2"].stopped = True
    poll(members, clock, 6.0)
    assert members.end_cause is None and not workers["worker-2"].killed
    [line] = [line for line in lines if "they can't go on without it: the training loop has ended" in line]
    assert "rank 2 (cpu) does not respond" in line


def test_a_change_after_a_stall_that_cannot_take_effect_fails_the_run(made, clock):
    members, workers, _ = made
    members._receive(members._decider, Finished("worker-1"))
    workers["worker-2"].stopped = True
    poll(members, clock, 5.0)
    assert workers["worker-2"].killed and members._decider.pending.workers == NAMES[:2]
    close_run(workers["worker-1"], members)  # it had not seen the change
    poll(members, clock, 3.0)
    assert "rank 2 (cpu)" in members.end_cause.text and members.end_cause.lost
