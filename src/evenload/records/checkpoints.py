"""The checkpoints of a run folder: their names, `info.json` beside each, and `best.json`; read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.atomic_file import write_atomically

CHECKPOINT_FOLDER = "checkpoints"
INFO_FILE = "info.json"
"""In a checkpoint's folder: step, epoch, time, and the metric by which the best is chosen."""
BEST_FILE = "best.json"
"""Beside the checkpoints: the step of the best one, and its metric."""
_PREFIX = "step-"


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint of a run so far."""

    step: int
    metric: str
    mode: str
    """``min`` or ``max``."""
    value: float

    def is_beaten_by(self, value: float) -> bool:
        return value < self.value if self.mode == "min" else value > self.value


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint, as `evenload show` lists it. Of one that an earlier version wrote, epoch is None."""

    step: int
    epoch: int | None
    time: float
    """When it was written, in seconds since 1970."""
    size_bytes: int
    is_last: bool
    is_best: bool
    metric: str
    """Name of the metric by which the best is chosen; empty if none was logged for these weights."""
    value: float | None
    folder: str


def step_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINT_FOLDER / f"{_PREFIX}{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first; other names, such as a user's copy, are ignored."""
    found = (run / CHECKPOINT_FOLDER).glob(f"{_PREFIX}*")
    return sorted((path for path in found if path.name.removeprefix(_PREFIX).isdecimal()), key=step_of)


def read_best(run: Path) -> BestCheckpoint | None:
    """Return the best checkpoint; None if none was chosen, or it is gone."""
    try:
        row = json.loads((run / CHECKPOINT_FOLDER / BEST_FILE).read_text())
        best = BestCheckpoint(int(row["step"]), str(row["metric"]), str(row["mode"]), float(row["value"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return best if step_folder(run, best.step).is_dir() else None


def write_best(run: Path, best: BestCheckpoint) -> None:
    write_atomically(run / CHECKPOINT_FOLDER / BEST_FILE, json.dumps(vars(best)))


def read_info(checkpoint: Path) -> dict[str, Any]:
    """Return what `write_info` wrote; empty for a checkpoint without it."""
    try:
        row = json.loads((checkpoint / INFO_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def write_info(checkpoint: Path, info: Mapping[str, Any]) -> None:
    write_atomically(checkpoint / INFO_FILE, json.dumps(dict(info)))


def list_checkpoints(run: Path) -> tuple[CheckpointInfo, ...]:
    """Return the checkpoints of a run folder, oldest first."""
    folders, best = checkpoint_folders(run), read_best(run)
    rows = []
    for folder in folders:
        try:
            info, written_s = read_info(folder), folder.stat().st_mtime
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        except OSError:  # removed meanwhile by the run, which keeps the newest
            continue
        value = info.get("value")
        rows.append(
            CheckpointInfo(
                step=step_of(folder),
                epoch=info.get("epoch"),
                time=float(info.get("time", written_s)),
                size_bytes=size,
                is_last=folder == folders[-1],
                is_best=best is not None and best.step == step_of(folder),
                metric=str(info.get("metric", "")),
                value=float(value) if isinstance(value, int | float) and math.isfinite(value) else None,
                folder=str(folder),
            )
        )
    return tuple(rows)
