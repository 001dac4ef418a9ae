"""Settings of a queue from what people write: a table of ``queue.toml``, options of a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evenload.errors import ConfigError
from evenload.foreign_names import describe_unknown
from evenload.scheduler.core.values import Settings
from evenload.stored_names import REMOVED_SETTINGS


def settings_from(values: Mapping[str, Any], base: Settings | None = None) -> Settings:
    """Return settings from a mapping (a TOML table, command-line options); those not named are taken from `base`.

    Raises `ConfigError` if a name is unknown or a value is of the wrong type.
    """
    known = {name: Settings.__dataclass_fields__[name].type for name in Settings.__dataclass_fields__}
    for name, value in values.items():
        if name in REMOVED_SETTINGS:
            raise ConfigError(
                f"{name}={value!r}: this setting was removed, as it changed no measured figure; leave it out, and set "
                f"policy=cost, price_per_hour of the devices, and cheap_hours"
            )
        if name not in known:
            hint = describe_unknown(name, known, {}) or f"there are {', '.join(known)}"
            raise ConfigError(f"{name}={value!r}: there is no such setting of the queue; {hint}")
    read: dict[str, Any] = {}
    for name, value in values.items():
        try:
            read[name] = _read(str(known[name]), value)
        except (TypeError, ValueError, OverflowError) as error:
            words = {"int": "a whole number", "float": "a number", "bool": "true or false"}
            kind = words.get(str(known[name]), "numbers, separated by commas")
            raise ConfigError(f"{name}={value!r}: expected {kind}") from error
    return replace(base or Settings(), **read)


def _read(kind: str, value: Any) -> Any:
    if kind == "bool":
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "on", "1"):
            return True
        if str(value).lower() in ("false", "no", "off", "0"):
            return False
        raise ValueError(value)
    if kind.startswith("tuple"):
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(float(part) for part in parts)
    if kind == "int":
        if float(value) != int(float(value)):
            raise ValueError(value)
        return int(float(value))
    return float(value) if kind == "float" else str(value)
