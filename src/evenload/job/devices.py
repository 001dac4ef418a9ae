"""Devices that a queue gives a running program, or takes from it, without a stop: two files beside its `RunnerContract`.

The daemon writes `GivenDevices`: those of the start with number 0, then each change with the next number. A program that can
change its devices while it runs (`evenload run`) writes a `DevicesReply`: with number 0 that it can, or why it can't; then one
for each change, when that has taken effect.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import QueueError
from evenload.job.protocol import SCHEMA, RunnerContract, read_whole, write_whole

READY, CHANGED, REFUSED = "ready", "changed", "refused"


@dataclass(frozen=True, slots=True)
class GivenDevice:
    id: str
    """UUID of a GPU, or the name of a slot of cores."""
    cores: tuple[int, ...] = ()
    """Those of a slot; empty for a GPU."""


@dataclass(frozen=True, slots=True)
class GivenDevices:
    number: int
    """0 at the start, one more with each change."""
    devices: tuple[GivenDevice, ...]


@dataclass(frozen=True, slots=True)
class DevicesReply:
    job: str
    attempt: int
    number: int
    """`GivenDevices.number`."""
    state: str
    """``ready``: it can change its devices; ``changed``: it runs on them; ``refused``: it can't, for `reason`."""
    reason: str = ""
    seconds: float = 0.0
    """Time that the change took."""

    def __post_init__(self) -> None:
        if self.state not in (READY, CHANGED, REFUSED) or not isinstance(self.reason, str):
            raise QueueError(f"invalid reply: state {self.state!r:.50}; expected {READY}, {CHANGED} or {REFUSED}")
        if not isinstance(self.number, int) or not isinstance(self.seconds, int | float) or not 0 <= self.seconds < 1e9:
            raise QueueError("invalid reply: expected a number and seconds >= 0")


def write_given(path: Path, given: GivenDevices) -> None:
    """Write the devices for a program, whoever owns it; OSError if that fails."""
    write_whole(path, {"schema": SCHEMA, **dataclasses.asdict(given)})
    path.chmod(0o644)


def read_given(path: Path) -> GivenDevices | None:
    """Return a program's devices; None where the file is missing or can't be read yet."""
    try:
        row = read_whole(path, GivenDevices)
        devices = tuple(GivenDevice(str(each["id"]), tuple(map(int, each["cores"]))) for each in row["devices"])
        return GivenDevices(int(row["number"]), devices)
    except (OSError, ValueError, TypeError, KeyError, QueueError):
        return None


def write_reply(contract: RunnerContract, number: int, state: str, reason: str = "", seconds: float = 0.0) -> None:
    """Write a program's reply; OSError if that fails."""
    reply = DevicesReply(contract.job, contract.attempt, number, state, reason[:1000], seconds)
    write_whole(Path(contract.devices_reply_file), {"schema": SCHEMA, **dataclasses.asdict(reply)})


def read_reply(contract: RunnerContract) -> DevicesReply | None:
    """Return the newest reply of this attempt; None without one, or where the program's file holds anything else."""
    try:
        reply = DevicesReply(**read_whole(Path(contract.devices_reply_file), DevicesReply))
    except (OSError, ValueError, TypeError, QueueError):
        return None
    return reply if (reply.job, reply.attempt) == (contract.job, contract.attempt) else None
