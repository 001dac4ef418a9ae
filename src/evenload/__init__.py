"""Evenload: distributed PyTorch training on unequal devices, measured, evenly split, exact.

The public names are loaded when first used: importing evenload imports neither torch nor numpy and has no side effect.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenload.version import __version__ as __version__

if TYPE_CHECKING:
    from evenload.config import Config as Config
    from evenload.errors import CheckpointError as CheckpointError
    from evenload.errors import ConfigError as ConfigError
    from evenload.errors import DataError as DataError
    from evenload.errors import DesyncError as DesyncError
    from evenload.errors import DivergenceError as DivergenceError
    from evenload.errors import EvenloadError as EvenloadError
    from evenload.errors import LaunchError as LaunchError
    from evenload.errors import NonFiniteError as NonFiniteError
    from evenload.errors import PeerLostError as PeerLostError
    from evenload.errors import QueueError as QueueError
    from evenload.errors import RankFailedError as RankFailedError
    from evenload.errors import StepError as StepError
    from evenload.training.checkpoint.load import load_checkpoint as load_checkpoint
    from evenload.training.compute.weighting import count_tokens as count_tokens
    from evenload.training.launch.spawn import spawn as spawn
    from evenload.training.parallel.model_split.split import place as place
    from evenload.training.parallel.threaded.data_parallel import data_parallel as data_parallel
    from evenload.training.run import Run as Run
    from evenload.training.run import init as init

_ERRORS = (
    *("CheckpointError", "ConfigError", "DataError", "DesyncError", "DivergenceError", "EvenloadError", "LaunchError"),
    *("NonFiniteError", "PeerLostError", "QueueError", "RankFailedError", "StepError"),
)
_HOMES = {
    **dict.fromkeys(_ERRORS, "evenload.errors"),
    "Config": "evenload.config",
    "Run": "evenload.training.run",
    "count_tokens": "evenload.training.compute.weighting",
    "data_parallel": "evenload.training.parallel.threaded.data_parallel",
    "init": "evenload.training.run",
    "load_checkpoint": "evenload.training.checkpoint.load",
    "place": "evenload.training.parallel.model_split.split",
    "spawn": "evenload.training.launch.spawn",
}

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DesyncError",
    "DivergenceError",
    "EvenloadError",
    "LaunchError",
    "NonFiniteError",
    "PeerLostError",
    "RankFailedError",
    "Run",
    "StepError",
    "__version__",
    "count_tokens",
    "data_parallel",
    "init",
    "load_checkpoint",
    "place",
    "spawn",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from evenload.errors import UnknownNameError
        from evenload.foreign_names import MODULE_ELSEWHERE, describe_unknown

        hint = "" if name.startswith("__") else describe_unknown(name, __all__, MODULE_ELSEWHERE)
        if hint and "TORCHELASTIC_RUN_ID" in os.environ:
            import_module("evenload.training.launch.uncaught").report_uncaught_at_start()  # once, not on every rank
        raise UnknownNameError(f"module 'evenload' has no attribute {name!r}" + (f"; {hint}" if hint else ""))
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
