"""The queue's clock: it grows by the time that has passed, whatever the wall clock shows."""

from __future__ import annotations

import time

import pytest

from evenload.scheduler import clock
from evenload.scheduler.clock import ClockAnchor, QueueClock


class _Machine:
    boot, since_boot_s, wall_s = "a", 100.0, 1000.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    made = _Machine()
    monkeypatch.setattr(clock, "boot_id", lambda: made.boot)
    monkeypatch.setattr(clock, "boottime_s", lambda: made.since_boot_s)
    monkeypatch.setattr(clock, "wall_s", lambda: made.wall_s)
    return made


def test_a_wall_clock_that_is_set_moves_no_time(machine: _Machine) -> None:
    first = QueueClock()
    stored = first.anchor()
    machine.since_boot_s, machine.wall_s = 110.0, 5010.0
    assert (first.now_s(), first.ahead_s, first.step_s(stored)) == (1010.0, 4000.0, 4000.0)
    again = QueueClock(first.anchor(), last_s=1005.0)  # a later daemon of the same boot
    assert (again.now_s(), again.ahead_s, again.step_s(first.anchor())) == (1010.0, 4000.0, 0.0)
    machine.wall_s = 1010.4
    assert again.ahead_s == 0.0, "less than a second is no clock that was set"


def test_after_a_reboot_no_time_lies_before_the_last_event(machine: _Machine) -> None:
    stored = ClockAnchor("a", 900.0)
    machine.boot, machine.since_boot_s, machine.wall_s = "b", 5.0, 500.0
    later = QueueClock(stored, last_s=1234.0)
    assert later.now_s() == 1234.0 and later.ahead_s == -734.0
    assert (later.at("a", 100.0), later.at("b", 6.0), later.at("c", 6.0)) == (1000.0, 1235.0, None)


def test_hours_of_the_day_are_the_wall_clocks_on_a_day_that_has_23_or_25(
    machine: _Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At noon, at one in the morning, and where the wall clock was set."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        for month, day in ((3, 30), (10, 26), (5, 5)):
            for hour in (1, 12):
                wall_s = time.mktime((2025, month, day, hour, 30, 0, 0, 0, -1))
                for set_by_s in (0.0, 7000.0):
                    machine.wall_s = wall_s
                    queue = QueueClock()
                    machine.wall_s = wall_s + set_by_s
                    at_s = queue.now_s() - set_by_s  # then the wall clock shows the time of day above
                    assert (at_s - queue.midnight_s(at_s)) / 3600.0 == hour + 0.5, (month, day, hour, set_by_s)
    time.tzset()
