"""Windows of recurring reservations by the calendar, and the times that people write."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from evenload.errors import ConfigError
from evenload.scheduler.core import events
from evenload.scheduler.core.values import Reservation
from evenload.scheduler.daemon.maintenance import clock_events, first_window, next_window, shifted
from evenload.scheduler.job_syntax import read_time_of_day_s
from tests.unit.scheduler.queue import Queue, box

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _at(*moment: int) -> float:
    return time.mktime((*moment, 0, 0, 0, -1))


def _next(every: str, start_s: float, now_s: float) -> float:
    reservation = Reservation("r1", frozenset({"d0"}), start_s, start_s + 2 * HOUR_S, frozenset({"ann"}), every)
    found = next_window(reservation, now_s)
    assert found.end_s - found.start_s == 2 * HOUR_S and found.every == every
    return found.start_s


def test_the_next_window_has_the_same_time_of_day() -> None:
    """Over the changes of summer time, a weekend, and a daemon that was away for weeks."""
    saturday = _at(2025, 3, 29, 9, 0)
    assert _next("day", saturday, saturday + 2 * HOUR_S) == _at(2025, 3, 30, 9, 0) == saturday + 23 * HOUR_S
    assert _next("week", saturday, saturday + 2 * HOUR_S) == _at(2025, 4, 5, 9, 0)
    friday = _at(2025, 10, 24, 9, 0)
    assert _next("weekday", friday, friday + 2 * HOUR_S) == _at(2025, 10, 27, 9, 0) == friday + 73 * HOUR_S
    assert _next("day", friday, _at(2025, 12, 3, 10, 0)) == _at(2025, 12, 3, 9, 0)
    assert _next("day", friday, _at(2025, 12, 3, 11, 0)) == _at(2025, 12, 4, 9, 0)


def test_the_first_window_of_weekdays_is_on_one() -> None:
    """Over the end of summer time too; other windows are where they were asked for."""
    for day, first in ((24, 24), (25, 27), (26, 27), (27, 27)):
        start_s = _at(2025, 10, day, 9, 0)
        for every, at_s in (("weekday", _at(2025, 10, first, 9, 0)), ("day", start_s), ("", start_s)):
            asked = Reservation("r1", frozenset({"d0"}), start_s, start_s + 2 * HOUR_S, frozenset(), every)
            assert (first_window(asked).start_s, first_window(asked).end_s) == (at_s, at_s + 2 * HOUR_S)


def test_a_time_of_day_that_a_change_leaves_out_is_back_the_day_after() -> None:
    """Half past two does not exist on 30 March; also where the queue's clock is not the wall clock."""
    ahead_s = 100.0
    at_s = _at(2025, 3, 28, 2, 30) - ahead_s
    reservation = Reservation("r1", frozenset({"d0"}), at_s, at_s + HOUR_S, frozenset(), "day")
    starts = []
    for _ in range(4):
        now_s = reservation.end_s + ahead_s
        reservation = shifted(next_window(shifted(reservation, ahead_s), now_s), -ahead_s)
        starts.append(time.localtime(reservation.start_s + ahead_s)[2:5])
    assert (starts[0], starts[2], starts[3]) == ((29, 2, 30), (31, 2, 30), (1, 2, 30))
    assert starts[1][0] == 30


def test_a_difference_of_clocks_measured_a_moment_off_changes_no_time_of_day() -> None:
    friday = _at(2025, 5, 9, 9, 0)
    assert _next("day", friday - 0.3, friday + 2 * HOUR_S) == friday + 24 * HOUR_S


def test_a_clock_that_is_set_moves_windows_that_are_to_come() -> None:
    """And recurring ones. A single one that has begun lasts as long as it would have."""
    queue = Queue(box(1))
    for name, start_s, every in (("begun", 10.0, ""), ("later", 500.0, ""), ("daily", 10.0, "day")):
        made = Reservation(name, frozenset({"gpu0.0"}), start_s, start_s + HOUR_S, frozenset(), every)
        queue.apply(events.ReservationSet(1.0, made))
    moved = {
        event.reservation.id: event.reservation.start_s
        for event in clock_events(queue.queue_state, 100.0, 20.0)
        if isinstance(event, events.ReservationSet)
    }
    assert moved == {"later": 400.0, "daily": -90.0}


def test_a_reservation_may_not_overlap_its_next() -> None:
    with pytest.raises(ConfigError, match="longer than the time until the next"):
        Reservation("r1", frozenset({"d0"}), 0.0, 25 * HOUR_S, frozenset(), "day")
    with pytest.raises(ConfigError, match="day, weekday, week"):
        Reservation("r1", frozenset({"d0"}), 0.0, HOUR_S, frozenset(), "month")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("09:00", (2025, 10, 25, 9, 0)),
        ("11:30", (2025, 10, 24, 11, 30)),
        ("mon 9:05", (2025, 10, 27, 9, 5)),
        ("fri 09:00", (2025, 10, 31, 9, 0)),
        ("fri 12:00", (2025, 10, 24, 12, 0)),
        ("2026-12-01 09:00", (2026, 12, 1, 9, 0)),
    ],
)
def test_times_that_people_write(text: str, moment: tuple[int, ...]) -> None:
    """At ten on a Friday, before the end of summer time."""
    assert read_time_of_day_s(text, _at(2025, 10, 24, 10, 0)) == _at(*moment)


@pytest.mark.parametrize("text", ["9", "24:00", "09:60", "someday 09:00", "2026-02-30 09:00", "2026-12-01"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 09:00"):
        read_time_of_day_s(text, 0.0)
