"""Events that bring the store up to date: devices added or removed, external processes, settings of `queue.toml`.

Pure: the recorded queue and the state of the machine go in, events come out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace

from evenload.scheduler.clock import QueueClock
from evenload.scheduler.core import events
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.values import Limits, Reservation
from evenload.scheduler.daemon.devices import LocalDevice
from evenload.scheduler.daemon.external_processes import GpuScan, closed_reason, join_refusal
from evenload.scheduler.daemon.queue_file import QueueFile
from evenload.scheduler.queue_settings import settings_from

_MISSING = "isn't found in this machine now"
_SATURDAY = 5
_REPEAT_S = 30.0
"""A reason with only other numbers is recorded again no more often than this."""


def device_events(queue_state: QueueState, found: Mapping[str, LocalDevice], now_s: float) -> list[events.QueueEvent]:
    """Return the events of devices that are new, changed, back, or missing.

    A missing one is removed only where another of its kind was found: a driver that doesn't answer for a moment must not
    empty the queue.
    """
    happened: list[events.QueueEvent] = []
    for name, one in found.items():
        if queue_state.devices.get(name) != one.device:
            happened.append(events.DeviceAdded(now_s, one.device))
        if queue_state.closed.get(name) == _MISSING:
            happened.append(events.DeviceOpened(now_s, name))
    has_gpus = any(one.is_gpu for one in found.values())
    for name, device in queue_state.devices.items():
        if name in found:
            continue
        is_sure = device.kind == "cpu" or has_gpus
        if is_sure and name not in queue_state.holder and not _is_reserved(queue_state, name):
            happened.append(events.DeviceRemoved(now_s, name))
        elif name not in queue_state.closed:
            happened.append(events.DeviceClosed(now_s, name, _MISSING))
    return happened


def shifted(reservation: Reservation, by_s: float) -> Reservation:
    first_s = None if reservation.first_s is None else reservation.first_s + by_s
    return replace(reservation, start_s=reservation.start_s + by_s, end_s=reservation.end_s + by_s, first_s=first_s)


def recurring_events(queue_state: QueueState, clock: QueueClock) -> list[events.QueueEvent]:
    """Return the events that set the next window of each recurring reservation whose window is over."""
    now_s, ahead_s = clock.now_s(), clock.ahead_s
    return [
        events.ReservationSet(now_s, shifted(next_window(shifted(reservation, ahead_s), now_s + ahead_s), -ahead_s))
        for reservation in queue_state.reservations.values()
        if reservation.every and reservation.end_s <= now_s
    ]


def first_window(reservation: Reservation) -> Reservation:
    """Return a reservation with its first window on a day on which it recurs; by the wall clock."""
    at = time.localtime(reservation.start_s)
    if reservation.every != "weekday" or at.tm_wday < _SATURDAY:
        return reservation
    days = 7 - at.tm_wday
    start_s = time.mktime((at.tm_year, at.tm_mon, at.tm_mday + days, at.tm_hour, at.tm_min, at.tm_sec, 0, 0, -1))
    return replace(reservation, start_s=start_s, end_s=start_s + reservation.end_s - reservation.start_s)


def next_window(reservation: Reservation, now_s: float) -> Reservation:
    """Return a recurring reservation with its first window that ends after a time; all by the wall clock.

    It begins at the same time of day, also after a change of summer time, and lasts as long as before. On the day whose
    change leaves that time out it begins later or earlier, and the day after at its own time again.
    """
    first_s = reservation.start_s if reservation.first_s is None else reservation.first_s
    of_day, length_s = time.localtime(round(first_s)), reservation.end_s - reservation.start_s
    at, clock_time = time.localtime(reservation.start_s), (of_day.tm_hour, of_day.tm_min, of_day.tm_sec)
    step = 7 if reservation.every == "week" else 1
    days = 0
    while True:
        days += step
        start_s = time.mktime((at.tm_year, at.tm_mon, at.tm_mday + days, *clock_time, 0, 0, -1))
        if reservation.every == "weekday" and time.localtime(start_s).tm_wday >= _SATURDAY:
            continue
        if start_s + length_s > now_s:
            return replace(reservation, start_s=start_s, end_s=start_s + length_s, first_s=first_s)


def clock_events(queue_state: QueueState, step_s: float, now_s: float) -> list[events.QueueEvent]:
    """Return the events that keep what people gave as a time of day, after the wall clock was set by `step_s`.

    Times that count from a submission, and single windows that have begun, last as long as they would have.
    """
    happened: list[events.QueueEvent] = [
        events.ReservationSet(now_s, shifted(reservation, -step_s))
        for reservation in queue_state.reservations.values()
        if reservation.every or reservation.start_s > now_s
    ]
    for job in queue_state.jobs.values():
        names = {"not_before_s", "deadline_s"}.difference(job.spec.delays)
        times = {name: getattr(job.spec, name) for name in sorted(names)}
        later = {name: time_s - step_s for name, time_s in times.items() if time_s is not None and time_s > now_s}
        if later:
            happened.append(events.SpecChanged(now_s, job.id, replace(job.spec, **later)))
    return happened


def _is_reserved(queue_state: QueueState, name: str) -> bool:
    return any(name in reservation.devices for reservation in queue_state.reservations.values())


def file_events(queue_state: QueueState, settings: QueueFile, now_s: float) -> list[events.QueueEvent]:
    """Return the events that apply `queue.toml` where it differs from the store."""
    happened: list[events.QueueEvent] = []
    if settings.settings:
        known = settings_from(settings.settings)
        wanted = replace(queue_state.settings, **{name: getattr(known, name) for name in settings.settings})
        if wanted != queue_state.settings:
            happened.append(events.SettingsSet(now_s, wanted))
    for name, limits in settings.limits.items():
        if (queue_state.users[name].limits if name in queue_state.users else Limits()) != limits:
            happened.append(events.LimitsSet(now_s, name, limits))
    return happened


def _is_news(before: str, reason: str, recorded_since_s: float) -> bool:
    """Return False for the same reason with other numbers, recorded a moment ago."""
    if re.sub(r"[\d.]+", "", before) != re.sub(r"[\d.]+", "", reason):
        return True
    return reason != before and recorded_since_s >= _REPEAT_S


def external_process_events(
    queue_state: QueueState,
    found: Mapping[str, LocalDevice],
    scan: GpuScan,
    allowed_bytes: int,
    recorded_s: dict[str, float],
    now_s: float,
    runners: Mapping[str, int] | None = None,
) -> list[events.DeviceClosed | events.DeviceOpened]:
    """Return the events of devices without a job that external processes use now, and of those that are free again.

    A shared device is open to further jobs once all processes on it descend from its jobs' `runners` (job → process id).
    """
    happened: list[events.DeviceClosed | events.DeviceOpened] = []
    for name, one in found.items():
        if not one.is_gpu or name not in queue_state.devices:
            continue
        if (holders := queue_state.holder.get(name)) is not None:
            is_shared = all(queue_state.jobs[job].spec.share_device for job in holders)
            pids = [runners[job] for job in holders if job in runners] if runners is not None else []
            if name in queue_state.closed and is_shared and not join_refusal(scan.held.get(name), allowed_bytes, pids):
                happened.append(events.DeviceOpened(now_s, name))
            continue
        reason, before = closed_reason(scan.held.get(name), allowed_bytes), queue_state.closed.get(name)
        if not reason and before is not None:
            happened.append(events.DeviceOpened(now_s, name))
        elif reason and (before is None or _is_news(before, reason, now_s - recorded_s.get(name, 0.0))):
            happened.append(events.DeviceClosed(now_s, name, reason))
            recorded_s[name] = now_s
    return happened
