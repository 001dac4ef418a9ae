"""Other devices for a run in progress, as its user names them: which workers join, and which leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenload.training.launch.changeable_members import ChangeableMembers
from evenload.training.launch.devices import RankDevice, parse_devices, plan_workers, read_host


def change_devices(members: ChangeableMembers, text: str, settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Request these devices, as ``-d`` names them; return a line for each worker that joins or leaves, and all devices.

    ConfigError: an unknown device, another number of fixed shares, or the members of this run can't change.
    """
    staying, host = members.staying, read_host()
    wanted = list(parse_devices(text, host))
    leaving, kept = [], []
    for name in staying:
        device = members.device_of(name)
        found = next((each for each in wanted if _key(each) == _key(device)), None)
        if found is None:
            leaving.append(name)
        else:
            wanted.remove(found)
            kept.append(device)
    specs = plan_workers([*kept, *wanted], host, settings)[len(kept) :]
    lines = []
    for device, spec in zip(wanted, specs, strict=True):
        members.add(device, spec)
        lines.append(f"{device.device} starts, and joins at the end of a step")
    lines += [f"rank {members.rank_of(name)} ({members.where(name)}) leaves at the end of a step" for name in leaving]
    for name in leaving:
        members.remove(name)
    names = ["+".join(device.devices) or device.device for device in (*kept, *wanted)]
    return lines or ["these are the devices of the run already"], names


def _key(device: RankDevice) -> tuple[str, ...]:
    """Return what names the same devices for ever: a queue changes which GPUs CUDA counts here."""
    return device.uuids or device.devices or (device.device,)
