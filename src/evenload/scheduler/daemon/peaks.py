"""Memory peaks of jobs that may share their device: measured by NVML on a GPU, by the runner on CPU cores.

A peak is recorded once it is reliable: when its job has run for `Settings.share_after_s`, when a run has ended, and at once
where it is higher than expected.
"""

from __future__ import annotations

from collections.abc import Callable

from evenload.scheduler.core import events
from evenload.scheduler.core.sharing import excess_bytes, expected_bytes
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.external_processes import DeviceUse
from evenload.scheduler.daemon.log import DaemonLog
from evenload.scheduler.daemon.runners import LiveAttempt
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.runner import files
from evenload.scheduler.runner.files import RunnerResult

_MIN_GROWTH = 1.02
"""A peak is recorded again when it is this many times the previous one."""

Record = Callable[..., tuple[Job, ...]]


class MemoryPeaks:
    def __init__(self, state: DaemonState, log: DaemonLog) -> None:
        self._state, self._log = state, log
        self._warned: set[str] = set()
        """Devices whose jobs need more memory than there is, and none of them can be stopped."""

    def measure(self, record: Record) -> None:
        """Measure all running jobs that may share; called once a second."""
        queue_state = self._state.store.queue_state
        now_s = self._state.clock.now_s()
        for live in self._state.runners.live.values():
            job = queue_state.jobs.get(live.fence.job)
            if job is None or not job.spec.share_device or not job.devices:
                continue
            live.peak_bytes = max(live.peak_bytes, self._measured_bytes(live, job))
            if self._is_reliable(live, job, now_s):
                (job,) = record(events.MemoryMeasured(now_s, job.id, live.peak_bytes))
                for change in self._state.memory_history.learn(job, queue_state.jobs, now_s):
                    record(change)
        self._warn()

    def ended(self, live: LiveAttempt, result: RunnerResult | None, is_success: bool, record: Record) -> None:
        """Record the peak of an attempt before its end is recorded, if the program succeeded or ran long enough."""
        job = self._state.store.queue_state.jobs.get(live.fence.job)
        if job is None or not job.spec.share_device or not job.devices:
            return
        live.peak_bytes = max(live.peak_bytes, 0 if result is None else result.peak_bytes)
        now_s = self._state.clock.now_s()
        if self._is_reliable(live, job, now_s) or (is_success and live.peak_bytes > job.peak_bytes * _MIN_GROWTH):
            record(events.MemoryMeasured(now_s, job.id, live.peak_bytes))

    def _is_reliable(self, live: LiveAttempt, job: Job, now_s: float) -> bool:
        if live.peak_bytes <= job.peak_bytes * _MIN_GROWTH:
            return False
        expected = expected_bytes(job)
        if job.peak_bytes or (expected is not None and live.peak_bytes > expected):
            return True
        return now_s - job.attempt_began_s >= self._state.store.queue_state.settings.share_after_s

    def _measured_bytes(self, live: LiveAttempt, job: Job) -> int:
        device = job.devices[0]
        found = self._state.devices.get(device)
        if found is None or live.identity is None:
            return 0
        if not found.is_gpu:
            return files.read_peak(live.folder, live.fence.number)
        held, scan = self._state.held(device), self._state.scan
        if held is None or scan is None or scan.began_s <= live.began_s:
            return 0
        return job_memory_bytes(
            held, live.identity.pid, is_alone=self._state.store.queue_state.holder.get(device) == (job.id,)
        )

    def _warn(self) -> None:
        """Log once per device that its jobs need more than it has, where none of them can be stopped."""
        queue_state, crowded = self._state.store.queue_state, set()
        for device, names in queue_state.holder.items():
            if len(names) < 2:
                continue
            jobs = [queue_state.jobs[name] for name in names]
            if any(job.state is not JobState.RUNNING or job.spec.preemptible for job in jobs):
                continue
            if more_bytes := excess_bytes(jobs, queue_state.devices[device].memory_bytes):
                crowded.add(device)
                if device not in self._warned:
                    self._log.write(
                        f"{device}: jobs {', '.join(names)} may need {more_bytes / 2**30:.1f} GiB more than it has, and none "
                        f"of them can be stopped"
                    )
        self._warned = crowded


def job_memory_bytes(held: DeviceUse, runner: int, *, is_alone: bool) -> int:
    """Return the GPU memory of the processes below a runner.

    Where the driver doesn't report it for each process, or no process can be read (a container), all memory in use counts as the
    job's if it is alone on the GPU; else the result is 0.
    """
    own = [holder.used_bytes for holder in held.holders if holder.runner == runner]
    known = [used for used in own if used is not None]
    if own and len(known) == len(own):
        return sum(known)
    hides_all = all(not holder.command or holder.runner == runner for holder in held.holders)
    return held.used_bytes if is_alone and hides_all and held.holders else 0
