"""A queue's own record as a workload: its log of events becomes rows of a table of jobs (`job_table`).

The record includes the queue's devices, settings, users' limits and reservations.

The duration of a job on its minimum of devices is ``Σ seconds · speed · (n / n₀)^scaling`` over its attempts, with measured
speeds in place of the power where the job reported them. The speed of unequal devices is that of the slowest; for an elastic
job, which is taken for an Evenload job, their mean. Jobs that never ran or had not ended are left out, and so are
dependencies on them.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device, Job, Limits, Reservation, Settings
from evenload.scheduler.simulator.arrivals import DEFAULT_SCALING
from evenload.scheduler.store.event_rows import from_row

COLUMNS = (
    "job", "submitted_s", "devices", "duration_s", "user", "priority", "kinds", "memory_gib", "one_host", "one_kind",
    "preemptible", "estimate_s", "soft_limit_s", "not_before_s", "deadline_s", "after", "array", "array_limit",
    "restart_s", "resize_s", "name", "rates", "state", "started_s", "ended_s",
)  # fmt: skip

Row = dict[str, str]


@dataclass
class _RecordedJob:
    job: Job
    work_s: float = 0.0
    """Seconds on the least number of devices, of speed 1."""
    began_s: float | None = None
    """Of the attempt that runs."""
    devices: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class QueueRecord:
    """A queue's log as a workload; times count from the first submission of `rows`."""

    rows: tuple[Row, ...]
    """In the order of submission."""
    num_left_out: int
    """Jobs that never ran or had not ended."""
    devices: tuple[Device, ...]
    """Those that belong to the queue at the end."""
    midnight_s: float
    """When a day began by this machine's clock."""
    settings: Settings
    limits: Mapping[str, Limits]
    reservations: tuple[Reservation, ...]
    """All there were; one that was taken back ends then."""


def record_of(log: Iterable[events.QueueEvent]) -> QueueRecord:
    """Fold the log; `QueueError` if its events don't follow each other."""
    queue_state = QueueState()
    seen: dict[str, _RecordedJob] = {}
    reservations: dict[str, Reservation] = {}
    for event in log:
        if isinstance(event, events.ReservationSet):
            reservations[event.reservation.id] = event.reservation
        elif isinstance(event, events.ReservationEnded) and event.reservation in reservations:
            _cut(reservations, event.reservation, event.time_s)
        for job in queue_state.apply(event):
            one = seen.setdefault(job.id, _RecordedJob(job))
            if one.began_s is not None and job.state is not JobState.RUNNING:
                one.work_s += _work_s(queue_state, one, event.time_s)
                one.began_s = None
            if one.began_s is None and job.state is JobState.RUNNING:
                one.began_s, one.devices = event.time_s, job.devices
            one.job = job
    ended = {name: one for name, one in seen.items() if name in queue_state.outcomes and one.work_s > 0}
    first_s = min((one.job.submitted_s for one in ended.values()), default=0.0)
    return QueueRecord(
        rows=tuple(_row(one, first_s, set(ended)) for one in ended.values()),
        num_left_out=len(seen) - len(ended),
        devices=tuple(queue_state.devices.values()),
        midnight_s=_midnight_s(first_s) - first_s,
        settings=queue_state.settings,
        limits={name: user.limits for name, user in queue_state.users.items() if user.limits != Limits()},
        reservations=tuple(
            replace(r, start_s=r.start_s - first_s, end_s=r.end_s - first_s) for r in reservations.values()
        ),
    )


def _midnight_s(time_s: float) -> float:
    at = time.localtime(time_s)
    return time.mktime((at.tm_year, at.tm_mon, at.tm_mday, 0, 0, 0, 0, 0, -1))


def _cut(reservations: dict[str, Reservation], name: str, time_s: float) -> None:
    reservation = reservations.pop(name)
    if reservation.start_s < time_s:
        reservations[name] = replace(reservation, end_s=min(reservation.end_s, time_s))


def read_log(path: Path) -> QueueRecord:
    """Read and fold a file with one `store.event_rows.as_row` a line; `ConfigError` if it is not such a log."""
    log = []
    number = 0
    try:
        for line in path.read_text().splitlines():
            number += 1
            if line.strip():
                log.append(from_row(json.loads(line)))
        return record_of(log)
    except OSError as error:
        raise ConfigError(f"record {path} can't be read: {error.strerror}") from error
    except (ValueError, TypeError, QueueError) as error:
        where = f", line {number}" if not isinstance(error, QueueError) else ""
        raise ConfigError(f"record {path}{where}: expected one event of a queue a line ({error})") from error


def write_table(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _work_s(queue_state: QueueState, one: _RecordedJob, now_s: float) -> float:
    speeds = [queue_state.devices[name].speed if name in queue_state.devices else 1.0 for name in one.devices]
    num, least, rates = len(one.devices), one.job.spec.needs.min_devices, one.job.rates
    if len(rates) >= max(num, least) and rates[least - 1] > 0:
        factor = rates[num - 1] / rates[least - 1]
    else:
        factor = float((num / least) ** DEFAULT_SCALING)
    began_s = now_s if one.began_s is None else one.began_s
    is_evenload = least < one.job.spec.needs.max_devices  # as `job_table` reads the row
    speed = sum(speeds) / len(speeds) if is_evenload else min(speeds)
    return (now_s - began_s) * speed * factor


def _row(one: _RecordedJob, first_s: float, ended: set[str]) -> Row:
    job, spec, needs = one.job, one.job.spec, one.job.spec.needs
    elastic = needs.min_devices < needs.max_devices
    row = {
        "job": job.id,
        "submitted_s": f"{job.submitted_s - first_s:.3f}",
        "devices": f"{needs.min_devices}:{needs.max_devices}" if elastic else str(needs.min_devices),
        "duration_s": f"{one.work_s:.3f}",
        "user": spec.user,
        "priority": str(spec.priority),
        "kinds": "|".join(needs.kinds),
        "memory_gib": f"{needs.memory_bytes / 2**30:.6g}" if needs.memory_bytes else "",
        "one_host": "yes" if needs.one_host else "",
        "one_kind": "yes" if needs.one_kind else "",
        "preemptible": "yes" if spec.preemptible else "no",
        "after": ";".join(f"{after.job}:{after.condition}" for after in spec.after if after.job in ended),
        "array": spec.array,
        "array_limit": str(spec.array_limit) if spec.array_limit is not None else "",
        "name": spec.name,
        "rates": "|".join(f"{rate:.6g}" for rate in job.rates) if elastic else "",
        "state": str(job.state),
        "started_s": f"{job.first_began_s - first_s:.3f}" if job.first_began_s is not None else "",
        "ended_s": f"{job.since_s - first_s:.3f}",
    }
    for name in ("estimate_s", "soft_limit_s", "restart_s", "resize_s"):
        value = getattr(spec, name)
        if name == "estimate_s" and spec.estimate_source:
            value = None  # the queue's own; a simulation makes its own
        row[name] = f"{value:.6g}" if value is not None else ""
    for name in ("not_before_s", "deadline_s"):
        if (time_s := getattr(spec, name)) is not None:
            row[name] = f"{max(0.0, time_s - first_s):.3f}"
    return row
