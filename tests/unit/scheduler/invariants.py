"""What must be true of the queue at every moment, whatever happened: checked after every event in tests, and on restart."""

from __future__ import annotations

from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import WITH_DEVICES, JobState
from evenload.scheduler.core.values import Job


def violations(snapshot: QueueSnapshot) -> list[str]:
    """What is wrong, in words; empty where all is well."""
    found: list[str] = []
    holder: dict[str, Job] = {}
    held_by: dict[str, int] = {}
    given_to: dict[str, int] = {}
    """User → devices of their jobs once those that resize have done so."""
    for job in snapshot.jobs:
        found += _of_job(snapshot, job)
        for device in {*job.devices, *job.target}:
            other = holder.setdefault(device, job)
            if other is not job and not (other.spec.share_device and job.spec.share_device):
                found.append(f"device {device} is given to {other.id} and to {job.id}, and not both of them share it")
        held_by[job.spec.user] = held_by.get(job.spec.user, 0) + len(job.devices)
        given_to[job.spec.user] = given_to.get(job.spec.user, 0) + max(len(job.devices), len(job.target))
    for name, user in snapshot.users.items():
        if user.num_devices != held_by.get(name, 0):
            found.append(f"user {name} is counted with {user.num_devices} devices and holds {held_by.get(name, 0)}")
        most = user.limits.max_devices
        if most is not None and given_to.get(name, 0) > most:
            found.append(f"user {name} has {given_to[name]} devices and may have {most}")
    return found


def _of_job(snapshot: QueueSnapshot, job: Job) -> list[str]:
    found = []
    if bool(job.devices) != (job.state in WITH_DEVICES):
        found.append(f"job {job.id} is {job.state} and holds {len(job.devices)} devices")
    if job.spec.share_device and len(job.devices) > 1:
        found.append(f"job {job.id} shares its device and holds {len(job.devices)}")
    if job.target and job.state is not JobState.RESIZING:
        found.append(f"job {job.id} is {job.state} and still waits for devices")
    if job.ending is not None and job.state is not JobState.PREEMPTING:
        found.append(f"job {job.id} is {job.state} and to end as {job.ending}")
    for devices in filter(None, (job.devices, job.target)):
        found += _of_gang(snapshot, job, devices)
    return found


def _of_gang(snapshot: QueueSnapshot, job: Job, devices: tuple[str, ...]) -> list[str]:
    needs, layout = job.spec.needs, snapshot.layout
    if unknown := [device for device in devices if device not in layout.index]:
        return [f"job {job.id} holds {', '.join(unknown)}, which the queue doesn't know"]
    gang = [layout.devices[layout.index[device]] for device in devices]
    found = []
    if not needs.min_devices <= len(set(devices)) == len(devices) <= needs.max_devices:
        found.append(f"job {job.id} holds {devices} and needs {needs.min_devices} to {needs.max_devices}")
    if needs.kinds and any(device.kind not in needs.kinds for device in gang):
        found.append(f"job {job.id} holds a device that is none of {needs.kinds}")
    if any(device.memory_bytes < needs.memory_bytes for device in gang):
        found.append(f"job {job.id} holds a device with less memory than it needs")
    if needs.one_host and len({device.host for device in gang}) > 1:
        found.append(f"job {job.id} is spread over hosts")
    if needs.one_kind and len({device.kind for device in gang}) > 1:
        found.append(f"job {job.id} holds several kinds")
    return found
