"""Completion times on an equal part of the cluster, the reference of finish-time fairness.

ρ (Themis: Mahajan et al., NSDI 2020) is a job's time in the shared cluster over its time on an equal part of it. Here the
part is 1/n of the devices, with n the mean number of jobs present during the job's life. It runs alone on as many of them
as it can use; if it needs more than its part, it gets them only for that part of the time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from evenload.scheduler.core.values import Device, JobSpec
from evenload.scheduler.simulator.arrivals import JobArrival
from evenload.scheduler.simulator.cluster import DeviceShape, shape_of
from evenload.scheduler.simulator.outcome import ClusterSample, JobOutcome
from evenload.scheduler.simulator.programs import alone_s


def packed_shape(devices: Sequence[Device], spec: JobSpec, num: int) -> DeviceShape | None:
    """Return the fastest `num` devices that the job can use, host by host; None if there are fewer."""
    needs = spec.needs
    usable = [d for d in devices if (not needs.kinds or d.kind in needs.kinds) and d.memory_bytes >= needs.memory_bytes]
    usable.sort(key=lambda device: -device.speed)
    return shape_of(tuple(usable[:num])) if len(usable) >= num else None


def with_fair_times(
    outcomes: Sequence[JobOutcome],
    samples: Sequence[ClusterSample],
    arrivals: Mapping[str, JobArrival],
    devices: Sequence[Device],
) -> list[JobOutcome]:
    """Return the outcomes with `fair_s` filled in, in the order of submission."""
    times = [sample.time_s for sample in samples]
    areas = [0.0]
    for sample, after in pairwise(samples):
        areas.append(areas[-1] + sample.num_active * (after.time_s - sample.time_s))

    def area(time_s: float) -> float:
        index = bisect_right(times, time_s) - 1
        return areas[index] + samples[index].num_active * (time_s - times[index])

    known: dict[tuple[object, ...], float] = {}
    filled = []
    for outcome in sorted(outcomes, key=lambda o: o.submitted_s):
        arrival = arrivals[outcome.job]
        needs = arrival.spec.needs
        present = 1.0
        if outcome.jct_s > 0:
            present = max(1.0, (area(outcome.ended_s) - area(outcome.submitted_s)) / outcome.jct_s)
        num = max(needs.min_devices, min(needs.max_devices, int(len(devices) / present)))
        shape = packed_shape(devices, arrival.spec, num) or packed_shape(devices, arrival.spec, needs.min_devices)
        fair_s = 0.0
        if shape is not None:
            key = (arrival.make, shape)
            if key not in known:
                known[key] = alone_s(arrival.make(), shape)
            fair_s = known[key] * max(1.0, present * shape.num_devices / len(devices))
        filled.append(replace(outcome, fair_s=fair_s))
    return filled
