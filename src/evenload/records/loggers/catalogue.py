"""Which loggers there are: our own, and those that other packages offer by entry point."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from evenload.errors import ConfigError
from evenload.records.loggers.logger import Logger, Opening

ENTRY_POINTS = "evenload.loggers"
"""The group of entry points; each names a function ``(Opening) -> Logger``."""


@dataclass(frozen=True)
class BuiltIn:
    """One of our own loggers."""

    package: str
    """What must be importable; the extra has the same name as the logger."""
    opener: str
    """``module:function``."""
    texts: tuple[str, ...] = ()
    """Options that are one text."""
    lists: tuple[str, ...] = ()
    """Options that are several texts; with commas between them on the command line."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options that take one of a few texts."""


BUILT_IN: Mapping[str, BuiltIn] = {
    "tensorboard": BuiltIn("tensorboard", "evenload.records.loggers.tensorboard:TensorBoard"),
    "wandb": BuiltIn(
        "wandb",
        "evenload.records.loggers.wandb:WeightsAndBiases",
        texts=("project", "entity", "name", "group", "job_type", "notes"),
        lists=("tags",),
        choices={"mode": ("online", "offline", "disabled")},
    ),
    "mlflow": BuiltIn(
        "mlflow",
        "evenload.records.loggers.mlflow:MLflow",
        texts=("tracking_uri", "experiment", "name"),
        lists=("tags",),
    ),
}


def check_loggers(names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Checks without importing any of them that the loggers can be opened; the same on every rank.

    Args:
        names: the loggers of a run.
        options: for each logger by name, its own options.

    Raises:
        ConfigError: an unknown name or option, a name given twice, options of a logger that isn't used, or a missing package.
    """
    offered = _offered()
    for name in names:
        if name not in BUILT_IN and name not in offered:
            raise ConfigError(
                f"there is no logger {name!r}; expected some of {', '.join([*BUILT_IN, *sorted(offered)])}, or install the "
                f"package that offers it by an entry point of the group {ENTRY_POINTS}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"the logger {name} is named twice; name it once")
        if name in BUILT_IN and importlib.util.find_spec(BUILT_IN[name].package) is None:
            raise _missing(name)
    for name, own in (options or {}).items():
        if name not in names:
            raise ConfigError(
                f"logger_options has options for {name!r}, which is no logger of this run ({', '.join(names) or 'none is set'}); "
                f"add it to loggers, or remove them"
            )
        if name in BUILT_IN:
            _check_options(name, own)


def open_logger(name: str, opening: Opening) -> Logger:
    """Opens a logger that `check_loggers` has let pass.

    Raises:
        ConfigError: its package doesn't import, or what the logger itself says only the user can mend.
        Exception: whatever else its library raises; it may pass by itself.
    """
    if name in BUILT_IN:
        module, _, function = BUILT_IN[name].opener.partition(":")
        try:
            opener: Callable[[Opening], Logger] = getattr(importlib.import_module(module), function)
            return opener(replace(opening, options=_spelled_out(name, opening.options)))
        except ImportError as error:
            raise _missing(name) from error
    try:
        opener = _offered()[name].load()
    except (ImportError, AttributeError, KeyError) as error:
        raise ConfigError(f"the logger {name!r} can't be loaded from its package: {error}") from error
    return opener(opening)


def _offered() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}


def _check_options(name: str, own: Mapping[str, Any]) -> None:
    built_in = BUILT_IN[name]
    known = (*built_in.texts, *built_in.lists, *built_in.choices)
    for key, value in own.items():
        spelled = f"logger_options: {name}.{key} = {value!r}"
        if key not in known:
            raise ConfigError(f"{spelled}: {name} has no such option; expected {_either(known)}")
        if key in built_in.texts and not (isinstance(value, str) and value):
            raise ConfigError(f"{spelled}: expected a text")
        if key in built_in.lists and not (value and all(isinstance(part, str) and part for part in _listed(value))):
            raise ConfigError(f"{spelled}: expected a list of texts")
        if key in built_in.choices and value not in built_in.choices[key]:
            raise ConfigError(f"{spelled}: expected {_either(built_in.choices[key])}")


def _spelled_out(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The options with every list as a list; the command line gives ``a,b``."""
    return {key: _listed(value) if key in BUILT_IN[name].lists else value for key, value in own.items()}


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        return value.split(",")
    return list(value) if isinstance(value, list | tuple) else [value]


def _either(known: Sequence[str]) -> str:
    return f"one of {', '.join(known)}" if known else "none: it has no options"


def _missing(name: str) -> ConfigError:
    package = BUILT_IN[name].package
    return ConfigError(
        f"loggers={name!r} is set, but the package {package} can't be imported here; "
        f"pip install 'evenload[{name}]', or leave the logger out"
    )
