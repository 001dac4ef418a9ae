"""Catalogue of loggers: the built-in ones, and those of other packages by entry point."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from evenload.errors import ConfigError
from evenload.records.loggers.logger import Logger, LoggerContext

ENTRY_POINTS = "evenload.loggers"
"""The group of entry points; each names a factory ``(LoggerContext) -> Logger``."""


@dataclass(frozen=True)
class BuiltInLogger:
    package: str
    """The required package; the extra has the name of the logger."""
    factory: str
    """``module:function``."""
    texts: tuple[str, ...] = ()
    """Options that are a string."""
    lists: tuple[str, ...] = ()
    """Options that are a list of strings, separated by commas on the command line."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options with a fixed set of values."""


BUILT_IN: Mapping[str, BuiltInLogger] = {
    "tensorboard": BuiltInLogger("tensorboard", "evenload.records.loggers.tensorboard:TensorBoard"),
    "wandb": BuiltInLogger(
        "wandb",
        "evenload.records.loggers.wandb:WeightsAndBiases",
        texts=("project", "entity", "name", "group", "job_type", "notes"),
        lists=("tags",),
        choices={"mode": ("online", "offline", "disabled")},
    ),
    "mlflow": BuiltInLogger(
        "mlflow",
        "evenload.records.loggers.mlflow:MLflow",
        texts=("tracking_uri", "experiment", "name"),
        lists=("tags",),
    ),
}


def check_loggers(names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Raise `ConfigError` for loggers that cannot be opened, without importing them: the same result on every rank."""
    # Reading the entry points of all installed packages takes 50 ms.
    offered = _offered() if any(name not in BUILT_IN for name in names) else {}
    for name in names:
        if name not in BUILT_IN and name not in offered:
            raise ConfigError(
                f"unknown logger {name!r}; expected {', '.join([*BUILT_IN, *sorted(offered)])}, or install the package that "
                f"provides it by an entry point of the group {ENTRY_POINTS}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"the logger {name} is listed twice; list it once")
        if name in BUILT_IN and importlib.util.find_spec(BUILT_IN[name].package) is None:
            raise _missing(name)
    for name, own in (options or {}).items():
        if name not in names:
            raise ConfigError(
                f"logger_options has options for {name!r}, which is not a logger of this run "
                f"({', '.join(names) or 'none is set'}); add it to loggers, or remove its options"
            )
        if name in BUILT_IN:
            _check_options(name, own)


def open_logger(name: str, context: LoggerContext) -> Logger:
    """Open a logger of `check_loggers`; `ConfigError` means that the user must act, other exceptions may be temporary."""
    if name in BUILT_IN:
        module, _, function = BUILT_IN[name].factory.partition(":")
        try:
            factory: Callable[[LoggerContext], Logger] = getattr(importlib.import_module(module), function)
            return factory(replace(context, options=_with_lists(name, context.options)))
        except ImportError as error:
            raise _missing(name) from error
    try:
        factory = _offered()[name].load()
    except (ImportError, AttributeError, KeyError) as error:
        raise ConfigError(f"the logger {name!r} cannot be loaded from its package: {error}") from error
    return factory(context)


def _offered() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}


def _check_options(name: str, own: Mapping[str, Any]) -> None:
    built_in = BUILT_IN[name]
    known = (*built_in.texts, *built_in.lists, *built_in.choices)
    for key, value in own.items():
        shown = f"logger_options: {name}.{key} = {value!r}"
        if key not in known:
            raise ConfigError(f"{shown}: {name} has no such option; expected {_one_of(known)}")
        if key in built_in.texts and not (isinstance(value, str) and value):
            raise ConfigError(f"{shown}: expected a string")
        if key in built_in.lists and not (value and all(isinstance(part, str) and part for part in _listed(value))):
            raise ConfigError(f"{shown}: expected a list of strings")
        if key in built_in.choices and value not in built_in.choices[key]:
            raise ConfigError(f"{shown}: expected {_one_of(built_in.choices[key])}")


def _with_lists(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _listed(value) if key in BUILT_IN[name].lists else value for key, value in own.items()}


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        return value.split(",")
    return list(value) if isinstance(value, list | tuple) else [value]


def _one_of(known: Sequence[str]) -> str:
    return f"one of {', '.join(known)}" if known else "no options"


def _missing(name: str) -> ConfigError:
    package = BUILT_IN[name].package
    return ConfigError(
        f"loggers={name!r} is set, but the package {package} cannot be imported; run pip install 'evenload[{name}]', or remove "
        f"the logger"
    )
