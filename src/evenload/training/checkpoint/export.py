"""Write weights for use outside Evenload: `run.export`, ``evenload export``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenload.errors import CheckpointError, ConfigError
from evenload.training.checkpoint.load import load_checkpoint

_OTHER_FORMATS = frozenset((".onnx", ".pt2", ".gguf", ".h5", ".npz", ".tflite"))


def write_weights(path: str | PathLike[str], model: nn.Module) -> None:
    """Write the model's `state_dict` atomically: ``.safetensors`` in that format, any other name with torch.save.

    Raises:
        ConfigError: The package safetensors is not installed, or the name is that of another format.
    """
    if not isinstance(path, str | PathLike):
        raise ConfigError(
            f"run.export received a {type(path).__name__} as the path; write run.export('model.safetensors', model)"
        )
    check_suffix(Path(path))
    weights = model.state_dict()  # an error of the model's own stays one
    with _replacing(Path(path)) as partial:
        if Path(path).suffix == ".safetensors":
            _safetensors(str(path)).save_model(model, str(partial))
        else:
            torch.save(weights, partial)


def check_suffix(path: Path) -> None:
    """Raise ConfigError for the name of a format that holds other things than weights, or others' weights."""
    if path.suffix in _OTHER_FORMATS:
        raise ConfigError(
            f"{path.name}: run.export writes weights, as .safetensors or as .pt (torch.save); torch.onnx.export and other "
            "converters take the model itself"
        )


def export_checkpoint(run: Path, path: Path, which: str | int = "last", name: str | None = None) -> str:
    """Write the weights of a checkpoint to a file as `write_weights` does, and return the name of their state.

    Raises:
        CheckpointError: there is no such checkpoint, or no such state in it.
        ConfigError: the package safetensors is not installed, or the state does not fit its format.
    """
    state = load_checkpoint(run, which)
    chosen = name or ("model" if "model" in state else _only_model(state))
    if chosen not in state:
        raise CheckpointError(f"--name {chosen}: the checkpoint holds {', '.join(sorted(state))}")
    weights = state[chosen]
    check_suffix(path)
    with _replacing(path) as partial:
        if path.suffix == ".safetensors":
            others = [key for key, value in weights.items() if getattr(value, "layout", None) is not torch.strided]
            if others:
                raise ConfigError(
                    f"{chosen} holds {', '.join(map(str, others))}, which is no dense tensor: safetensors stores these alone; "
                    "export to .pt instead"
                )
            tensors = {key: value.contiguous() for key, value in weights.items()}
            _safetensors(str(path)).save_file(tensors, str(partial))
        else:
            torch.save(weights, partial)
    return chosen


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which takes the place of `path` once it is complete."""
    partial = path.parent / f".{path.name}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except ConfigError:
        raise
    except Exception as error:  # torch.save raises RuntimeError, and safetensors its own
        raise ConfigError(
            f"the weights can't be written to {path}: {error}; give the path of a file, model.pt"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _only_model(state: Mapping[str, Any]) -> str:
    """Return the only state that looks like a model's: a flat dict of tensors."""
    found = [
        name
        for name, values in state.items()
        if isinstance(values, Mapping) and values and all(isinstance(value, torch.Tensor) for value in values.values())
    ]
    if len(found) != 1:
        raise CheckpointError(f"the checkpoint holds {', '.join(sorted(state))}; say which with --name")
    return found[0]


def _safetensors(path: str) -> Any:
    try:
        from safetensors import torch as safetensors_torch
    except ImportError as error:
        raise ConfigError(f"writing {path} needs safetensors: pip install 'evenload[safetensors]'") from error
    return safetensors_torch


def pick_model(model: nn.Module | None, prepared: Sequence[nn.Module]) -> nn.Module:
    """Return `model`, or the only prepared one; ConfigError if none or several are prepared."""
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError(
            f"run.export received a {type(model).__name__} as the model; the path comes first: run.export(path, model)"
        )
    if model is not None:
        return model
    if len(prepared) != 1:
        raise ConfigError(f"run.export: {len(prepared)} models are prepared; say which: run.export(path, model)")
    return prepared[0]
