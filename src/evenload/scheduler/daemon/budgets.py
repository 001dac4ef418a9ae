"""Device-hours that users and groups with a budget have held in this calendar month, and what a spent budget means.

Once it is spent, a job that can be preempted counts as one with a priority below 0: it takes what no other job wants, and
gives it back at once. Any other would keep its devices, so it waits. Jobs that already run and can't be preempted go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace

from evenload.scheduler.clock import QueueClock, wall_s
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import User
from evenload.scheduler.daemon.queue_file import UserGroup
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.usage import month_at, month_began_s

_COST_FACTOR = 50
"""Reading takes at most this part of the time."""
_MIN_PAUSE_S = 1.0
_IDLE_ONLY = -1


class Budgets:
    """Reads from the store what was used, at most once a second."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._read_again_s = 0.0
        self.used_hours: dict[str, float] = {}
        """User → device-hours of this month; empty while no budget is set."""
        self.spent: dict[str, str] = {}
        """User → the budget that is spent, for people."""

    def read(self, users: Mapping[str, User], groups: Mapping[str, UserGroup], clock: QueueClock) -> None:
        """Bring `used_hours` and `spent` up to date."""
        budgets = {name: user.limits.budget_device_hours for name, user in users.items()}
        if all(
            hours is None for hours in (*budgets.values(), *(group.budget_device_hours for group in groups.values()))
        ):
            self.used_hours, self.spent, self._read_again_s = {}, {}, 0.0
            return
        began_s = time.monotonic()
        if began_s < self._read_again_s:
            return
        self.used_hours = self._used_hours(clock)
        self._read_again_s = time.monotonic() + max(_MIN_PAUSE_S, _COST_FACTOR * (time.monotonic() - began_s))
        month = month_at(wall_s())
        spent = {}
        for name, hours in budgets.items():
            if (reason := self._reason(name, hours, (name,), month)) is not None:
                spent[name] = reason
        for name, group in groups.items():
            if (reason := self._reason(f"group {name}", group.budget_device_hours, group.users, month)) is not None:
                spent |= {user: reason for user in group.users if user not in spent}
        self.spent = spent

    def hours_of(self, users: tuple[str, ...]) -> float:
        return sum(self.used_hours.get(user, 0.0) for user in users)

    def _reason(self, name: str, budget: float | None, users: tuple[str, ...], month: str) -> str | None:
        if budget is None or (used := self.hours_of(users)) < budget:
            return None
        return f"the budget of {name} is spent ({used:.{3 if used < 1 else 1}f} of {budget:g} device-hours in {month})"

    def _used_hours(self, clock: QueueClock) -> dict[str, float]:
        now_s, month_s = clock.now_s(), month_began_s(wall_s()) - clock.ahead_s
        used: dict[str, float] = {}
        for user, devices, began_s, ended_s, *_ in self._reader.device_use(month_s):
            held_s = (now_s if ended_s is None else ended_s) - max(began_s, month_s)
            used[user] = used.get(user, 0.0) + max(0.0, held_s) * len(json.loads(devices)) / 3600
        return used


def within_budgets(snapshot: QueueSnapshot, spent: Mapping[str, str]) -> tuple[QueueSnapshot, dict[str, str]]:
    """Return the queue that the policy may decide on, and the reasons of the jobs that wait although they could run.

    `spent`: user → which budget is spent, for people.
    """
    if not spent:
        return snapshot, {}
    jobs, waits = [], {}
    for job in snapshot.jobs:
        reason = spent.get(job.spec.user)
        if reason is not None and job.spec.preemptible:
            job = replace(job, spec=replace(job.spec, priority=min(_IDLE_ONLY, job.spec.priority)))
        elif reason is not None and job.state is JobState.PENDING and not (job.is_held or job.unmet or job.doomed):
            waits[job.id] = f"{reason}; a job with --saves or --requeue would use idle devices"
            continue
        jobs.append(job)
    return replace(snapshot, jobs=tuple(jobs)), waits
