"""Kinds of settings: what each accepts, in the script and as text on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.foreign_names import VALUES_ELSEWHERE, describe_unknown


@dataclass(frozen=True)
class Kind:
    values: str
    """The accepted values, for the documentation."""
    check: Callable[[Any], Any]
    """Returns the value in its normal form; raises ValueError with what was expected."""
    parse: Callable[[Any], Any] = str
    """Converts the text of a command-line option; leaves what it cannot read to `check`."""
    metavar: str = ""


def one_of(*choices: str) -> Kind:
    return one_in(choices)


def one_in(choices: Sequence[str]) -> Kind:
    """One of the names in `choices`, which may grow."""

    def check(value: Any) -> Any:
        if value not in choices:
            same = {name: text for name, text in VALUES_ELSEWHERE.items() if name == str(value)}
            hint = describe_unknown(str(value), choices, same)
            raise ValueError(f"expected one of {', '.join(choices)}" + (f"; {hint}" if hint else ""))
        return value

    return Kind(" ".join(f"`{choice}`" for choice in choices), check, metavar="|".join(choices))


def _number_or_text(kind: type[int] | type[float]) -> Callable[[str], float | str]:
    def parse(text: str) -> float | str:
        try:
            return kind(text)
        except ValueError:
            return text

    return parse


def integer(expected: str, metavar: str, *, least: int, word: str = "") -> Kind:
    """An integer of at least ``least``, or one word in its place."""

    def check(value: Any) -> Any:
        if word and value == word:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise ValueError(f"expected {expected}")
        return value

    return Kind(expected, check, _number_or_text(int), f"{word}|{metavar}" if word else metavar)


def _check_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e9:
        raise ValueError("expected seconds, more than 0, at most 1e9")
    return float(value)


def _check_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def check_folder(value: Any) -> str:
    if not isinstance(value, str | PathLike) or not str(value) or "\0" in str(value):
        raise ValueError("expected a folder")
    if "://" in str(value):
        raise ValueError(
            "expected a folder of this machine, or a mounted one; copy the run folder to a remote store afterwards"
        )
    folder = str(Path(value).expanduser())
    if folder.encode(errors="replace").decode() != folder:
        raise ValueError("expected a folder whose name is text in UTF-8, as the records name it; rename it")
    return folder


def check_balance(value: Any) -> Any:
    if value in ("auto", "even"):
        return value
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ValueError("expected auto, even, or one integer share for each rank, such as 24,6,2")
    shares = tuple(value)
    if not shares or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shares) or not sum(shares):
        raise ValueError("expected one integer share for each rank, not all of them 0, such as (3, 1)")
    return shares


def parse_balance(text: str) -> str | tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return text


def check_islands(value: Any) -> tuple[tuple[int, ...], ...]:
    try:
        parts = value.split("/") if isinstance(value, str) else value
        found = tuple(
            tuple(sorted(int(rank) for rank in (part.split(",") if isinstance(part, str) else part))) for part in parts
        )
    except (TypeError, ValueError, AttributeError):
        found = ()
    ranks = sorted(rank for part in found for rank in part)
    if not all(found) or not ranks or ranks != list(range(len(ranks))):
        raise ValueError("expected every rank in one island, such as 0,1/2,3")
    return found


def real(expected: str, metavar: str, *, low: float, high: float = float("inf"), includes_low: bool = False) -> Kind:
    """A number above `low`, or from it on, and below `high`."""

    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (low < value < high or (includes_low and value == low)):
            raise ValueError(f"expected {expected}")
        return float(value)

    return Kind(expected, check, _number_or_text(float), metavar)


def check_num_workers(value: Any) -> str:
    if value in ("loader", "auto"):
        return str(value)
    hint = f"; set a number on the loader itself: DataLoader(num_workers={value})" if str(value).isdecimal() else ""
    raise ValueError(f"expected auto (chosen by measurement) or loader (as set in each DataLoader){hint}")


def check_loggers(value: Any) -> tuple[str, ...]:
    # records/loggers/catalogue.py knows which loggers exist: other packages bring some.
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not all(isinstance(name, str) and name for name in names) or (not names and value not in ((), [])):
        raise ValueError("expected the names of loggers, such as tensorboard, wandb or mlflow")
    return names


def parse_loggers(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def check_logger_options(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(options, Mapping) for options in value.values()):
        raise ValueError("expected options by logger, such as {'wandb': {'project': 'gpt'}}")
    return {
        str(name): {str(key): list(item) if isinstance(item, tuple) else item for key, item in options.items()}
        for name, options in value.items()
    }


def parse_logger_options(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse options of loggers such as ``wandb.project=gpt``, one per use of the command-line option."""
    options: dict[str, dict[str, str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        logger, dot, key = name.partition(".")
        if not (equals and dot and logger and key and value):
            raise ConfigError(f"--logger-option {text}: expected LOGGER.OPTION=VALUE, such as wandb.project=gpt")
        if options.setdefault(logger, {}).setdefault(key, value) != value:
            raise ConfigError(f"--logger-option {text}: {name} is already {options[logger][key]!r}; give it once")
    return options


FLAG = Kind("true or false", _check_flag)
SECONDS = Kind("seconds, more than 0", _check_seconds, _number_or_text(float), "SECONDS")
