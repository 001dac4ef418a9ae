"""What commands that start ranks make of their options: one table of settings, each with where it was set."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from evenload.config import Config, spell_logger_options
from evenload.errors import ConfigError

LAUNCH_KEYS = ("devices", "throttle", "port")
"""What a file may hold beside the settings."""


def devices_of(nproc_per_node: str) -> str:
    """What ``-d`` would say for torchrun's number of ranks: so many GPUs, or CPU ranks where there is no GPU.

    Raises:
        ConfigError: no number, or more ranks than GPUs.
    """
    from evenload.hardware import gpus

    num_gpus = len(gpus())
    if nproc_per_node in ("auto", "gpu", "cpu"):
        if nproc_per_node == "gpu" and not num_gpus:
            raise ConfigError("--nproc-per-node gpu: there is no GPU here")
        return "cpu" if nproc_per_node == "cpu" else "auto"
    if not nproc_per_node.isdecimal() or nproc_per_node == "0":
        raise ConfigError(f"--nproc-per-node {nproc_per_node}: expected a number of ranks, auto, gpu or cpu")
    num_ranks = int(nproc_per_node)
    if not num_gpus:
        return f"cpu:{num_ranks}"
    if num_ranks > num_gpus:
        raise ConfigError(
            f"--nproc-per-node {num_ranks}: there are {num_gpus} GPUs here; name ranks that share one by -d, such as "
            f"-d 0,0"
        )
    return ",".join(str(index) for index in range(num_ranks))


def merge(given: Mapping[str, Any], path: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Options and file as one table of values, and one of where each is set.

    Raises:
        ConfigError: the file can't be read, has an unknown key, or says otherwise than an option.
    """
    values = {key: value for key, value in given.items() if value is not None}
    sources = {key: _spell(key, value) for key, value in values.items()}
    if path is None:
        return values, sources
    for key, value in _read_file(path).items():
        spelled = f"{key} = {value!r} in {path}"
        if key in values and values[key] != value:
            raise ConfigError(f"{key} is set twice, differently: {sources[key]} and {spelled}; remove one of them")
        if key not in values:
            values[key] = value
            sources[key] = spelled
    return values, sources


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"-c {path}: the file can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"-c {path}: this is no TOML: {error}") from None
    known = {f.name for f in fields(Config)} - {"sources"} | set(LAUNCH_KEYS)
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"-c {path}: there is no setting {key!r}; the settings are {', '.join(sorted(known))}")
        if key == "throttle" and isinstance(value, list):
            table[key] = ",".join(str(factor) for factor in value)
        elif key in ("balance", "loggers") and isinstance(value, list):
            table[key] = tuple(value)
        elif key == "loggers" and isinstance(value, str):
            table[key] = (value,)
        elif key in ("devices", "throttle") and not isinstance(value, str):
            table[key] = str(value)
        elif key == "port" and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 65536):
            raise ConfigError(f"-c {path}: port = {value!r}: expected a number from 0 to 65535")
    return table


def _spell(key: str, value: Any) -> str:
    option = {"devices": "-d", "log_every_s": "--log-every"}.get(key, "--" + key.replace("_", "-"))
    if value is True:
        return option
    if key == "logger_options":
        return spell_logger_options(value)
    return f"{option} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
