"""Write and read checkpoints on disk, atomically, through torch.distributed.checkpoint.

A checkpoint is the folder ``checkpoints/step-00000400`` in the run folder. It is written under another name and renamed when
complete, so a reader never sees half of one. Tensors go through torch.distributed.checkpoint; everything else (the structure
of the state, numbers, text) is one small file beside them, read with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import collections
import contextlib
import io
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from evenload.errors import CheckpointError
from evenload.records.checkpoints import checkpoint_folders, step_folder, write_info
from evenload.records.checkpoints import step_of as step_of

SKELETON = "skeleton.pt"
_SCHEMA = 1
_TENSOR = "__tensor__"
_ALIGNMENT = 64
"""Bytes; each tensor of a state that is sent begins at a multiple."""
_SAFE_GLOBALS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    collections.Counter,
    collections.defaultdict,
    collections.OrderedDict,
]


def write(folder: Path, step: int, state: Mapping[str, Any], info: Mapping[str, Any] | None = None) -> Path:
    """Write the checkpoint of step `step` into a run folder, and return the checkpoint's folder.

    `info` is for `evenload show`; see records/checkpoints.py.

    Raises:
        CheckpointError: A write failed, or the state holds values that can't be saved.
    """
    target = step_folder(folder, step)
    partial = target.with_name(f".{target.name}.partial")
    aside = target.with_name(f".{target.name}.before")
    tensors: dict[str, torch.Tensor] = {}
    skeleton = {"schema": _SCHEMA, "step": step, "state": _split(state, tensors)}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_skeleton(skeleton, partial, target)
        write_info(partial, {"step": step, "time": time.time(), **(info or {})})
        if tensors:
            with _without_process_group():
                save(tensors, checkpoint_id=partial / "tensors", no_dist=True)
        if target.exists():  # renamed, not removed: the newest checkpoint must survive a crash here
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        partial.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch's writers raise all three on a full disk
        raise CheckpointError(f"the checkpoint {target} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def newest(folder: Path) -> Path | None:
    return next(reversed(checkpoint_folders(folder)), None)


def update_values(checkpoint: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Change plain values in the states of registered objects, by name; CheckpointError if the file is unusable."""
    skeleton = _read_skeleton(checkpoint)
    for name, values in changes.items():
        skeleton["state"][name].update(values)
    partial = checkpoint / f".{SKELETON}.partial"
    try:
        torch.save(skeleton, partial)
        partial.replace(checkpoint / SKELETON)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint {checkpoint} can't be written: {error}") from error


def read(checkpoint: Path) -> dict[str, Any]:
    """Read a whole checkpoint, tensors on the CPU; CheckpointError if it is missing, damaged, or of another schema."""
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
            with _without_process_group():
                load(tensors, checkpoint_id=checkpoint / "tensors", no_dist=True)
        state: dict[str, Any] = _join(skeleton["state"], tensors)
    except (Exception, CheckpointException) as error:  # a torn file may raise anything, pickle's errors too
        raise _unreadable(checkpoint, error) from error
    return state


def map_state(
    state: Any, leaf: Callable[[Any, str], Any], is_leaf: Callable[[Any], bool] = lambda _: False, path: str = ""
) -> Any:
    """Return nested dicts, lists and tuples with ``leaf(value, path)`` in place of each value in them."""
    if is_leaf(state):
        return leaf(state, path)
    if isinstance(state, Mapping):
        items = {key: map_state(value, leaf, is_leaf, f"{path}/{key}") for key, value in state.items()}
        return items if type(state) is dict else _like(state, items)
    if isinstance(state, list | tuple):
        parts = [map_state(value, leaf, is_leaf, f"{path}/{index}") for index, value in enumerate(state)]
        return parts if isinstance(state, list) else tuple(parts)
    return leaf(state, path)


def to_bytes(state: Any) -> torch.Tensor:
    """Return a copy of a state as bytes, which share no memory with it: a small file, then the tensors as they lie in memory."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _split(state, tensors, _is_dense)
    layouts: dict[str, tuple[Any, ...]] = {}
    num_bytes = 0
    for path, tensor in tensors.items():
        # A dense one keeps its order of dimensions (channels_last).
        stride = torch.empty_like(tensor, device="meta").stride()
        layouts[path] = tensor.dtype, tuple(tensor.shape), stride, num_bytes
        num_bytes += _aligned(tensor.numel() * tensor.element_size())
    file = io.BytesIO()
    torch.save({"state": skeleton, "layouts": layouts}, file)
    head = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    start = _ALIGNMENT + _aligned(head.numel())
    payload = torch.empty(start + num_bytes, dtype=torch.uint8)
    payload[:8].view(torch.int64).fill_(head.numel())
    payload[_ALIGNMENT : _ALIGNMENT + head.numel()] = head
    for path, tensor in tensors.items():
        _view(payload[start:], *layouts[path]).copy_(tensor)
    return payload


def from_bytes(payload: torch.Tensor) -> Any:
    """Read the state of `to_bytes`, its tensors on the CPU; they share no memory with the bytes."""
    length = int(payload[:8].view(torch.int64))
    found = _load(io.BytesIO(payload[_ALIGNMENT : _ALIGNMENT + length].numpy().tobytes()))
    data = payload[_ALIGNMENT + _aligned(length) :]
    return _join(found["state"], {path: _view(data, *layout).clone() for path, layout in found["layouts"].items()})


def _view(data: torch.Tensor, dtype: torch.dtype, shape: Any, stride: Any, offset: int) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    return data[offset : offset + num_bytes].view(dtype).as_strided(shape, stride)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _is_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _unreadable(checkpoint: Path, error: BaseException) -> CheckpointError:
    what = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"the checkpoint {checkpoint} is incomplete or damaged ({type(error).__name__}: {what}); remove it to "
        "resume from an older one"
    )


@contextlib.contextmanager
def _without_process_group() -> Iterator[None]:
    """Suppress torch's warning: one rank reads or writes alone on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to", category=UserWarning)
        yield


def _write_skeleton(skeleton: Mapping[str, Any], folder: Path, target: Path) -> None:
    """Write the file and read it back, so that an unloadable state is an error now and not at the resume."""
    try:
        torch.save(skeleton, folder / SKELETON)
        _load(folder / SKELETON)
    except OSError:
        raise
    except Exception as error:  # pickle raises errors of many types for what it refuses
        raise CheckpointError(
            f"the state for {target} holds values that can't be saved and loaded safely: {error}; keep tensors, numbers, "
            "text, lists, tuples and dicts in a state_dict"
        ) from error


def _read_skeleton(checkpoint: Path) -> dict[str, Any]:
    try:
        skeleton: dict[str, Any] = _load(checkpoint / SKELETON)
        return skeleton
    except FileNotFoundError as error:
        raise CheckpointError(f"{checkpoint} is not a checkpoint: {error}; move it away") from error
    except Exception as error:
        raise _unreadable(checkpoint, error) from error


def _load(source: Path | io.BytesIO) -> Any:
    with torch.serialization.safe_globals(_SAFE_GLOBALS):
        return torch.load(source, map_location="cpu", weights_only=True)


def _split(state: Any, tensors: dict[str, torch.Tensor], moves: Callable[[torch.Tensor], bool] = lambda _: True) -> Any:
    """Move the tensors of a state to `tensors`, by path, and return the state with a mark in each one's place.

    Those for which `moves` is False stay.
    """

    def leaf(value: Any, path: str) -> Any:
        if not isinstance(value, torch.Tensor) or not moves(value):
            return value
        tensors[path] = value.detach()
        return (_TENSOR, path)

    return map_state(state, leaf)


def _join(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `_split`."""
    return map_state(skeleton, lambda value, _: tensors[value[1]] if _is_mark(value) else value, _is_mark)


def _is_mark(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] == _TENSOR


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(mapping, collections.Counter):
        return collections.Counter(items)
    return collections.OrderedDict(items) if isinstance(mapping, collections.OrderedDict) else items
