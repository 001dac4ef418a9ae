"""Sums for a report from a simulated queue's events: costs, preemptions, devices in use over time."""

from __future__ import annotations

from collections.abc import Mapping

from evenload.scheduler.core import events
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.values import Device, Job
from evenload.scheduler.simulator.outcome import ClusterSample, JobOutcome
from evenload.scheduler.tariff import Tariff

_NO_CHEAP_HOURS = Tariff()


class Meter:
    def __init__(self, devices: Mapping[str, Device], tariff: Tariff = _NO_CHEAP_HOURS) -> None:
        self._devices, self._tariff = devices, tariff
        self._held: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._cost: dict[str, float] = {}
        self._energy_kwh: dict[str, float] = {}
        self._num_preempted: dict[str, int] = {}
        self.ended: list[JobOutcome] = []
        self.samples: list[ClusterSample] = []

    def observe(self, event: events.QueueEvent, changed: tuple[Job, ...], queue_state: QueueState) -> None:
        if isinstance(event, events.Reported):
            return
        match event:
            case events.StopRequested(is_preemption=True) | events.ResizeRequested(is_forced=True):
                self._num_preempted[event.job] = self._num_preempted.get(event.job, 0) + 1
        for job in changed:
            self._settle(job, event.time_s)
            if job.id not in queue_state.jobs:
                self.ended.append(self._outcome(job))
        if changed:
            sample = ClusterSample(event.time_s, len(queue_state.holder), len(queue_state.jobs))
            if self.samples and self.samples[-1].time_s == event.time_s:
                self.samples[-1] = sample
            else:
                self.samples.append(sample)

    def _settle(self, job: Job, time_s: float) -> None:
        since_s, held = self._held.get(job.id, (time_s, ()))
        if held == job.devices:
            return
        hours = (time_s - since_s) / 3600.0
        if hours > 0:
            devices = [self._devices[name] for name in held]
            paid = sum(self._tariff.cost(d.price_per_hour, d.cheap_price_per_hour, since_s, time_s) for d in devices)
            self._cost[job.id] = self._cost.get(job.id, 0.0) + paid
            energy_kwh = hours * sum(d.power_w for d in devices) / 1000.0
            self._energy_kwh[job.id] = self._energy_kwh.get(job.id, 0.0) + energy_kwh
        self._held[job.id] = (time_s, job.devices)

    def _outcome(self, job: Job) -> JobOutcome:
        self._held.pop(job.id, None)
        return JobOutcome(
            job=job.id,
            user=job.spec.user,
            state=job.state,
            submitted_s=job.submitted_s,
            began_s=job.first_began_s,
            ended_s=job.since_s,
            service_device_s=job.service_device_s,
            num_restarts=job.num_restarts,
            num_preemptions=self._num_preempted.pop(job.id, 0),
            cost=self._cost.pop(job.id, 0.0),
            energy_kwh=self._energy_kwh.pop(job.id, 0.0),
            deadline_s=job.spec.deadline_s,
        )
