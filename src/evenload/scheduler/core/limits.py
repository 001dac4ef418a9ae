"""Limits of users and arrays, and how much of them is in use during a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from evenload.scheduler.core.values import Job, Limits, User

_NO_LIMITS = Limits()


class LimitUse:
    """Devices and jobs that count towards limits, as a plan gives devices out."""

    def __init__(self, users: Mapping[str, User], holders: Iterable[Job]) -> None:
        self._limits = {name: user.limits for name, user in users.items()}
        self._devices: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._in_array: Counter[str] = Counter()
        for job in holders:
            self.add(job, len({*job.devices, *job.target}) if job.target else len(job.devices))

    def add(self, job: Job, num_devices: int) -> None:
        self._devices[job.spec.user] += num_devices
        self._running[job.spec.user] += 1
        if job.spec.array:
            self._in_array[job.spec.array] += 1

    def grow(self, user: str, num_devices: int) -> None:
        self._devices[user] += num_devices

    def reached(self, job: Job) -> str:
        """Return the limit that keeps the job from starting, for people; empty if there is none."""
        spec = job.spec
        limits = self._limits.get(spec.user, _NO_LIMITS)
        devices = self._devices[spec.user]
        if limits.max_running is not None and (running := self._running[spec.user]) >= limits.max_running:
            return f"{spec.user} has {running} jobs running and may have {limits.max_running}"
        if limits.max_devices is not None and devices + spec.needs.min_devices > limits.max_devices:
            return f"{spec.user} has {devices} devices and may have {limits.max_devices}"
        if spec.array_limit is not None and self._in_array[spec.array] >= spec.array_limit:
            return f"{self._in_array[spec.array]} of array {spec.array} run, and {spec.array_limit} may"
        return ""

    def most(self, user: str, num_devices: int) -> int:
        """Return how many of `num_devices` further devices the user may have."""
        limit = self._limits.get(user, _NO_LIMITS).max_devices
        return num_devices if limit is None else max(0, min(num_devices, limit - self._devices[user]))
