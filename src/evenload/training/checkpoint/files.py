"""Checkpoints on disk, through torch.distributed.checkpoint: complete or not there at all.

A checkpoint is the folder ``checkpoints/step-00000400`` in the run folder. It is written beside its place and renamed when
complete, so a reader never sees half of one. Tensors go through torch.distributed.checkpoint; everything else (the shape of
the state, numbers, text) is one small file beside them, read with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import collections
import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from evenload.errors import CheckpointError

FOLDER = "checkpoints"
SKELETON = "skeleton.pt"
_SCHEMA = 1
SAFE: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    collections.Counter,
    collections.defaultdict,
    collections.OrderedDict,
]


def write(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Writes one checkpoint.

    Args:
        folder: the run folder.
        step: steps committed; names the checkpoint.
        state: nested dicts, lists and tuples of tensors and plain values.

    Raises:
        CheckpointError: the disk refuses, or the state holds something that can't be saved.
    """
    target = folder / FOLDER / f"step-{step:08d}"
    partial = target.with_name(f".{target.name}.partial")
    aside = target.with_name(f".{target.name}.before")
    tensors: dict[str, torch.Tensor] = {}
    skeleton = {"schema": _SCHEMA, "step": step, "state": _split(state, "", tensors)}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_skeleton(skeleton, partial, target)
        if tensors:
            with _alone():
                save(tensors, checkpoint_id=partial / "tensors", no_dist=True)
        if target.exists():  # put aside, not taken away: the newest one must not be missing if we die here
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        partial.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch's own writers raise all three on a full disk
        raise CheckpointError(f"the checkpoint {target} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, if there is one."""
    # By number, and nothing else: a copy that somebody put beside them ("step-00000400.bak") is not ours.
    found = [path for path in (folder / FOLDER).glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The steps that were committed when it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def amend(checkpoint: Path, name: str, values: Mapping[str, Any]) -> None:
    """Changes plain values in the state of the object registered as `name`, and leaves all tensors as they are.

    Raises:
        CheckpointError: it can't be read or written.
    """
    skeleton = _read_skeleton(checkpoint)
    skeleton["state"][name].update(values)
    partial = checkpoint / f".{SKELETON}.partial"
    try:
        torch.save(skeleton, partial)
        partial.replace(checkpoint / SKELETON)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint {checkpoint} can't be written: {error}") from error


def read(checkpoint: Path) -> dict[str, Any]:
    """Reads a checkpoint whole, tensors on the CPU.

    Raises:
        CheckpointError: it is missing, torn, or of another schema.
    """
    skeleton = _read_skeleton(checkpoint)
    if skeleton.get("schema") != _SCHEMA:
        raise CheckpointError(f"{checkpoint} has schema {skeleton.get('schema')}; this version reads {_SCHEMA}")
    tensors: dict[str, torch.Tensor] = {}
    try:
        if (checkpoint / "tensors").exists():
            metadata = FileSystemReader(checkpoint / "tensors").read_metadata()
            for key, entry in metadata.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            with _alone():
                load(tensors, checkpoint_id=checkpoint / "tensors", no_dist=True)
        state: dict[str, Any] = _join(skeleton["state"], tensors)
    except (Exception, CheckpointException) as error:  # a torn file may raise anything, pickle's errors too
        raise _unreadable(checkpoint, error) from error
    return state


def _unreadable(checkpoint: Path, error: BaseException) -> CheckpointError:
    what = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"the checkpoint {checkpoint} can't be read, it is torn or damaged ({type(error).__name__}: {what}); remove it to "
        "resume from an older one"
    )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One rank reads or writes for itself, on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to", category=UserWarning)
        yield


def _write_skeleton(skeleton: Mapping[str, Any], folder: Path, target: Path) -> None:
    """Writes it and reads it back: what can't be loaded must be told now, not at the resume."""
    try:
        torch.save(skeleton, folder / SKELETON)
        _load_skeleton(folder)
    except OSError:
        raise
    except Exception as error:  # pickle raises errors of many types for what it refuses
        raise CheckpointError(
            f"the state for {target} holds values that can't be saved and loaded safely: {error}; keep tensors, numbers, "
            "text, lists, tuples and dicts in a state_dict"
        ) from error


def _read_skeleton(checkpoint: Path) -> dict[str, Any]:
    try:
        return _load_skeleton(checkpoint)
    except FileNotFoundError as error:
        raise CheckpointError(f"{checkpoint} is not a checkpoint: {error}; move it away") from error
    except Exception as error:
        raise _unreadable(checkpoint, error) from error


def _load_skeleton(folder: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals(SAFE):
        skeleton: dict[str, Any] = torch.load(folder / SKELETON, weights_only=True)
    return skeleton


def _split(state: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        tensors[path] = state.detach()
        return ("__tensor__", path)
    if isinstance(state, Mapping):
        items = {key: _split(value, f"{path}/{key}", tensors) for key, value in state.items()}
        return items if type(state) is dict else _like(state, items)
    if isinstance(state, list | tuple):
        parts = [_split(value, f"{path}/{index}", tensors) for index, value in enumerate(state)]
        return parts if isinstance(state, list) else tuple(parts)
    return state


def _join(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(skeleton, tuple) and len(skeleton) == 2 and skeleton[0] == "__tensor__":
        return tensors[skeleton[1]]
    if isinstance(skeleton, Mapping):
        items = {key: _join(value, tensors) for key, value in skeleton.items()}
        return items if type(skeleton) is dict else _like(skeleton, items)
    if isinstance(skeleton, list | tuple):
        parts = [_join(value, tensors) for value in skeleton]
        return parts if isinstance(skeleton, list) else tuple(parts)
    return skeleton


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(mapping, collections.Counter):
        return collections.Counter(items)
    return collections.OrderedDict(items) if isinstance(mapping, collections.OrderedDict) else items
