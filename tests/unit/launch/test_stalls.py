"""The decision which rank neither works nor dies, and the deadline that is learned for it."""

from __future__ import annotations

import random
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from evenload.training.elastic import stall_watch
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
    told = []
    for index in range(200):
        now_s = 100 + index * EVERY_S
        monitor.take(Activity("b", "optimizer", index * EVERY_S, "train.py:40 in evaluate"), now_s)
        monitor.take(Waits("a", index * EVERY_S), now_s)
        found = monitor.judge(MEMBERS, (), now_s)
        assert not found.stalled
        told += list(found.absent.items())
    assert told == [("b", "it has been between two steps for 30 s, last seen at train.py:40 in evaluate")]


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


def test_the_watch_keeps_nothing_of_a_function_that_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "_EVERY_S", 0.02)
    sent: list[Any] = []
    clock = SimpleNamespace(current="compute", since_s=0.0, reads=False)
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(worker="w0"),
        clock=clock,
        loop=SimpleNamespace(in_backward=False),
        control=SimpleNamespace(waits_since_s=0.0),
    )
    watch = stall_watch.StallWatch(context, sent.append)
    watch.on_begin(None)  # type: ignore[arg-type]

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


def test_a_rank_that_waits_for_anothers_stream_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterable dataset is read before `step.backward`, and its ranks wait for one another there."""
    monkeypatch.setattr(stall_watch, "_EVERY_S", 0.01)
    sent: list[Any] = []
    clock = SimpleNamespace(current="wait", since_s=time.perf_counter() - 100.0, reads=False, read_s=0.0)
    loop = SimpleNamespace(in_backward=False)
    control = SimpleNamespace(waits_since_s=0.0)
    context: Any = SimpleNamespace(spec=SimpleNamespace(worker="w0"), clock=clock, loop=loop, control=control)
    watch = stall_watch.StallWatch(context, sent.append)
    watch.on_begin(None)  # type: ignore[arg-type]
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


def test_a_deadline_knows_how_long_streams_take(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = SimpleNamespace(clock=SimpleNamespace(reads=False, read_s=20.0))
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
