"""Settings file of a queue, `queue.toml` in its folder. All of it is optional.

::

    shared = true              # other users of this machine may reach it; jobs run as their owners (the daemon is root)
    admins = ["alice", 1001]   # may cancel and change everybody's jobs; root and the daemon's own user always may
    max_priority = 0           # the highest that others may give their jobs

    [settings]                 # how it decides: the fields of core.values.Settings
    policy = "default"

    [limits.bob]               # what a user may have
    max_devices = 2

    [groups.vision]            # in reports; other users count in their Unix group
    users = ["ann", "bob"]
    budget_device_hours = 500  # a calendar month, of all of them together

    [cpu]                      # on a machine without GPUs, unless slots are given
    slots = 4

    [[device]]                 # changes of devices found: by id, label (gpu0) or kind
    match = "gpu0"
    speed = 0.5
    use = true
    price_per_hour = 0.4
    cheap_price_per_hour = 0.25  # in the hours of the setting cheap_hours

    [watch]
    every_s = 2.0
    ghost_bytes = 536870912    # memory without a process that is taken to be the driver's own
    idle_below = 0.05          # a device of which less is used is idle; 0 for never
    idle_after_s = 1800        # it is named once it has been idle for so long

    [log]
    bytes = 1073741824         # the log of a job is kept below this
"""

from __future__ import annotations

import pwd
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.scheduler import validation
from evenload.scheduler.core.values import Limits
from evenload.scheduler.paths import SETTINGS_FILE, SYSTEM_FOLDER
from evenload.scheduler.queue_settings import settings_from


@dataclass(frozen=True, slots=True)
class DeviceRule:
    """Settings of the devices that `match` names."""

    match: str
    use: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `core.values.Device`."""


@dataclass(frozen=True, slots=True)
class UserGroup:
    users: tuple[str, ...]
    budget_device_hours: float | None = field(default=None, metadata={"min": 0})
    """Device-hours a calendar month of all its users together."""


@dataclass(frozen=True, slots=True)
class QueueFile:
    shared: bool = False
    admins: frozenset[int] = frozenset()
    max_priority: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Limits] = field(default_factory=dict)
    groups: Mapping[str, UserGroup] = field(default_factory=dict)
    cpu_slots: int | None = None
    devices: tuple[DeviceRule, ...] = ()
    look_every_s: float = 2.0
    ghost_bytes: int = 512 * 2**20
    idle_below: float = 0.05
    idle_after_s: float = 1800.0
    log_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class _CpuTable:
    slots: int | None = field(default=None, metadata={"min": 0})


@dataclass(frozen=True, slots=True)
class _WatchTable:
    every_s: float = field(default=2.0, metadata={"min": 0.05})
    ghost_bytes: int = field(default=512 * 2**20, metadata={"min": 0})
    idle_below: float = field(default=0.05, metadata={"min": 0})
    idle_after_s: float = field(default=1800.0, metadata={"min": 0})


@dataclass(frozen=True, slots=True)
class _LogTable:
    bytes: int = field(default=2**30, metadata={"min": 65536})


@dataclass(frozen=True, slots=True)
class _DeviceTable:
    match: str
    use: bool = True
    kind: str | None = None
    speed: float | None = None
    price_per_hour: float | None = None
    cheap_price_per_hour: float | None = None
    power_w: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _File:
    """The file as it is written."""

    shared: bool | None = None
    admins: tuple[int | str, ...] = field(default=(), metadata={"min": 0})
    max_priority: int = field(default=0, metadata={"min": -(2**31)})
    settings: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Limits] = field(default_factory=dict)
    groups: Mapping[str, UserGroup] = field(default_factory=dict)
    cpu: _CpuTable = _CpuTable()
    device: tuple[_DeviceTable, ...] = ()
    watch: _WatchTable = _WatchTable()
    log: _LogTable = _LogTable()


def read_queue_file(folder: Path) -> QueueFile:
    """Read the settings in the queue's folder; raise a `ConfigError` where a key is unknown or doesn't fit."""
    path = folder / SETTINGS_FILE
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        table = {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    try:
        return _read(table, is_system=folder == SYSTEM_FOLDER)
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(table: Mapping[str, Any], *, is_system: bool) -> QueueFile:
    given = validation.build(_File, table, "")
    settings_from(given.settings)
    groups_of_users(given.groups)
    return QueueFile(
        shared=is_system if given.shared is None else given.shared,
        admins=frozenset(map(_uid, given.admins)),
        max_priority=given.max_priority,
        settings=given.settings,
        limits=given.limits,
        groups=given.groups,
        cpu_slots=given.cpu.slots,
        devices=tuple(map(_rule, given.device)),
        look_every_s=given.watch.every_s,
        ghost_bytes=given.watch.ghost_bytes,
        idle_below=given.watch.idle_below,
        idle_after_s=given.watch.idle_after_s,
        log_bytes=given.log.bytes,
    )


def groups_of_users(groups: Mapping[str, UserGroup]) -> dict[str, str]:
    """Return user → group; a `ConfigError` where a user is in two."""
    found: dict[str, str] = {}
    for name, group in groups.items():
        for user in group.users:
            if user in found:
                raise ConfigError(f"groups: {user} is in {found[user]} and in {name}; expected one group for each user")
            found[user] = name
    return found


def _rule(given: _DeviceTable) -> DeviceRule:
    changes = validation.plain(given)
    return DeviceRule(changes.pop("match"), changes.pop("use", True), changes)


def _uid(name: str | int) -> int:
    if isinstance(name, int):
        return name
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError(f"admins: there is no user {name!r} on this machine") from None
