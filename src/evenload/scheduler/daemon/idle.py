"""Idle devices of running jobs: measured, reported, and the job ended if its owner set so.

A GPU's utilisation is that of NVML, and all processes on it count. Slots of cores count the CPU time of the job's own processes.
Where the driver reports none (parts of a GPU), and on shared devices, nothing is known, and such a device is never idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from evenload.job.processes import ProcessStat, all_stats, descendants
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.runners import LiveAttempt
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.job_syntax import duration_text

_EVERY_SCANS = 5
"""Measured once in so many scans of the GPUs."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Record = Callable[..., tuple[Job, ...]]


class IdleWatch:
    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._measure_at_s = 0.0

    def measure(self, record: Record) -> None:
        """Measure all running jobs where it is time; called once a second."""
        settings, began_s = self._state.settings, time.monotonic()
        if began_s < self._measure_at_s:
            return
        self._measure_at_s = began_s + _EVERY_SCANS * settings.look_every_s
        stats: dict[int, ProcessStat] = {}
        for live in self._state.runners.live.values():
            job = self._state.store.queue_state.jobs.get(live.fence.job)
            if job is None or job.state is not JobState.RUNNING or live.identity is None or job.spec.share_device:
                continue
            stats = stats or all_stats()
            self._note(live, job, self._utilisation(live, job, stats))
            self._act(live, job, record)

    def _utilisation(self, live: LiveAttempt, job: Job, stats: dict[int, ProcessStat]) -> dict[str, float | None]:
        """Return the used part of each device of a job; None where it isn't known."""
        found = self._state.devices
        cores = {core for device in job.devices if device in found for core in found[device].cores}
        if cores:
            return dict.fromkeys(job.devices, _cpu_use(live, stats, len(cores)))
        held = {device: self._state.held(device) for device in job.devices}
        return {device: None if use is None else use.utilisation for device, use in held.items()}

    def _note(self, live: LiveAttempt, job: Job, use: Mapping[str, float | None]) -> None:
        now_s, below = self._state.clock.now_s(), self._state.settings.idle_below
        for device in job.devices:
            part = use[device]
            if device not in live.busy_s or part is None or part >= below:
                live.busy_s[device] = now_s
        live.idle_s = {device: now_s - live.busy_s[device] for device in job.devices}

    def _act(self, live: LiveAttempt, job: Job, record: Record) -> None:
        settings, found = self._state.settings, self._state.devices
        idle = [device for device in job.devices if live.idle_s[device] >= settings.idle_after_s]
        if idle and not live.has_idle_note:
            names = ", ".join(found[device].label if device in found else device for device in idle)
            since = duration_text(round(min(live.idle_s[device] for device in idle)))
            self._state.runners.note(
                job.id,
                f"idle for {since}: {names} (used less than {settings.idle_below:.0%}); others may wait for it: "
                f"evenload cancel {job.id} gives it back, and --idle-end TIME ends such a job by itself",
            )
        live.has_idle_note = bool(idle)
        end_s = live.idle_end_s
        if end_s is not None and min(live.idle_s.values()) >= end_s:
            reason = f"its devices were idle for {duration_text(end_s)} (--idle-end)"
            record(events.StopRequested(self._state.clock.now_s(), job.id, JobState.CANCELLED, reason))


def _cpu_use(live: LiveAttempt, stats: dict[int, ProcessStat], num_cores: int) -> float | None:
    """Return the part of its cores' time that a program used since the last measurement; None for the first."""
    tree = set() if live.identity is None else descendants([live.identity.pid], stats)
    ticks, now_s = sum(stats[pid].cpu_ticks for pid in tree), time.monotonic()
    before, live.cpu_use = live.cpu_use, (now_s, ticks)
    if before is None or now_s <= before[0]:
        return None
    return max(0, ticks - before[1]) / _TICKS_PER_S / (now_s - before[0]) / num_cores


def long_idle_s(state: DaemonState, live: LiveAttempt | None) -> dict[str, float]:
    """Return the devices of an attempt that have been idle long enough to say so, and for how long."""
    if live is None:
        return {}
    return {device: idle_s for device, idle_s in live.idle_s.items() if idle_s >= state.settings.idle_after_s}
