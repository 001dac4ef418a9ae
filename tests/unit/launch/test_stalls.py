"""The decision which rank neither works nor dies, and the deadline that is learned for it."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
import weakref
from collections.abc import Generator, Iterable
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evenload.training.comm.clock import StepClock
from evenload.training.comm.store import WaitLimits
from evenload.training.elastic import own_wait, stall_watch
from evenload.training.elastic.stall_watch import StepDeadline, find_excuse, find_position
from evenload.training.launch.membership_messages import Activity, Waits, from_line, to_line
from evenload.training.launch.stalls import AWAITED_S, EVERY_S, STOPPED_S, StallMonitor

MEMBERS = ("a", "b", "c")


def _judged(activities: list[Activity], waits: list[Waits]) -> tuple[dict[str, str], dict[str, str]]:
    monitor = StallMonitor()
    monitor.judge(MEMBERS, (), 100.0)
    for message in (*activities, *waits):
        monitor.take(message, 100.5)
    found = monitor.judge(MEMBERS, (), 100.6)
    return found.stalled, found.absent


WAITING = [Activity("a", "wait", 5.0), Activity("c", "comm", 5.1)]


def test_the_rank_that_reads_or_computes_while_the_others_wait_is_named_with_its_line() -> None:
    for waits in ([Waits("a", 5.0)], [Waits("a", 5.0), Waits("c", 5.1)]):
        stalled, _ = _judged([*WAITING, Activity("b", "data", 5.2, "train.py:7 in __getitem__")], waits)
        assert stalled == {"b": "it has waited for samples for 5.3 s, last seen at train.py:7 in __getitem__"}
    assert _judged([*WAITING, Activity("b", "data", 5.2)], []) == ({}, {})


@pytest.mark.parametrize(
    "activity",
    [
        Activity("b", "compute", 1.0),  # it goes on: a micro-batch began a second ago
        Activity("b", "compute", 9.0, excuse="it compiles"),
        Activity("b", "optimizer", 9.0, "train.py:40 in evaluate"),
        Activity("b", "wait", 5.0),
    ],
)
def test_a_rank_that_works_is_left_alone(activity: Activity) -> None:
    assert _judged([*WAITING, activity], [Waits("a", 5.0), Waits("c", 5.1)]) == ({}, {})


def test_the_scripts_own_code_is_named_once_after_half_a_minute() -> None:
    monitor = StallMonitor()
    absent = []
    for index in range(200):
        now_s = 100 + index * EVERY_S
        monitor.take(Activity("b", "optimizer", index * EVERY_S, "train.py:40 in evaluate"), now_s)
        monitor.take(Waits("a", index * EVERY_S), now_s)
        found = monitor.judge(MEMBERS, (), now_s)
        assert not found.stalled
        absent += list(found.absent.items())
    assert absent == [("b", "it has been in the script's own code for 30 s, last seen at train.py:40 in evaluate")]


def test_a_rank_that_others_wait_for_outside_of_a_step_is_named_once_in_each_wait_and_is_no_stall() -> None:
    monitor = StallMonitor()
    absent = []
    for index in range(320):
        now_s, waited_s = 100 + index * EVERY_S, index % 160 * EVERY_S
        segment, position = ("data", "train.py:40") if index >= 160 else ("other", f"train.py:{index}")
        monitor.take(Activity("b", segment, 5 + waited_s, position), now_s)
        monitor.take(Waits("a", waited_s, in_step=False), now_s)
        found = monitor.judge(MEMBERS, (), now_s)
        assert not found.stalled and not found.is_too_long
        absent += found.absent.values()
    assert absent == [
        "it has been in the script's own code for 35 s, last seen at train.py:120",
        "it has waited for samples for 35 s, last seen at train.py:40",
    ]


def test_a_rank_that_waited_before_may_stall_later_and_is_not_waited_for_for_ever() -> None:
    monitor = StallMonitor()
    monitor.judge(MEMBERS, (), 100.0)
    monitor.take(Waits("b", 40.0, in_step=False), 100.0)
    for now_s in (100.9, 101.8):
        monitor.judge(MEMBERS, (), now_s)
    for now_s, waited_s in ((102.0, 700.0), (102.1, 800.0)):
        monitor.take(Activity("b", "data", waited_s), now_s)
        monitor.take(Waits("a", waited_s, limit_s=750.0), now_s)
        found = monitor.judge(MEMBERS, (), now_s)
        assert "b" in found.stalled and found.is_too_long == (waited_s > 750)


def test_ranks_that_all_wait_for_one_another_while_nothing_moves() -> None:
    def judged(last: Activity, later_s: float = 0.0) -> float:
        monitor = StallMonitor()
        monitor.judge(MEMBERS, (), 100.0)
        for message in (Activity("a", "wait", 200.0, "train.py:7 in main", stuck_s=200.0), last):
            monitor.take(message, 100.5)
        monitor.take(Activity("b", "optimizer", 9.0, stuck_s=150.0), 100.5 + later_s)
        assert "rank 0 (cpu), last seen at train.py:7 in main\n  rank 1 (cpu)\n" in monitor.describe_deadlock(
            MEMBERS, lambda name: "cpu", 9.0
        )
        return monitor.judge(MEMBERS, (), 100.6 + later_s).deadlock_s

    assert judged(Activity("c", "comm", 900.0, stuck_s=900.0)) == 150.0
    assert judged(Activity("c", "comm", 900.0)) == 0.0  # bytes move
    assert judged(Activity("c", "other", 5000.0)) == 0.0  # the script's own code
    assert judged(Activity("c", "comm", 900.0, stuck_s=900.0), later_s=5.0) == 0.0  # it reports nothing more
    assert StallMonitor().judge(MEMBERS, (), 1.0).deadlock_s == 0.0


def test_a_stopped_process_for_which_the_repair_of_a_loss_waits_is_left_out_sooner() -> None:
    def seconds(awaited: tuple[str, ...], begins_at: int) -> float:
        """Return how long after the loss it is left out; it has been stopped from the beginning."""
        monitor = StallMonitor()
        for index in range(100):
            found = monitor.judge(MEMBERS, ("b",), 100 + index * EVERY_S, awaited if index >= begins_at else ())
            if found.stalled:
                assert list(found.stalled) == ["b"]
                return (index - begins_at) * EVERY_S
        return float("inf")

    assert seconds(("a", "b"), 0) == seconds(("a", "b"), 6) == AWAITED_S
    assert seconds(("a",), 0) == STOPPED_S, "the repair does not wait for it"


@pytest.mark.parametrize("supervisor_too", [True, False])
def test_nobody_is_to_blame_after_all_were_stopped_and_go_on(supervisor_too: bool) -> None:
    monitor = StallMonitor()
    monitor.judge(MEMBERS, (), 100.0)
    monitor.take(Activity("b", "compute", 0.3), 100.0)
    for name in MEMBERS:
        monitor.take(Activity(name, "compute" if name == "b" else "wait", 0.3, stuck_s=121.0), 100.0)
    if not supervisor_too:
        for index in range(1, 41):
            assert not monitor.judge(MEMBERS, MEMBERS, 100.0 + index * EVERY_S).stalled
    monitor.judge(MEMBERS, (), 110.25)
    monitor.take(Waits("a", 4.6), 110.3)
    found = monitor.judge(MEMBERS, (), 110.5)
    assert not found.stalled and not found.deadlock_s


@pytest.mark.parametrize(("part", "in_step", "hangs"), [(0.01, True, True), (0.9, True, False), (0.0, False, False)])
@pytest.mark.parametrize("segment", ["wait", "optimizer"])
def test_a_rank_whose_threads_no_longer_run_is_named_and_left_out_if_it_is_idle(
    part: float, in_step: bool, hangs: bool, segment: str
) -> None:
    now_s = 100.0
    monitor = StallMonitor(lambda worker: part * now_s)
    monitor.take(Activity("b", segment, 0.2, "train.py:7 in __getitem__"), now_s)
    named, stalled_s = [], 0.0
    while now_s < 160 and not stalled_s:
        now_s += EVERY_S
        monitor.take(Waits("a", now_s - 100, in_step, limit_s=50.0), now_s)
        found = monitor.judge(MEMBERS, (), now_s)
        named += found.absent.values()
        stalled_s = now_s if found.stalled else 0.0
    what = "none of its threads of Python has run" if segment == "wait" else "it has been in the script's own code"
    assert named == [f"{what} for 30 s, last seen at train.py:7 in __getitem__"]
    assert stalled_s == (150 if hangs else 0)


def test_a_rank_that_waits_for_samples_of_an_evaluation_is_a_stall_once_the_others_have_waited_for_the_limit() -> None:
    for segment, waited_s, stalls in (("data", 40.0, False), ("data", 51.0, True), ("other", 51.0, False)):
        monitor = StallMonitor()
        monitor.judge(MEMBERS, (), 100.0)
        monitor.take(Activity("b", segment, waited_s + 3), 100.1)
        monitor.take(Waits("a", waited_s, in_step=False, limit_s=50.0), 100.1)
        assert bool(monitor.judge(MEMBERS, (), 100.2).stalled) == stalls


def test_a_stopped_process_is_stalled_unless_all_are_or_this_one_was() -> None:
    def stalled_after(stopped: tuple[str, ...], gaps_s: list[float]) -> list[str]:
        monitor, now_s, found = StallMonitor(), 100.0, []
        for gap_s in gaps_s:
            now_s += gap_s
            found += monitor.judge(MEMBERS, stopped, now_s).stalled
        return found

    assert stalled_after(("b",), [EVERY_S] * 16) == []
    assert stalled_after(("b",), [EVERY_S] * 17) == ["b"]
    assert stalled_after(MEMBERS, [EVERY_S] * 40) == []
    assert stalled_after(("b",), [*[EVERY_S] * 8, 3600.0, *[EVERY_S] * 8]) == []


def test_the_deadline_is_learned_and_spikes_do_not_pass_it() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        usual_s = rng.choice((0.005, 0.1, 1.0, 8.0))
        deadline, late = StepDeadline(), 0
        assert deadline.seconds == 60
        for step in range(2_000):
            step_s = usual_s * rng.gauss(1, 0.05) * (rng.uniform(1.5, 4) if rng.random() < 0.1 else 1)
            late += step_s > deadline.seconds
            deadline.add(step_s)
            if step > 50:
                assert deadline.seconds <= max(5.0, 9 * usual_s)
        assert late == 0
    assert StepDeadline(timeout_s=60.0).seconds == 30.0
    steady = StepDeadline()
    for _ in range(100):
        steady.add(2.0)
    assert steady.seconds == 10.0


def test_the_deadline_sorts_rarely_however_many_steps_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts = 0

    def counted(values: Iterable[float]) -> float:
        nonlocal sorts
        sorts += 1
        return median(values)

    monkeypatch.setattr(stall_watch, "median", counted)
    deadline = StepDeadline()
    for _ in range(1_500):
        deadline.add(0.001)
    assert sorts <= 2 * (1_500 // 50 + 11)


def test_the_line_is_the_users() -> None:
    position = find_position(sys._getframe())
    assert position.startswith("test_stalls.py:") and position.endswith("in test_the_line_is_the_users")
    assert find_position(None) == find_excuse(None) == find_excuse(sys._getframe()) == ""


def test_messages_travel_as_lines() -> None:
    for message in (Activity("a", "data", 0.5, "train.py:1 in f", "it compiles"), Waits("a", 5.5)):
        assert from_line(to_line(message)) == message


def _context(**clock: Any) -> Any:
    return SimpleNamespace(
        spec=SimpleNamespace(worker="w0"),
        device=torch.device("cpu"),
        clock=SimpleNamespace(**{"evaluates_since_s": 0.0} | clock),
        loop=SimpleNamespace(in_backward=False),
        control=SimpleNamespace(waits_since_s=0.0),
        groups=SimpleNamespace(limits=WaitLimits(600.0, is_watched=True)),
    )


def test_the_watch_keeps_nothing_of_a_function_that_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "_EVERY_S", 0.02)
    sent: list[Any] = []
    watch = stall_watch.StallWatch(_context(current="compute", since_s=0.0, reads=False), sent.append)
    watch.start()

    def use() -> weakref.ref[threading.Event]:
        held = threading.Event()
        end_s = time.monotonic() + 20
        while len(sent) < 2 and time.monotonic() < end_s:
            held.wait(0.001)
        assert len(sent) >= 2, "the watch reports nothing"
        return weakref.ref(held)

    try:
        for _ in range(20):
            sent.clear()
            assert use()() is None
    finally:
        watch.close()


def test_a_wait_in_which_something_moves_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0, bytes=5_000_000, begun=0)
    monkeypatch.setattr(own_wait, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(own_wait, "num_tcp_bytes", lambda: now.bytes)
    monkeypatch.setattr(own_wait, "user_collectives", lambda own: now.begun)
    code = compile(
        "def exchange():\n    return sys._getframe()\nframe = exchange()", "evenload/training/comm/a.py", "exec"
    )
    names: dict[str, Any] = {"sys": sys}
    exec(code, names)
    wait = own_wait.OwnWait(_context(since_s=0.0))

    def waited(seconds: float, frame: Any = names["frame"]) -> float:
        now.s += seconds
        return wait.seconds(frame)

    assert waited(0) == 0 and waited(10) == 10 and waited(20) == 30
    now.bytes += 1000  # of a store that is polled
    assert waited(5) == 35
    now.bytes += 100_000
    assert waited(5) == 0 and waited(5) == 5
    now.begun += 1
    assert waited(5) == 0 and waited(5) == 5
    assert waited(5, sys._getframe()) == 0  # the script's own code
    assert waited(5) == 0 and waited(5) == 5


def test_few_bytes_again_and_again_are_no_move(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0, rate=0)
    monkeypatch.setattr(own_wait, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(own_wait, "num_tcp_bytes", lambda: int((now.s - 100) * now.rate))
    monkeypatch.setattr(own_wait, "user_collectives", lambda own: 0)
    monkeypatch.setattr(own_wait, "waits_for_ranks", lambda frame: True)
    for now.rate, waited_s in ((2_000, 600.0), (20_000, 10.0)):
        now.s, wait = 100.0, own_wait.OwnWait(_context(since_s=0.0))
        longest_s = 0.0
        while now.s < 700:
            longest_s = max(longest_s, wait.seconds(None))
            now.s += 0.5
        assert abs(longest_s - waited_s) < 5


def test_a_watch_does_not_count_the_time_in_which_its_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=1000.0)
    times = SimpleNamespace(monotonic=lambda: now.s, perf_counter=lambda: now.s, process_time=lambda: 0.0)
    for module in (stall_watch, own_wait):
        monkeypatch.setattr(module, "time", times)
    monkeypatch.setattr(own_wait, "waits_for_ranks", lambda frame: True)
    context = _context(current="wait", since_s=1000.0, reads=False, read_s=0.0)
    context.loop.in_backward = True
    context.control.waits_since_s = 1000.0
    watch, sent = stall_watch.StallWatch(context, lambda message: sent.append(message)), []
    gaps_s = iter([0.5] * 200 + [3600.0] + [0.5] * 61)

    def wait(seconds: float) -> bool:
        now.s += (gap_s := next(gaps_s, 0.0))
        return not gap_s

    watch._closed = cast(Any, SimpleNamespace(wait=wait))
    watch._run()
    assert max(message.seconds for message in sent) == 130.5
    assert not any(message.stuck_s for message in sent if isinstance(message, Activity))


def test_a_rank_that_waits_for_samples_of_an_evaluation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "_EVERY_S", 0.01)
    sent: list[Any] = []
    context = _context()
    context.clock = StepClock(torch.device("cpu"))
    watch = stall_watch.StallWatch(context, sent.append)

    def segment() -> str:
        sent.clear()
        end_s = time.monotonic() + 20
        while len(sent) < 3 and time.monotonic() < end_s:
            time.sleep(0.001)
        return str(sent[-1].segment)

    def read() -> Generator[str, None, None]:
        yield segment()
        yield segment()

    watch.start()
    try:
        for found in context.clock.evaluating(read()):
            assert found == "data" and segment() == "other"
        assert segment() == "other"
    finally:
        watch.close()


def test_bytes_of_open_connections_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            before = own_wait.num_tcp_bytes()
            one.sendall(bytes(1 << 16))
            received = 0
            while received < 1 << 16:
                received += len(other.recv(1 << 16))
            assert own_wait.num_tcp_bytes() - before >= 1 << 16


def test_a_rank_that_waits_for_anothers_stream_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterable dataset is read before `step.backward`, and its ranks wait for one another there."""
    monkeypatch.setattr(stall_watch, "_EVERY_S", 0.01)
    sent: list[Any] = []
    context = _context(current="wait", since_s=time.perf_counter() - 100.0, reads=False, read_s=0.0)
    clock = context.clock
    watch = stall_watch.StallWatch(context, sent.append)
    watch.start()
    try:
        end_s = time.monotonic() + 20
        while len(sent) < 3 and time.monotonic() < end_s:
            time.sleep(0.001)
        assert len(sent) >= 3 and not any(isinstance(message, Waits) for message in sent)
        clock.reads = True
        for _ in range(1_000):
            if any(isinstance(message, Waits) for message in sent):
                break
            time.sleep(0.01)
        assert any(isinstance(message, Waits) and message.seconds > 99 for message in sent)
    finally:
        watch.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_that_computes_its_first_steps_is_no_stall(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    now = SimpleNamespace(s=1000.0, used_s=0.0)
    times = SimpleNamespace(monotonic=lambda: now.s, perf_counter=lambda: now.s, process_time=lambda: now.used_s)
    monkeypatch.setattr(stall_watch, "time", times)
    context = _context(current="compute", since_s=1000.0, reads=False, read_s=0.0)
    context.device = torch.device(device)
    sent: list[Any] = []
    watch = stall_watch.StallWatch(context, sent.append)

    def excuse(part: float, seconds: float = 24.0) -> str:
        looks, sent[:] = iter([*[False] * int(seconds), True]), []
        watch._closed = cast(Any, SimpleNamespace(wait=lambda s: wait(next(looks))))

        def wait(ends: bool) -> bool:
            now.s += seconds / 4
            now.used_s += part * seconds / 4
            return ends

        watch._run()
        found: str = sent[-1].excuse
        return found

    watch.on_trained(cast(Any, SimpleNamespace(stats=SimpleNamespace(is_usual=True, begun_s=now.s))))
    assert excuse(0.2) == "it computes its first steps"
    assert excuse(0.01) == ""
    assert excuse(0.9, 400.0) == ("it computes its first steps" if device == "cpu" else "")
    for _ in range(8):
        watch.on_trained(cast(Any, SimpleNamespace(stats=SimpleNamespace(is_usual=True, begun_s=now.s - 1))))
    assert excuse(0.2) == ""


def test_a_deadline_knows_how_long_streams_take(monkeypatch: pytest.MonkeyPatch) -> None:
    context = _context(reads=False, read_s=20.0)
    watch = stall_watch.StallWatch(context, lambda message: None)
    step: Any = SimpleNamespace(stats=SimpleNamespace(is_usual=True, begun_s=time.perf_counter()))
    for _ in range(16):
        watch.on_trained(step)
    assert 99 < watch._deadline.seconds < 110  # 5 medians


def test_a_stream_that_is_read_up_to_a_step_is_no_stall() -> None:
    code = compile(
        "def begin():\n    return sys._getframe()\nframe = begin()", "evenload/training/data/stream.py", "exec"
    )
    names: dict[str, Any] = {"sys": sys}
    exec(code, names)
    assert find_excuse(names["frame"]) == "it reads its stream up to this step"
