"""Efficiency and goodput of a run, and where the time of its devices went: the formulas of docs/reading-a-run.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evenload.views.run.history import DeviceHistory, RunHistory

COMPUTING = "computing"
PARTS = {
    COMPUTING: ("compute_s", "optimizer_s"),
    "compiling": ("compile_s",),
    "data": ("data_s",),
    "waiting": ("wait_s",),
    "communication": ("comm_s",),
    "other": ("other_s",),
}
"""Parts of a device's time, and the segments of the records that each holds."""
STARTING, OUTSIDE = "starting", "outside steps"
MEANINGS = {
    COMPUTING: "forward, backward, clipping and the optimizer",
    "compiling": "steps in which a model was compiled",
    "data": "waiting for samples",
    "waiting": "for slower devices, and for the rest of the reduction",
    "communication": "collectives inside forward and backward",
    "other": "evaluation, checkpoints and other code between steps",
    STARTING: "from the beginning of a session to its first step",
    OUTSIDE: "in no step: recovery, new process groups, measurements, the end of a session",
}


@dataclass(frozen=True)
class RunAccounts:
    """Figures of a run so far; None where the records do not hold what they need."""

    efficiency: float | None
    """Samples in steps / (solo speeds × seconds in steps)."""
    busy: float | None
    """Mean over devices of their own seconds / their seconds in steps."""
    imbalance: float | None
    throughput_per_s: float | None
    goodput_per_s: float | None
    """Committed samples / seconds in sessions."""
    goodput: float | None
    """Committed samples / (solo speeds × seconds alive)."""
    device_s: float
    """Seconds of all devices together, from the beginning of their sessions to their last steps."""
    parts_s: Mapping[str, float]
    """Of them, by the names of `MEANINGS`."""
    worst: Mapping[str, tuple[DeviceHistory, float]]
    """The device that spent the largest fraction of its time on a part, and this fraction."""


def account(history: RunHistory) -> RunAccounts:
    devices = [device for device in history.devices.values() if device.alive_s > 0]
    by_device = [_parts(device) for device in devices]
    parts_s = {name: sum(parts[name] for parts in by_device) for name in MEANINGS}
    worst: dict[str, tuple[DeviceHistory, float]] = {}
    for name in MEANINGS:
        for device, parts in zip(devices, by_device, strict=True):
            fraction = parts[name] / (sum(parts.values()) or 1.0)
            if fraction > worst.get(name, (device, 0.0))[1]:
                worst[name] = device, fraction
    stepped = [device for device in devices if device.in_steps_s > 0]
    busy = [device.busy_s / max(device.in_steps_s, _held_s(device)) for device in stepped]
    solo = [device.solo_per_s for device in devices]
    possible = alive = 0.0
    for device, speed in zip(devices, solo, strict=True):
        possible += (speed or 0.0) * (device.in_steps_s - device.repeated_s)
        alive += (speed or 0.0) * device.alive_s
    known = bool(solo) and None not in solo and possible > 0
    own = [device.busy_s for device in stepped]
    return RunAccounts(
        efficiency=history.num_samples / possible if known else None,
        busy=sum(busy) / len(busy) if busy else None,
        imbalance=max(own) / (sum(own) / len(own)) - 1 if sum(own) > 0 else None,
        throughput_per_s=history.num_samples / history.steps_s if history.steps_s > 0 else None,
        goodput_per_s=history.num_samples / history.bins.end_s
        if history.num_samples and history.bins.end_s > 0
        else None,
        goodput=history.num_samples / alive if known else None,
        device_s=sum(parts_s.values()),
        parts_s=parts_s,
        worst=worst,
    )


def _parts(device: DeviceHistory) -> dict[str, float]:
    parts = {name: sum(device.segments_s[segment] for segment in segments) for name, segments in PARTS.items()}
    return {**parts, STARTING: device.before_s, OUTSIDE: device.outside_s}


def _held_s(device: DeviceHistory) -> float:
    return device.busy_s + device.segments_s["wait_s"] + device.segments_s["comm_s"]
