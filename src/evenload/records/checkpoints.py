"""The checkpoints of a run folder: their names, and `best.json` beside them; read without torch."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from evenload.atomic_file import write_atomically
from evenload.records.integrity import find_damage, read_info

CHECKPOINT_FOLDER = "checkpoints"
BEST_FILE = "best.json"
"""Beside the checkpoints: the step of the best one, and its metric."""
_PREFIX = "step-"
_CHECKED_BYTES = 1 << 30
"""Contents of more are not compared for a list, which should take a second."""


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
    """The newest that is not damaged: a resume takes it."""
    is_best: bool
    metric: str
    """Name of the metric by which the best is chosen; empty if none was logged for these weights."""
    value: float | None
    folder: str
    damage: str
    """The damage of its files; empty if they are as they were written, or an earlier version wrote no checksums."""


def step_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINT_FOLDER / f"{_PREFIX}{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first; other names, such as a user's copy, are ignored."""
    found = (run / CHECKPOINT_FOLDER).glob(f"{_PREFIX}*")
    return sorted(filter(is_step_folder, found), key=step_of)


def is_step_folder(path: Path) -> bool:
    return path.name.startswith(_PREFIX) and path.name.removeprefix(_PREFIX).isdecimal()


def read_best(run: Path) -> BestCheckpoint | None:
    """Return the best checkpoint, the best one that is left if that is gone; None if none was chosen or is left."""
    try:
        row = json.loads((run / CHECKPOINT_FOLDER / BEST_FILE).read_text())
        best = BestCheckpoint(int(row["step"]), str(row["metric"]), str(row["mode"]), float(row["value"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if step_folder(run, best.step).is_dir():
        return best
    infos = [(step_of(folder), read_info(folder)) for folder in checkpoint_folders(run)]
    left = [replace(best, step=step, value=float(i["value"])) for step, i in infos if i.get("metric") == best.metric]
    return (min if best.mode == "min" else max)(left, key=lambda found: found.value, default=None)


def write_best(run: Path, best: BestCheckpoint) -> None:
    write_atomically(run / CHECKPOINT_FOLDER / BEST_FILE, json.dumps(vars(best)))


def list_checkpoints(run: Path) -> tuple[CheckpointInfo, ...]:
    """Return the checkpoints of a run folder, oldest first. The contents of the newest ones are compared with their checksums."""
    best = read_best(run)
    rows: list[CheckpointInfo] = []
    checked_bytes = 0
    for folder in reversed(checkpoint_folders(run)):
        try:
            info, written_s = read_info(folder), folder.lstat().st_mtime
            stats = [(str(path), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
            size = sum(stat.st_size for _, stat in stats)
            checked_bytes += size
            files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
            damage = _damage(folder, checked_bytes <= _CHECKED_BYTES, files)
        except PermissionError as error:
            size, damage = 0, f"it can't be read: {error.strerror}"
        except OSError:  # removed meanwhile by the run, which keeps the newest
            continue
        value = info.get("value")
        rows.append(
            CheckpointInfo(
                step=step_of(folder),
                epoch=info.get("epoch"),
                time=float(info.get("time", written_s)),
                size_bytes=size,
                is_last=not damage and not any(row.is_last for row in rows),
                is_best=best is not None and best.step == step_of(folder),
                metric=str(info.get("metric", "")),
                value=float(value) if isinstance(value, int | float) and math.isfinite(value) else None,
                folder=str(folder),
                damage=damage,
            )
        )
    return tuple(reversed(rows))


@functools.lru_cache(maxsize=64)
def _damage(folder: Path, contents: bool, files: tuple[tuple[str, int, int], ...]) -> str:
    """Return `find_damage`, which a live view need not repeat while names, sizes and times of the `files` stay."""
    return find_damage(folder, contents=contents)
