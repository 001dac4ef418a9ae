"""Use of devices by month, group and user."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.scheduler.core import events
from evenload.scheduler.core.values import Device, Settings, User
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.usage import UsageRow, months, unix_group, usage_rows
from evenload.scheduler.store.writer import QueueStore
from evenload.views.queue.usage import report_csv, report_lines
from tests.unit.scheduler.queue import spec

HOUR_S = 3600.0
GROUPS = {"ann": "vision", "bob": "vision"}


def _november_s() -> float:
    return time.mktime((2024, 11, 1, 0, 0, 0, 0, 0, -1))


def _rows(folder: Path, by: tuple[str, ...] = ("month", "group", "user"), month: str = "") -> list[UsageRow]:
    with Reader(folder) as reader:
        return usage_rows(reader, GROUPS, by, month)


def test_the_start_of_a_runner_is_not_billed(tmp_path: Path) -> None:
    """A job has its devices for 2 s before its program may start; the program ends 1 s before that is noticed."""
    began_s = _november_s()
    with QueueStore(tmp_path, holder="test") as store:
        store.record(events.DeviceAdded(began_s, Device("d0", "h")))
        store.record(events.Submitted(began_s, "1", spec(user="ann")), extra={"command": ["true"]})
        store.record(events.Placed(began_s, "1", ("d0",), 1))
        store.record(events.JobStarted(began_s + 2.0, "1"))
        store.record(events.Ended(began_s + 6.0, "1", is_success=True, ended_s=began_s + 5.0))
        store.commit()
    assert [row.device_s for row in _rows(tmp_path)] == [3.0]
    with Reader(tmp_path) as reader:
        (attempt,) = reader.attempts("1")
    assert (attempt.began_s, attempt.ended_s) == (began_s + 2.0, began_s + 5.0)
    assert audit(tmp_path) == []


def test_a_job_over_the_end_of_a_month_counts_in_both(tmp_path: Path) -> None:
    """It waits an hour, holds two devices for two hours before the end and one after, and is preempted then."""
    end_s = _november_s()
    with QueueStore(tmp_path, holder="test") as store:
        for number in (0, 1):
            store.record(events.DeviceAdded(end_s - 9 * HOUR_S, Device(f"d{number}", "h", price_per_hour=2.0 * number)))
        for name, user in (("1", "ann"), ("2", "cid")):
            extra = {"command": ["true"]}
            store.record(events.Submitted(end_s - 3 * HOUR_S, name, spec(user=user)), extra=extra)
        store.record(events.Placed(end_s - 2 * HOUR_S, "1", ("d0", "d1"), 1))
        store.record(events.JobStarted(end_s - 2 * HOUR_S, "1"))
        store.record(events.StopRequested(end_s + HOUR_S, "1", reason="for another"))
        store.record(events.Yielded(end_s + HOUR_S, "1"))
        store.record(events.Cancelled(end_s + 2 * HOUR_S, "1"))
        store.record(events.Cancelled(end_s + 2 * HOUR_S, "2"))
        store.commit()
    group = unix_group("cid")
    assert _rows(tmp_path) == [
        UsageRow("2024-10", group, "cid", num_jobs=1, waited_s=5 * HOUR_S),
        UsageRow("2024-10", "vision", "ann", num_jobs=1, device_s=4 * HOUR_S, waited_s=2 * HOUR_S, cost=4.0),
        UsageRow("2024-11", "vision", "ann", device_s=2 * HOUR_S, num_preempted=1, cost=2.0),
    ]
    (october,) = _rows(tmp_path, ("month",), "2024-10")
    assert (october.num_jobs, october.device_s, october.group) == (2, 4 * HOUR_S, "")
    with Reader(tmp_path) as reader:
        stored = reader.job("1")
    assert stored is not None and sum(row.device_s for row in _rows(tmp_path)) == stored.service_device_s
    table = {"by": ["group"], "rows": [vars_of(row) for row in _rows(tmp_path, ("group",))]}
    assert report_csv(table).splitlines()[-1] == "vision,1,6.0,2.0,1,6.0,0.0"
    assert report_lines(table).splitlines()[-1].split() == ["total", "2", "6.00", "7.00", "1", "6.00", "0.00"]


def vars_of(row: UsageRow) -> dict[str, object]:
    return {name: getattr(row, name) for name in UsageRow.__slots__}


def test_months_follow_the_calendar() -> None:
    """Also over a change of summer time, and a year's end."""
    began_s = time.mktime((2024, 12, 31, 22, 0, 0, 0, 0, -1))
    assert list(months(began_s, began_s + 3 * HOUR_S)) == [("2024-12", 2 * HOUR_S), ("2025-01", HOUR_S)]
    whole = list(months(began_s, began_s + 400 * 86400.0))
    assert len(whole) == 15 and sum(seconds for _, seconds in whole) == 400 * 86400.0
    assert list(months(5.0, 5.0)) == []


@pytest.mark.parametrize(("by", "month", "named"), [(("kind",), "", "--by kind"), (("user",), "2024-1", "2024-1")])
def test_a_wrong_request_is_named(tmp_path: Path, by: tuple[str, ...], month: str, named: str) -> None:
    QueueStore(tmp_path, holder="test").close()
    with pytest.raises(ConfigError, match=named):
        _rows(tmp_path, by, month)


def test_a_day_of_summer_times_end_costs_its_hours_by_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Saturday noon to Monday noon it is cheap from 22 to 6, nine hours and then eight; also on Sunday alone."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        began_s = time.mktime((2025, 10, 25, 12, 0, 0, 0, 0, -1))
        evening_s = time.mktime((2025, 10, 26, 21, 0, 0, 0, 0, -1))
        with QueueStore(tmp_path, holder="test") as store:
            store.record(events.SettingsSet(began_s - HOUR_S, Settings(cheap_hours="22-6")))
            for name in ("d0", "d1"):
                device = Device(name, "h", price_per_hour=10.0, cheap_price_per_hour=1.0)
                store.record(events.DeviceAdded(began_s - HOUR_S, device))
            for name, at_s in (("1", began_s), ("2", evening_s)):
                store.record(events.Submitted(at_s, name, spec(user=f"u{name}")), extra={"command": ["true"]})
                store.record(events.Placed(at_s, name, (f"d{int(name) - 1}",), 1))
                store.record(events.JobStarted(at_s, name))
            store.record(events.Ended(evening_s + HOUR_S, "2", is_success=True))
            store.record(events.Ended(began_s + 49 * HOUR_S, "1", is_success=True))
            store.commit()
        rows = {row.user: row for row in _rows(tmp_path, ("user",))}
    time.tzset()
    assert rows["u2"].cost == pytest.approx(10.0), "at nine in the evening it isn't cheap yet"
    assert rows["u1"].cost == pytest.approx(17.0 + 32 * 10.0, abs=0.01)
    assert rows["u1"].saved == pytest.approx(0.0, abs=0.01)


def test_use_that_is_never_forgotten_adds_up() -> None:
    """A half-life without end is a setting: it keeps all use."""
    user = User("ann", usage_device_s=5.0, num_devices=2)
    assert user.until(10.0, float("inf")).usage_device_s == 25.0
    assert user.usage_until(10.0, 1e12) == pytest.approx(25.0, rel=1e-2)
