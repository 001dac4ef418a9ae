"""Write and read checkpoints on disk, atomically, through torch.distributed.checkpoint.

A checkpoint is the folder ``checkpoints/step-00000400`` in the run folder. It is written under another name, forced to the disk
and renamed when complete, so a reader never sees half of one. Tensors go through torch.distributed.checkpoint; everything else
(structure, numbers, text, sparse, nested and quantized tensors) is one small file, read with `torch.load(weights_only=True)`.
`info.json` has the checksums of both (records/integrity.py).
"""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from evenload.errors import CheckpointError, DamagedError, UnwritableError
from evenload.job.output import FULL_DISK_ERRORS
from evenload.records import integrity
from evenload.records.checkpoints import BEST_FILE, CHECKPOINT_FOLDER, checkpoint_folders, is_step_folder, step_folder
from evenload.records.checkpoints import step_of as step_of

SKELETON = "skeleton.pt"
_SCHEMAS = (1, integrity.SCHEMA)
_READS = f"this version reads {' and '.join(map(str, _SCHEMAS))}"
_TENSOR = "__tensor__"
_ALIGNMENT = 64
"""Bytes; each tensor of a state that is sent begins at a multiple."""
_SAFE_GLOBALS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    collections.Counter,
    collections.defaultdict,
    collections.OrderedDict,
]


@dataclass(frozen=True)
class PackedState:
    """A state, ready to be written: its plain values can't change any more."""

    skeleton: bytes
    """Contents of the small file."""
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return len(self.skeleton) + sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def pack(step: int, state: Mapping[str, Any]) -> PackedState:
    """Pack the state of step `step`; the tensors are the live ones. CheckpointError if it holds values that can't be saved."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = {"schema": integrity.SCHEMA, "step": step, "state": _split(state, tensors, _has_storage)}
    file = io.BytesIO()
    try:
        if without := next((path for path, tensor in tensors.items() if tensor.is_meta), None):
            raise ValueError(f"{without[1:]} is on the device meta, where it has no values")
        torch.save(skeleton, file)
        file.seek(0)
        _load(file)  # an unloadable state is an error now and not at the resume
    except Exception as error:  # pickle raises errors of many types for what it refuses
        raise CheckpointError(
            f"the state of step {step} holds values that can't be saved and loaded safely: {error}; keep tensors, numbers, "
            "text, lists, tuples and dicts in a state_dict"
        ) from error
    return PackedState(file.getvalue(), tensors)


def open_folder(folder: Path) -> None:
    """Make the folder of a run's checkpoints; UnwritableError if none can be written there."""
    target = folder / CHECKPOINT_FOLDER
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not os.access(target, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, "no permission to write there")
    except OSError as error:
        raise _unwritable(target, error) from error


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise UnwritableError if a checkpoint of this size can't be written into a run folder, before any of it is."""
    target = folder / CHECKPOINT_FOLDER
    if (free_bytes := shutil.disk_usage(target).free) < num_bytes:
        needs, free = (f"{size / 2**20:,.1f} MiB" for size in (num_bytes, free_bytes))
        raise _unwritable(target, OSError(errno.ENOSPC, f"no space left: it needs {needs}, and {free} are free"))


def write(
    folder: Path, step: int, state: Mapping[str, Any] | PackedState, info: Mapping[str, Any] | None = None
) -> int:
    """Write the checkpoint of step `step` into a run folder, and return its bytes.

    `info` is for `evenload show`; see records/integrity.py.

    Raises:
        UnwritableError: A write failed. Nothing of this checkpoint is left; the others are as they were.
    """
    packed = state if isinstance(state, PackedState) else pack(step, state)
    target = step_folder(folder, step)
    partial = target.with_name(f".{target.name}.partial")
    aside = target.with_name(f".{target.name}.before")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / SKELETON).write_bytes(packed.skeleton)
        if packed.tensors:
            _write_tensors(packed.tensors, partial / "tensors")
        num_bytes = integrity.seal(partial, {"step": step, "time": time.time(), **(info or {})})
        if target.exists():  # renamed, not removed: the newest checkpoint must survive a crash here (`clean_up`)
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        partial.rename(target)
        integrity.sync(target.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch's writers raise all three on a full disk
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_bytes


def clean_up(folder: Path) -> None:
    """Remove what a process that was killed while it wrote left in a run folder; put back what it was about to replace."""
    checkpoints = folder / CHECKPOINT_FOLDER
    with contextlib.suppress(OSError):
        for path in [*checkpoints.glob(".step-*.*"), *checkpoints.glob(f".{BEST_FILE}.*")]:
            target = path.with_name(path.name[1:].rpartition(".")[0])
            if path.suffix == ".before" and not target.exists():
                path.rename(target)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def set_aside(damaged: Iterable[tuple[Path, str]]) -> None:
    """Rename damaged checkpoints, so that they count no more and can still be examined."""
    for path, _ in damaged:
        aside = path.with_name(f"{path.name}.damaged")
        with contextlib.suppress(OSError):
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def newest(folder: Path) -> Path | None:
    return next(reversed(checkpoint_folders(folder)), None)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest checkpoint of a run that is complete."""

    folder: Path
    state: dict[str, Any]
    damaged: tuple[tuple[Path, str], ...]
    """Newer ones, with what is wrong with them."""

    def report(self) -> str:
        """Return which one was taken and which were not; empty if none is damaged."""
        if not self.damaged:
            return ""
        newer = "; ".join(f"{path.name}: {why}" for path, why in self.damaged)
        return f"DAMAGED CHECKPOINT: {newer}; taking the newest complete one, {self.folder.name}"


def read_newest(folder: Path) -> FoundCheckpoint | None:
    """Read the newest complete checkpoint of a run folder; None if it has no checkpoint.

    Raises:
        CheckpointError: all are damaged, or one that is newer than the complete ones needs a newer Evenload or can't be read.
    """
    damaged: list[tuple[Path, str]] = []
    for checkpoint in reversed(checkpoint_folders(folder)):
        try:
            return FoundCheckpoint(checkpoint, read(checkpoint), tuple(damaged))
        except DamagedError as error:
            damaged.append((checkpoint, str(error)))
    if damaged:
        others = "".join(f"\n  {why}" for _, why in damaged[1:])
        raise DamagedError(
            f"{damaged[0][1]}{others}\nthere is no complete checkpoint in {folder}; copy one there, or start anew with --fresh"
        )
    return None


def update_values(checkpoint: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Change plain values in the states of registered objects, by name; CheckpointError if the file is unusable."""
    skeleton = _read_skeleton(checkpoint)
    for name, values in changes.items():
        skeleton["state"][name].update(values)
    file = io.BytesIO()
    partial = checkpoint / f".{SKELETON}.partial"
    try:
        torch.save(skeleton, file)
        partial.write_bytes(file.getbuffer())
        integrity.sync(partial)
        integrity.allow(checkpoint, SKELETON, file.getvalue())
        partial.replace(checkpoint / SKELETON)
        integrity.sync(checkpoint)
    except (OSError, RuntimeError) as error:
        raise _unwritable(checkpoint, error) from error
    finally:
        partial.unlink(missing_ok=True)


def read(checkpoint: Path) -> dict[str, Any]:
    """Read a whole checkpoint, tensors on the CPU.

    Raises:
        DamagedError: a file is missing, torn or changed, or this is no folder.
        CheckpointError: a newer version of Evenload wrote it, or a file can't be read.
    """
    try:
        if not checkpoint.is_dir():
            raise DamagedError(f"{checkpoint} is {'a link to nothing' if checkpoint.is_symlink() else 'no folder'}")
        schema = integrity.read_schema(checkpoint) or _read_skeleton(checkpoint).get("schema")
        if schema not in _SCHEMAS:
            raise CheckpointError(
                f"{checkpoint} has schema {schema}; {_READS}: a newer Evenload wrote it; update Evenload, or start anew with "
                "--fresh"
            )
        info = checkpoint / integrity.INFO_FILE
        missing = "" if info.exists() else f"{info.name} is missing"
        if schema != 1 and (damage := integrity.find_damage(checkpoint) or missing):
            raise DamagedError(_damaged(checkpoint, damage))
        skeleton = _read_skeleton(checkpoint)
        if is_step_folder(checkpoint) and step_of(checkpoint) != skeleton["step"]:
            raise DamagedError(_damaged(checkpoint, f"it holds step {skeleton['step']}"))
        return _read_state(checkpoint, skeleton)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {checkpoint} can't be read: {error}") from error


def _read_state(checkpoint: Path, skeleton: Mapping[str, Any]) -> dict[str, Any]:
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
    except PermissionError:
        raise
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
    skeleton = _split(state, tensors, is_dense)
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


def is_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and _has_storage(tensor)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _damaged(checkpoint: Path, damage: str) -> str:
    with contextlib.suppress(Exception):
        if (schema := _load(checkpoint / SKELETON)["schema"]) not in _SCHEMAS:
            damage += f"; {SKELETON} has schema {schema}; {_READS}"
    return f"the checkpoint {checkpoint} is incomplete or damaged ({damage})"


def _unreadable(checkpoint: Path, error: BaseException) -> DamagedError:
    what = (str(error).splitlines() or [type(error).__name__])[0]
    return DamagedError(_damaged(checkpoint, f"{type(error).__name__}: {what}"))


def _unwritable(target: Path, error: BaseException) -> UnwritableError:
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OSError):  # torch's writer hides the error of the file
        reason = reason.__cause__ or reason.__context__
    shown = reason or error
    text = str(shown).splitlines()[0] if str(shown) else type(shown).__name__
    is_full = isinstance(reason, OSError) and reason.errno in FULL_DISK_ERRORS
    advice = "; free some room there, or keep fewer (keep=1)" if is_full else ""
    return UnwritableError(
        f"the checkpoint {target} can't be written: {text}; those before it are as they were{advice}"
    )


def _write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Do what `torch.distributed.checkpoint.save` does on one rank, whose warning filter is not safe in a thread."""
    planner = DefaultSavePlanner()
    # Copies ahead are for tensors on a GPU; `integrity.seal` forces the files to the disk.
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


@contextlib.contextmanager
def _without_process_group() -> Iterator[None]:
    """Suppress torch's warning: one rank reads or writes alone on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to", category=UserWarning)
        yield


def _read_skeleton(checkpoint: Path) -> dict[str, Any]:
    try:
        return dict(_load(checkpoint / SKELETON))
    except FileNotFoundError as error:
        raise DamagedError(f"{checkpoint} is not a checkpoint: {error}") from error
    except PermissionError:
        raise
    except Exception as error:
        raise _unreadable(checkpoint, error) from error


def _load(source: Path | io.BytesIO) -> Any:
    with torch.serialization.safe_globals(_SAFE_GLOBALS):
        return torch.load(source, map_location="cpu", weights_only=True)


def _split(state: Any, tensors: dict[str, torch.Tensor], moves: Callable[[torch.Tensor], bool]) -> Any:
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
