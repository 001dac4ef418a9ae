"""Members that don't respond at the end of a run: the others go on, or the run fails at once, and never waits for ever."""

import socket
from types import SimpleNamespace

import pytest

from evenload.rendezvous.peer_monitor import PeerMonitor
from evenload.training.launch import late_losses, run_members
from evenload.training.launch.membership_messages import Finished, Leaving, LostWorker, MessageChannel
from evenload.training.launch.run_members import RunMembers
from tests.unit.launch.test_membership_decider import started, switch_all

NAMES = ("worker-0", "worker-1", "worker-2")


class Worker:
    def __init__(self, name):
        ours, self.end = socket.socketpair()
        self.channel = MessageChannel(ours, blocking=False)
        self.name = name
        self.stopped = self.killed = False
        self.code = None

    def poll(self):
        return self.code

    def is_stopped(self):
        return self.stopped

    def kill(self):
        self.killed, self.code = True, -9

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


def test_the_run_fails_in_the_end_where_the_others_have_ended_and_one_is_stopped(made, clock):
    members, workers, lines = made
    members._receive(members._decider, Finished("worker-1"))
    close_run(workers["worker-1"], members)
    workers["worker-2"].stopped = True
    workers["worker-0"].code = 0
    poll(members, clock, 700.0)
    assert members.end_cause is None, "worker-1 may export for hours"
    workers["worker-1"].code = 0
    poll(members, clock, 590.0)
    assert members.end_cause is None and "rank 2 (cpu) still runs" in lines[-1]
    poll(members, clock, 15.0)
    assert "rank 2 (cpu) has been stopped (SIGSTOP) for 600 s, after another has ended" in members.end_cause.text


@pytest.mark.parametrize("restarts", [True, False])
def test_whoever_stops_all_that_still_run_means_it(made, clock, restarts):
    members, workers, lines = made
    members._can_start_again = lambda: restarts
    members._receive(members._decider, Finished("worker-1"))
    workers["worker-0"].code = workers["worker-1"].code = 0
    workers["worker-2"].stopped = True
    poll(members, clock, 10.0)
    workers["worker-2"].stopped = False
    poll(members, clock, 595.0)
    workers["worker-2"].stopped = True
    poll(members, clock, 20.0)
    assert not workers["worker-2"].killed and members.end_cause is None
    assert not any("does not respond" in line for line in lines)


def test_a_rank_that_goes_on_later_than_another_after_a_stop_of_all_is_not_killed(made, clock):
    members, workers, _ = made
    for name in NAMES:
        workers[name].stopped = True
        poll(members, clock, 0.5)
    poll(members, clock, 3600)
    workers["worker-1"].stopped = False
    poll(members, clock, 2.0)
    workers["worker-0"].stopped = workers["worker-2"].stopped = False
    poll(members, clock, 2.0)
    assert not any(worker.killed for worker in workers.values())


def test_only_the_rank_that_was_stopped_for_long_fails_the_run(made, clock):
    members, workers, _ = made
    members._decider = started(3, capable=False)
    workers["worker-2"].stopped = True
    poll(members, clock, 590)
    workers["worker-1"].stopped = True
    poll(members, clock, 15)
    assert "rank 2 (cpu)" in members.end_cause.text


def test_a_worker_that_has_left_and_spins_is_named_once_the_others_have_ended(made, clock):
    members, workers, lines = made
    change = members._decider.request_leave("worker-1")[0].change
    members._receive(members._decider, Leaving("worker-1"))
    switch_all(members._decider, change)
    poll(members, clock, 60)
    assert lines == []
    workers["worker-0"].code = workers["worker-2"].code = 0
    poll(members, clock, 60)
    assert lines == ["cpu, which had left, still runs, 30 s after another has ended; the run ends with it"]


def test_a_rank_that_is_stopped_before_training_fails_the_run_in_the_end(made, clock):
    members, workers, lines = made
    members._decider = started(3, capable=False)
    workers["worker-1"].stopped = True
    poll(members, clock, 590)
    assert members.end_cause is None and "training has not begun" in "".join(lines)
    poll(members, clock, 15)
    assert "rank 1 (cpu) does not respond" in members.end_cause.text


def test_a_rank_that_still_runs_long_after_another_has_ended_is_named_once(made, clock):
    members, workers, lines = made
    poll(members, clock, 60)
    workers["worker-0"].code = workers["worker-1"].code = 0
    poll(members, clock, 5)
    clock.now_s += 60  # the launcher was stopped
    poll(members, clock, 25)
    assert lines == []
    poll(members, clock, 60)
    assert lines == ["rank 2 (cpu) still runs, 30 s after another has ended; the run ends with it"]


def test_a_rank_that_is_stopped_before_it_could_leave_is_left_behind(made, clock):
    members, workers, lines = made
    members._act(members._decider.request_leave("worker-1"))
    workers["worker-1"].stopped = True
    poll(members, clock, 5.0)
    change = members._decider.pending
    assert workers["worker-1"].killed and change.urgent and change.workers == ("worker-0", "worker-2")
    assert "rank 1 (cpu) does not respond: its process has been stopped (SIGSTOP) for 4.0 s; 2 ranks go on" in lines


def test_a_worker_that_is_stopped_after_it_has_left_is_killed(made, clock):
    members, workers, lines = made
    change = members._decider.request_leave("worker-1")[0].change
    members._receive(members._decider, Leaving("worker-1"))
    workers["worker-1"].stopped = True
    switch_all(members._decider, change)
    poll(members, clock, 5.0)
    assert workers["worker-1"].killed and members._decider.pending is None
    assert lines == [
        "cpu, which had left, does not end: its process has been stopped (SIGSTOP) for 4.0 s; it is killed"
    ]


def test_a_joining_worker_that_is_stopped_is_started_again(made, clock):
    members, workers, lines = made
    name = members._decider.request_join(members._decider.places["worker-0"])[0].worker
    members._workers[name] = workers[name] = Worker(name)
    workers[name].stopped = True
    begun = []
    members._start_joiner = lambda decider, start: begun.append(start.worker)
    poll(members, clock, 5.0)
    assert workers[name].killed and len(begun) == 1
    assert lines[0].startswith("the joining cpu does not respond: its process has been stopped (SIGSTOP) for 4.0 s bef")


def test_a_launcher_that_was_stopped_blames_no_change_for_it(made, clock):
    members, workers, _ = made
    members._receive(members._decider, Finished("worker-1"))
    close_run(workers["worker-1"], members)
    workers["worker-2"].stopped = True
    members._late.note(members._decider, {"worker-2": None})
    members._act(members._decider.lost([LostWorker("worker-2", "lost", 0.0)]))
    clock.now_s += 60
    members.poll()
    assert members.end_cause is None
    poll(members, clock, 3.0)
    assert members.end_cause is not None


def test_a_change_after_a_stall_that_cannot_take_effect_fails_the_run(made, clock):
    members, workers, _ = made
    members._receive(members._decider, Finished("worker-1"))
    workers["worker-2"].stopped = True
    poll(members, clock, 5.0)
    assert workers["worker-2"].killed and members._decider.pending.workers == NAMES[:2]
    close_run(workers["worker-1"], members)  # it had not seen the change
    poll(members, clock, 3.0)
    assert "rank 2 (cpu)" in members.end_cause.text and members.end_cause.lost
