"""What a user sets, and where each value came from.

A key is set in the script (`evenload.init(seed=1)`) or on the command line (`evenload run --seed 1`). The same key set
differently in both is an error that shows both; nothing is read from the environment or from hidden files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any

from evenload.errors import ConfigError

PRECISIONS = ("no", "bf16", "fp16")
STRATEGIES = ("ddp", "dp")
WORKERS = ("loader", "auto")
BATCH_LR = ("auto", "adascale", "sqrt", "none")

COMMAND_LINE = "command line"
SPAWN = "call of evenload.spawn"
"""Where settings come from beside the script."""


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
    """How a model is spread: ``ddp`` keeps a replica on each rank, ``dp`` several in one process, one for each device."""
    micro_batch: int | str = "auto"
    """Most samples a rank computes at once; ``auto`` finds what fits the memory."""
    balance: str | tuple[int, ...] = "auto"
    """``auto`` measures and splits, ``even`` gives equal shares, ``24,6,2`` fixes the shares."""
    batch_max: int | None = None
    """The global batch may grow up to so many samples where measured goodput is higher; None: it is the loader's."""
    batch_lr: str = "auto"
    """How the learning rate follows a grown batch: ``adascale``, ``sqrt``, ``none``; ``auto``: the first for SGD, else sqrt."""
    batch_norm: str = "global"
    """``global`` takes BatchNorm's statistics over all ranks; ``local`` leaves the model's BatchNorm alone."""
    dataset_rng: str = "keyed"
    """``keyed`` seeds the randomness inside a dataset by (seed, epoch, position); ``off`` leaves it alone."""
    num_workers: str = "loader"
    """Loader workers: ``loader`` takes what each DataLoader says, ``auto`` chooses them by measurement while it trains."""
    check_every: int | str = 10
    """Steps between two comparisons of all ranks' parameters and buffers; ``off`` compares nothing."""
    loggers: tuple[str, ...] = ()
    """Extra places for `run.log`: ``tensorboard``, ``wandb``, ``mlflow``, and those of other packages."""
    logger_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each logger by name what it is told, such as ``{"wandb": {"project": "gpt"}}`` (docs/loggers.md)."""
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


def resolve(script: Mapping[str, Any], command_line: Mapping[str, Any], caller: str = COMMAND_LINE) -> Config:
    """Joins what the script and the command line set, checked.

    Args:
        script: keyword arguments of `evenload.init`; None means not set.
        command_line: options of the command by key; None means not set.
        caller: who gave these: `COMMAND_LINE`, or `SPAWN`.

    Raises:
        ConfigError: an unknown key, a bad value, or a key set differently in both places.
    """
    known = {f.name for f in fields(Config)} - {"sources"}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for where, given, spell in (
        ("script", script, _spell_script),
        (caller, command_line, _spell_option if caller == COMMAND_LINE else _spell_spawn),
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
                    f"{key} is set twice, differently: {sources[key]} in the script and {spell(key, raw)} "
                    f"{'on' if where == COMMAND_LINE else 'in'} the {where}; remove one of them"
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
    table["logger_options"] = {name: dict(own) for name, own in config.logger_options.items()}
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


def parse_check_every(text: str) -> str | int:
    """Reads ``off`` or a number of steps as the command line gives it."""
    if text == "off":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--check-every {text}: expected off or a number of steps, such as 10") from None


def parse_loggers(text: str) -> tuple[str, ...]:
    """Reads ``tensorboard,wandb`` as the command line gives it."""
    return tuple(name.strip() for name in text.split(","))


def parse_logger_options(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Reads ``wandb.project=gpt``, one a use of the option, as the command line gives them."""
    options: dict[str, dict[str, str]] = {}
    for text in texts:
        place, equals, value = text.partition("=")
        logger, dot, key = place.partition(".")
        if not (equals and dot and logger and key and value):
            raise ConfigError(f"--logger-option {text}: expected LOGGER.OPTION=VALUE, such as wandb.project=gpt")
        if options.setdefault(logger, {}).setdefault(key, value) != value:
            raise ConfigError(f"--logger-option {text}: {place} is {options[logger][key]!r} already; give it once")
    return options


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


def _spell_spawn(key: str, value: Any) -> str:
    return f"spawn({key}={value!r})"


def _spell_option(key: str, value: Any) -> str:
    option = "--" + key.replace("_", "-")
    if value is True:
        return option
    if key == "logger_options" and isinstance(value, Mapping):
        return spell_logger_options(value)
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


def _check_batch_max(key: str, value: Any, spelled: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise ConfigError(f"{spelled}: expected a number of samples, more than the loader's batch_size")
    return value


def _check_workers(key: str, value: Any, spelled: str) -> Any:
    if value in WORKERS:
        return value
    hint = (
        f"; a number is set where the loader is made: DataLoader(num_workers={value})" if str(value).isdecimal() else ""
    )
    raise ConfigError(f"{spelled}: expected auto (chosen by measurement) or loader (as each DataLoader says){hint}")


def _check_check_every(key: str, value: Any, spelled: str) -> Any:
    if value == "off":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{spelled}: expected off or a number of steps, at least 1")
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


def spell_logger_options(options: Mapping[str, Any]) -> str:
    """The options of loggers as the command line has them."""
    return " ".join(
        f"--logger-option {name}.{key}={value}"
        for name, own in options.items()
        for key, value in (own.items() if isinstance(own, Mapping) else ())
    )


def _check_loggers(key: str, value: Any, spelled: str) -> tuple[str, ...]:
    # Which there are is known to records/loggers/catalogue.py: other packages bring some.
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not all(isinstance(name, str) and name for name in names) or (not names and value not in ((), [])):
        raise ConfigError(f"{spelled}: expected the names of loggers, such as tensorboard, wandb or mlflow")
    return names


def _check_logger_options(key: str, value: Any, spelled: str) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(own, Mapping) for own in value.values()):
        raise ConfigError(f"{spelled}: expected options by logger, such as {{'wandb': {{'project': 'gpt'}}}}")
    return {
        str(name): {str(option): list(v) if isinstance(v, tuple) else v for option, v in own.items()}
        for name, own in value.items()
    }


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
    "batch_max": _check_batch_max,
    "batch_lr": _check_choice(*BATCH_LR),
    "batch_norm": _check_choice("global", "local"),
    "dataset_rng": _check_choice("keyed", "off"),
    "num_workers": _check_workers,
    "check_every": _check_check_every,
    "loggers": _check_loggers,
    "logger_options": _check_logger_options,
    "log_every_s": _check_positive_s,
    "timeout_s": _check_positive_s,
}
