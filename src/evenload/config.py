"""What a user sets, and where each value came from.

A key is set in the script (`evenload.init(seed=1)`) or on the command line (`evenload run --seed 1`). The same key set
differently in both is an error that shows both; nothing is read from the environment or from hidden files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any

from evenload.errors import ConfigError

PRECISIONS = ("no", "bf16", "fp16")
STRATEGIES = ("ddp",)
LOGGERS = ("tensorboard",)


@dataclass(frozen=True)
class Config:
    """The resolved settings of one run; `sources` tells where each came from."""

    project_dir: str = "runs/default"
    """The run folder: settings, events, steps and checkpoints."""
    seed: int = 0
    """Fixes the order of samples and all randomness that Evenload keys."""
    precision: str = "no"
    """``no`` computes in the model's own dtype; ``bf16`` and ``fp16`` autocast, fp16 with dynamic loss scaling."""
    strategy: str = "ddp"
    """How a model is spread: ``ddp`` keeps a replica on each rank."""
    micro_batch: int | str = "auto"
    """Most samples a rank computes at once; ``auto`` finds what fits the memory."""
    balance: str | tuple[int, ...] = "auto"
    """``auto`` measures and splits, ``even`` gives equal shares, ``24,6,2`` fixes the shares."""
    batch_norm: str = "global"
    """``global`` takes BatchNorm's statistics over all ranks; ``local`` leaves the model's BatchNorm alone."""
    dataset_rng: str = "keyed"
    """``keyed`` seeds the randomness inside a dataset by (seed, epoch, position); ``off`` leaves it alone."""
    loggers: tuple[str, ...] = ()
    """Extra places for `run.log`: ``tensorboard``."""
    log_every_s: float = 10.0
    """Seconds between two plain progress lines, where there is no terminal."""
    timeout_s: float = 600.0
    """How long a collective may take before it is an error."""
    fresh: bool = False
    """Start anew: what the run folder holds is moved aside."""
    dry_run: bool = False
    """Print what is decided, and why; train nothing."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """For each key not left at its default, where it was set."""


def resolve(script: Mapping[str, Any], command_line: Mapping[str, Any]) -> Config:
    """Joins what the script and the command line set, checked.

    Args:
        script: keyword arguments of `evenload.init`; None means not set.
        command_line: options of the command by key; None means not set.

    Raises:
        ConfigError: an unknown key, a bad value, or a key set differently in both places.
    """
    known = {f.name for f in fields(Config)} - {"sources"}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for where, given, spell in (
        ("script", script, _spell_script),
        ("command line", command_line, _spell_option),
    ):
        for key, raw in given.items():
            if raw is None:
                continue
            if key not in known:
                raise ConfigError(
                    f"{spell(key, raw)} in the {where}: there is no setting {key!r}; the settings are "
                    f"{', '.join(sorted(known))}"
                )
            value = _CHECKS[key](key, raw, spell(key, raw)) if key in _CHECKS else raw
            if key in values and values[key] != value:
                raise ConfigError(
                    f"{key} is set twice, differently: {sources[key]} in the script and {spell(key, raw)} on the "
                    f"command line; remove one of them"
                )
            values[key] = value
            sources.setdefault(key, spell(key, raw))
    return Config(**values, sources=sources)


def as_table(config: Config) -> dict[str, Any]:
    """The settings and their sources as plain values, for `config.toml`."""
    table: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        table[f.name] = list(value) if isinstance(value, tuple) else value
    table["sources"] = dict(config.sources)
    return table


def parse_balance(text: str) -> str | tuple[int, ...]:
    """Reads ``auto``, ``even`` or ``24,6,2`` as the command line gives it."""
    if text in ("auto", "even"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--balance {text}: expected auto, even, or one integer share for each rank, such as 24,6,2"
        ) from None


def parse_micro_batch(text: str) -> str | int:
    """Reads ``auto`` or a number of samples as the command line gives it."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--micro-batch {text}: expected auto or a number of samples, such as 8") from None


def _spell_script(key: str, value: Any) -> str:
    return f"init({key}={value!r})"


def _spell_option(key: str, value: Any) -> str:
    option = "--" + key.replace("_", "-")
    if value is True:
        return option
    if isinstance(value, tuple | list):
        value = ",".join(str(part) for part in value)
    return f"{option} {value}"


def _check_choice(*choices: str) -> Callable[[str, Any, str], Any]:
    def check(key: str, value: Any, spelled: str) -> Any:
        if value not in choices:
            raise ConfigError(f"{spelled}: expected one of {', '.join(choices)}")
        return value

    return check


def _check_seed(key: str, value: Any, spelled: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ConfigError(f"{spelled}: expected an integer from 0 to 2^63 - 1")
    return value


def _check_micro_batch(key: str, value: Any, spelled: str) -> Any:
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{spelled}: expected auto or a number of samples, at least 1")
    return value


def _check_balance(key: str, value: Any, spelled: str) -> Any:
    if value in ("auto", "even"):
        return value
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{spelled}: expected auto, even, or one integer share for each rank, such as 24,6,2")
    shares = tuple(value)
    if not shares or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shares) or not sum(shares):
        raise ConfigError(f"{spelled}: shares are integers of at least 0, and not all of them 0")
    return shares


def _check_positive_s(key: str, value: Any, spelled: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{spelled}: expected seconds, more than 0")
    return float(value)


def _check_loggers(key: str, value: Any, spelled: str) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple):
        raise ConfigError(f"{spelled}: expected the names of loggers, some of {', '.join(LOGGERS)}")
    names = (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"{spelled}: there is no logger {name!r}; expected some of {', '.join(LOGGERS)}")
    return names


def _check_path(key: str, value: Any, spelled: str) -> str:
    if not isinstance(value, str | PathLike) or not str(value):
        raise ConfigError(f"{spelled}: expected a folder")
    return str(value)


_CHECKS: dict[str, Callable[[str, Any, str], Any]] = {
    "project_dir": _check_path,
    "seed": _check_seed,
    "precision": _check_choice(*PRECISIONS),
    "strategy": _check_choice(*STRATEGIES),
    "micro_batch": _check_micro_batch,
    "balance": _check_balance,
    "batch_norm": _check_choice("global", "local"),
    "dataset_rng": _check_choice("keyed", "off"),
    "loggers": _check_loggers,
    "log_every_s": _check_positive_s,
    "timeout_s": _check_positive_s,
}
