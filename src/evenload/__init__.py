"""Evenload: distributed PyTorch training on unequal devices, measured, evenly split, exact.

The public names are loaded when first used: importing evenload imports neither torch nor numpy and has no side effect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenload.version import __version__ as __version__

if TYPE_CHECKING:
    from evenload.config import Config as Config
    from evenload.errors import EvenloadError as EvenloadError
    from evenload.training.checkpoint.load import load_checkpoint as load_checkpoint
    from evenload.training.compute.weighting import count_tokens as count_tokens
    from evenload.training.launch.spawn import spawn as spawn
    from evenload.training.parallel.model_split.split import place as place
    from evenload.training.parallel.threaded.data_parallel import data_parallel as data_parallel
    from evenload.training.run import Run as Run
    from evenload.training.run import init as init

_HOMES = {
    "Config": "evenload.config",
    "EvenloadError": "evenload.errors",
    "Run": "evenload.training.run",
    "count_tokens": "evenload.training.compute.weighting",
    "data_parallel": "evenload.training.parallel.threaded.data_parallel",
    "init": "evenload.training.run",
    "load_checkpoint": "evenload.training.checkpoint.load",
    "place": "evenload.training.parallel.model_split.split",
    "spawn": "evenload.training.launch.spawn",
}

__all__ = [
    "Config",
    "EvenloadError",
    "Run",
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
        raise AttributeError(f"module 'evenload' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
