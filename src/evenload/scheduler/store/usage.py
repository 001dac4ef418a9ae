"""Use of a queue's devices by month, group and user, from its attempts and its log."""

from __future__ import annotations

import grp
import json
import pwd
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evenload.errors import ConfigError
from evenload.scheduler.core import events
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.core.values import Needs
from evenload.scheduler.store.event_rows import stored_kind
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.validation import build

REPORT_KEYS = ("month", "group", "user")


@dataclass(slots=True)
class UsageRow:
    """The use of one month, group and user; a key that isn't asked for is empty, and the row sums over it."""

    month: str
    """Of the calendar, such as ``2026-11``; a job that runs on past a month's end counts in both."""
    group: str
    user: str
    num_jobs: int = 0
    """Jobs submitted in the month."""
    device_s: float = 0.0
    """Device-seconds held in the month, until now for jobs that run."""
    waited_s: float = 0.0
    """Time for which jobs submitted in the month could have run but had no devices."""
    num_preempted: int = 0
    """Stops in the month for other jobs' sake."""
    cost: float = 0.0
    """At the devices' present prices; 0 where none has one."""
    saved: float = 0.0
    """Price of the same work less `cost`: at once on the fastest kind of each request (`savings.usual_cost`)."""


def usage_rows(
    reader: Reader,
    groups: Mapping[str, str],
    by: Sequence[str] = REPORT_KEYS,
    month: str = "",
) -> list[UsageRow]:
    """Return the rows in the order of their keys.

    Args:
        reader: of the queue.
        groups: user → group; any other user has their Unix group.
        by: some of `REPORT_KEYS`.
        month: only this month, as ``2026-11``; all if empty.

    Raises:
        ConfigError: an unknown key, or a month of another form.
    """
    _check(by, month)
    clock, found = reader.clock(), dict[tuple[str, ...], UsageRow]()
    now_s, ahead_s = clock.now_s(), clock.ahead_s
    prices, known = reader.prices(), dict(groups)

    def row_of(user: str, in_month: str) -> UsageRow | None:
        if month and in_month != month:
            return None
        if user not in known:
            known[user] = unix_group(user)
        values = {"month": in_month, "group": known[user], "user": user}
        key = tuple(value if name in by else "" for name, value in values.items())
        return found.setdefault(key, UsageRow(key[0], key[1], key[2]))

    for user, devices, began_s, ended_s, job, submitted_s, needs in reader.device_use():
        held, until_s = json.loads(devices), now_s if ended_s is None else ended_s
        usual = prices.usual_cost(job, build(Needs, json.loads(needs), "needs"), submitted_s, held, began_s, until_s)
        per_s = usual / max(until_s - began_s, 1e-9)
        for in_month, seconds in months(began_s + ahead_s, until_s + ahead_s):
            if (row := row_of(user, in_month)) is not None:
                paid = prices.cost(held, began_s, began_s + seconds)
                row.device_s += seconds * len(held)
                row.cost += paid
                row.saved += seconds * per_s - paid
            began_s += seconds
    for user, submitted_s, waited_s in _waits(reader, now_s):
        if (row := row_of(user, month_at(submitted_s + ahead_s))) is not None:
            row.num_jobs += 1
            row.waited_s += waited_s
    stopped = stored_kind(events.StopRequested)
    for user, time_s in reader.events_of(stopped, "json_extract(e.body, '$.then') IS NULL"):
        if (row := row_of(user, month_at(time_s + ahead_s))) is not None:
            row.num_preempted += 1
    return [found[key] for key in sorted(found)]


def report_table(rows: Sequence[UsageRow], by: Sequence[str]) -> dict[str, Any]:
    """Return the rows as plain values, as the daemon's `report` replies."""
    return {"by": list(by), "rows": [asdict(row) for row in rows]}


def months(began_s: float, ended_s: float) -> Iterator[tuple[str, float]]:
    """Yield the months of a span of the wall clock, and the seconds in each."""
    while began_s < ended_s:
        next_s = month_began_s(began_s, further=1)
        yield month_at(began_s), min(next_s, ended_s) - began_s
        began_s = next_s


def month_began_s(time_s: float, further: int = 0) -> float:
    """Return when the calendar month of a time began, or one so many months further."""
    at = time.localtime(time_s)
    return time.mktime((at.tm_year, at.tm_mon + further, 1, 0, 0, 0, 0, 0, -1))


def month_at(time_s: float) -> str:
    return time.strftime("%Y-%m", time.localtime(time_s))


def unix_group(user: str) -> str:
    """Return a user's primary group on this machine; the user's own name without one."""
    try:
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    except KeyError:
        return user


def _waits(reader: Reader, now_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield user, time of submission and wait of each job ever."""
    yield from reader.waits(tuple(ENDED))
    for line in reader.jobs(states=tuple(state for state in JobState if state not in ENDED)):
        if (job := reader.job(line.id)) is not None:
            yield line.user, line.submitted_s, job.waited_until(now_s)


def _check(by: Sequence[str], month: str) -> None:
    if unknown := [name for name in by if name not in REPORT_KEYS]:
        raise ConfigError(f"--by {unknown[0]}: expected some of {', '.join(REPORT_KEYS)}, separated by commas")
    if month:
        try:
            is_month = time.strftime("%Y-%m", time.strptime(month, "%Y-%m")) == month
        except ValueError:
            is_month = False
        if not is_month:
            raise ConfigError(f"month {month!r}: expected a year and a month, such as 2026-11")
