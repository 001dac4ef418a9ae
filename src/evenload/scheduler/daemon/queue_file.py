"""`queue.toml` in a queue's folder: what its owner sets for the queue as a whole. All of it may be left out.

::

    shared = true              # other users of this machine may reach it; jobs run as their owners (the daemon is root)
    admins = ["alice", 1001]   # may cancel and change everybody's jobs; root and the daemon's own user always may
    max_priority = 0           # the highest that others may give their jobs

    [settings]                 # how it decides: the fields of core.values.Settings
    policy = "default"

    [limits.bob]               # what a user may have
    max_devices = 2

    [cpu]                      # on a machine without GPUs, unless slots are given
    slots = 4

    [[device]]                 # changes of devices found: by id, label (gpu0) or kind
    match = "gpu0"
    speed = 0.5
    use = true

    [watch]
    every_s = 2.0
    ghost_bytes = 536870912    # memory without a process that is taken to be the driver's own

    [log]
    bytes = 1073741824         # the log of a job is kept below this
"""

from __future__ import annotations

import math
import pwd
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.scheduler.core.values import Limits, settings_from
from evenload.scheduler.paths import SETTINGS_FILE, SYSTEM_FOLDER

_DEVICE_KEYS = ("match", "use", "kind", "speed", "price_per_hour", "power_w", "memory_bytes")


@dataclass(frozen=True, slots=True)
class DeviceRule:
    """What is set for the devices that `match` names."""

    match: str
    use: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `core.values.Device`."""


@dataclass(frozen=True, slots=True)
class QueueFile:
    """What is set for a queue."""

    shared: bool = False
    admins: frozenset[int] = frozenset()
    max_priority: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Limits] = field(default_factory=dict)
    cpu_slots: int | None = None
    devices: tuple[DeviceRule, ...] = ()
    look_every_s: float = 2.0
    ghost_bytes: int = 512 * 2**20
    log_bytes: int = 2**30


def read_queue_file(folder: Path) -> QueueFile:
    """What is set in the queue's folder.

    Raises:
        ConfigError: the file can't be read, or a key is unknown or can't be.
    """
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
    _check_keys(
        table, ("shared", "admins", "max_priority", "settings", "limits", "cpu", "device", "watch", "log"), "the file"
    )
    cpu, watch, log = (_table(table, name) for name in ("cpu", "watch", "log"))
    _check_keys(cpu, ("slots",), "[cpu]")
    _check_keys(watch, ("every_s", "ghost_bytes"), "[watch]")
    _check_keys(log, ("bytes",), "[log]")
    settings, defaults = _table(table, "settings"), QueueFile()
    settings_from(settings)
    return QueueFile(
        shared=_bool(table, "shared", is_system),
        admins=frozenset(map(_uid, table.get("admins", ()))),
        max_priority=_number(table, "max_priority", 0, least=-(2**31), whole=True),
        settings=settings,
        limits={name: _limits(name, row) for name, row in _table(table, "limits").items()},
        cpu_slots=_number(cpu, "slots", None, least=0, whole=True),
        devices=tuple(map(_rule, table.get("device", ()))),
        look_every_s=_number(watch, "every_s", defaults.look_every_s, least=0.05),
        ghost_bytes=_number(watch, "ghost_bytes", defaults.ghost_bytes, least=0, whole=True),
        log_bytes=_number(log, "bytes", defaults.log_bytes, least=65536, whole=True),
    )


def _limits(name: str, row: Any) -> Limits:
    known = [f.name for f in fields(Limits)]
    _check_keys(row, known, f"[limits.{name}]")
    return Limits(**row)


def _rule(row: Any) -> DeviceRule:
    _check_keys(row, _DEVICE_KEYS, "[[device]]")
    if not isinstance(row.get("match"), str):
        raise ConfigError('[[device]] without match: expected match = "gpu0", an id or a kind')
    changes = {name: value for name, value in row.items() if name not in ("match", "use")}
    return DeviceRule(row["match"], _bool(row, "use", True), changes)


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name}={found!r}: expected a table")
    return found


def _bool(table: Mapping[str, Any], name: str, default: bool) -> bool:
    found = table.get(name, default)
    if not isinstance(found, bool):
        raise ConfigError(f"{name}={found!r}: expected true or false")
    return found


def _number(table: Mapping[str, Any], name: str, default: Any, *, least: float, whole: bool = False) -> Any:
    found = table.get(name, default)
    if found is None:
        return None
    fits = isinstance(found, int if whole else int | float) and not isinstance(found, bool)
    if not fits or not least <= found < math.inf:
        raise ConfigError(f"{name}={found!r}: expected a {'whole ' if whole else ''}number of at least {least:g}")
    return found


def _uid(name: Any) -> int:
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return name
    try:
        return pwd.getpwnam(str(name)).pw_uid
    except KeyError:
        raise ConfigError(f"admins: there is no user {name!r} on this machine") from None


def _check_keys(table: Any, known: Any, where: str) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table, found {table!r}")
    for name in table:
        if name not in known:
            raise ConfigError(f"there is no {name!r} in {where}; there are {', '.join(known)}")
