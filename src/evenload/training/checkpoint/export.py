"""Write weights for use outside Evenload: `run.export`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from evenload.errors import ConfigError


def write_weights(path: str | PathLike[str], model: nn.Module) -> None:
    """Write the model's `state_dict` atomically: ``.safetensors`` in that format, any other name with torch.save.

    Raises:
        ConfigError: The package safetensors is not installed.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    if target.suffix == ".safetensors":
        try:
            from safetensors.torch import save_model
        except ImportError as error:
            raise ConfigError(
                f"run.export({str(path)!r}) needs safetensors: pip install 'evenload[safetensors]'"
            ) from error
        save_model(model, str(partial))
    else:
        torch.save(model.state_dict(), partial)
    partial.replace(target)


def pick_model(model: nn.Module | None, prepared: Sequence[nn.Module]) -> nn.Module:
    """Return `model`, or the only prepared one; ConfigError if none or several are prepared."""
    if model is not None:
        return model
    if len(prepared) != 1:
        raise ConfigError(f"run.export: {len(prepared)} models are prepared; say which: run.export(path, model)")
    return prepared[0]
