"""Limits of users and arrays, and how much of them is in use during a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.values import Job


def limits_of(snapshot: QueueSnapshot) -> Mapping[str, tuple[int | None, int | None]]:
    """Return user → most devices at once, most running jobs."""
    return {
        name: (user.limits.max_devices, user.limits.max_running)
        for name, user in snapshot.users.items()
        if user.limits.max_devices is not None or user.limits.max_running is not None
    }


class LimitUse:
    """Devices and jobs that count towards limits, as a plan gives devices out."""

    def __init__(self, snapshot: QueueSnapshot, pending: Iterable[Job], holders: Iterable[Job]) -> None:
        self._limits = limits_of(snapshot)
        self._used: dict[str, list[int]] = {}
        self._in_array: dict[str, int] = {}
        if self._limits or any(job.spec.array for job in pending):
            for job in holders:
                self.add(job, len({*job.devices, *job.target}) if job.target else len(job.devices))

    def add(self, job: Job, num_devices: int) -> None:
        if self._limits:
            used = self._used.setdefault(job.spec.user, [0, 0])
            used[0] += num_devices
            used[1] += 1
        if job.spec.array:
            self._in_array[job.spec.array] = self._in_array.get(job.spec.array, 0) + 1

    def add_devices(self, user: str, num_devices: int) -> None:
        if self._limits:
            self._used[user][0] += num_devices

    def reached(self, job: Job) -> str:
        """Return the limit that keeps the job from starting, for people; empty if there is none."""
        limits = self._limits.get(job.spec.user)
        if limits is not None:
            max_devices, max_running = limits
            devices, running = self._used.get(job.spec.user, (0, 0))
            if max_running is not None and running >= max_running:
                return f"{job.spec.user} has {running} jobs running and may have {max_running}"
            if max_devices is not None and devices + job.spec.needs.min_devices > max_devices:
                return f"{job.spec.user} has {devices} devices and may have {max_devices}"
        if job.spec.array_limit is not None:
            running = self._in_array.get(job.spec.array, 0)
            if running >= job.spec.array_limit:
                return f"{running} of array {job.spec.array} run, and {job.spec.array_limit} may"
        return ""

    def most(self, user: str, num_devices: int) -> int:
        """Return how many of `num_devices` further devices the user may have."""
        limits = self._limits.get(user)
        if limits is None or limits[0] is None:
            return num_devices
        return max(0, min(num_devices, limits[0] - self._used.get(user, [0, 0])[0]))
