"""Arguments of `run.checkpoint`, checked, and the values that `run.resume` returns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from evenload.errors import ConfigError

_EVERY = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(s|sec|min|h|step|steps)\s*$")
_UNIT_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
STEPS = "steps"


class SavedValues(Mapping[str, Any]):
    """Values that ``run.checkpoint(values=...)`` stored, by name; true if a checkpoint was loaded, even one without values."""

    def __init__(self, values: Mapping[str, Any], *, loaded: bool) -> None:
        self._values = dict(values)
        self._loaded = loaded

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        return self._loaded

    def __repr__(self) -> str:
        return f"SavedValues({self._values!r}, loaded={self._loaded})"


def parse_every(every: str | int) -> tuple[float, str]:
    """Return an interval as ``(seconds, "s")`` or ``(number, "steps")``."""
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return float(every), STEPS
    match = _EVERY.match(every) if isinstance(every, str) else None
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"run.checkpoint(every={every!r}): expected '10min', '90s', '2h', '500steps' or a number of steps"
        )
    if not match[2].startswith("step"):
        return float(match[1]) * _UNIT_S[match[2]], "s"
    if not match[1].isdecimal():
        raise ConfigError(f"run.checkpoint(every={every!r}): expected a whole number of steps")
    return float(match[1]), STEPS


def check_keep(keep: Any) -> float:
    """Return the number of newest checkpoints to keep; infinity for ``"all"``."""
    if keep == "all":
        return math.inf
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigError(f"run.checkpoint(keep={keep!r}): expected a number of checkpoints, at least 1, or 'all'")
    return float(keep)


def check_best(best: Any) -> tuple[str, str]:
    """Return the metric's name, and ``min`` or ``max``."""
    if (
        not isinstance(best, tuple | list)
        or len(best) != 2
        or not isinstance(best[0], str)
        or best[1] not in ("min", "max")
    ):
        raise ConfigError(
            f"run.checkpoint(best={best!r}): expected the name of a metric of run.log, and 'min' or 'max', such as "
            "best=('val_loss', 'min')"
        )
    return best[0], best[1]


def check_values(values: Any, *, convert: bool = True) -> dict[str, Any]:
    """Return the values as a checkpoint stores them: scalars of torch and numpy become numbers.

    Without `convert` tensors stay as they are, so that nothing waits for a device.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"run.checkpoint(values={values!r}): expected a dict of plain values, such as values={{'best_loss': best}}"
        )
    return {_check_name(name): _plain(value, str(name), convert) for name, value in values.items()}


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"run.checkpoint(values={{{name!r}: ...}}): expected names as text")
    return name


def _plain(value: Any, name: str, convert: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value if not convert else value.item() if value.ndim == 0 else value.detach().cpu()
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, name, convert): _plain(part, name, convert) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, name, convert) for part in value]
    raise ConfigError(
        f"run.checkpoint(values={{{name!r}: ...}}): a {type(value).__name__} is no plain value; keep numbers, text, lists and "
        "dicts there, and give objects with state_dict and load_state_dict to run.resume"
    )
