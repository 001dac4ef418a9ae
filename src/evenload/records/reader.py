"""Readers of a run folder, also while the run writes to it."""

from __future__ import annotations

import dataclasses
import heapq
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from evenload.errors import ConfigError
from evenload.records.lines import EVENTS_FILE, STEPS_FILE, parse_line
from evenload.records.values import LateMetrics, Record, RunEvent, StepRecord

_BLOCK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 18
"""Holds the newest steps."""


def is_run(folder: Path) -> bool:
    return (folder / EVENTS_FILE).is_file() or (folder / STEPS_FILE).is_file()


def find_run(path: Path) -> tuple[Path, int]:
    """Return the folder itself, or the newest run directly below it, and the number of runs found.

    Raises `ConfigError` if there is none.
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise ConfigError(f"{path}: expected a run folder, found {found}; give the project_dir of a run")
    if is_run(path):
        return path, 1
    runs = [child for child in path.iterdir() if child.is_dir() and is_run(child)]
    if not runs:
        raise ConfigError(
            f"{path}: found no {EVENTS_FILE} or {STEPS_FILE} in it or directly below it; give the project_dir of a run"
        )
    return max(runs, key=_modified_s), len(runs)


def read_events(folder: Path) -> list[RunEvent]:
    return [record for record in _read(folder / EVENTS_FILE) if isinstance(record, RunEvent)]


def last_step_in(folder: Path, since_s: float = 0.0) -> int:
    """Return the newest step of training that the records hold, of those written since then (since 1970); -1 without one."""
    try:
        with (folder / STEPS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            found = map(parse_line, file.read().splitlines())
            steps = (record for record in found if isinstance(record, StepRecord) and not record.arm)
            return max((record.step for record in steps if record.time >= since_s), default=-1)
    except OSError:
        return -1


def read_steps(folder: Path, is_wanted: Callable[[float], bool] | None = None) -> list[StepRecord]:
    """Read the steps of a run, each once, with all metrics logged for them; only those that `is_wanted` by their time.

    A resume from an older checkpoint repeats steps; the repeated ones replace those that the resume discarded.
    """
    steps: dict[tuple[str, int], StepRecord] = {}
    newest: dict[str, int] = {}
    for record in _read(folder / STEPS_FILE):
        if is_wanted is not None and not is_wanted(record.time):
            continue
        if isinstance(record, StepRecord):
            for lost in range(record.step, newest.get(record.arm, -1) + 1):
                steps.pop((record.arm, lost), None)
            newest[record.arm] = record.step
            steps[record.arm, record.step] = record
        elif isinstance(record, LateMetrics):
            key = next((key for key in ((arm, record.step) for arm in newest) if key in steps), None)
            if key is not None:
                steps[key] = dataclasses.replace(steps[key], metrics={**steps[key].metrics, **record.metrics})
    return list(steps.values())


class RecordTail:
    """Return records as another process appends them to a run folder, which need not exist yet.

    A line is read once its newline is written; a line cut short by a crash is skipped. A folder that was moved aside and
    created again (`--fresh`) is read from its beginning. Records older than ``since_s`` (since 1970) are skipped.
    """

    def __init__(self, folder: Path, since_s: float | None = None) -> None:
        self.folder = folder
        since_s = -float("inf") if since_s is None else since_s
        self._tails = (_FileTail(folder / EVENTS_FILE, since_s), _FileTail(folder / STEPS_FILE, since_s))

    @property
    def is_replaced(self) -> bool:
        """True if the folder holds another run than the records that were read."""
        return any(tail.is_replaced for tail in self._tails)

    def poll(self) -> list[Record]:
        """Return the records since the last call in the order of their times."""
        return list(self.stream())

    def stream(self) -> Iterator[Record]:
        """Yield what `poll` returns, one line in memory at a time, for runs of any length."""
        return heapq.merge(*(tail.stream() for tail in self._tails), key=lambda record: record.time)


class _FileTail:
    def __init__(self, path: Path, since_s: float) -> None:
        self._path = path
        self._since_s = since_s
        self._offset = 0
        self._inode = -1

    @property
    def is_replaced(self) -> bool:
        try:
            return self._inode != -1 and self._is_other(self._path.stat())
        except OSError:
            return False

    def _is_other(self, state: os.stat_result) -> bool:
        return state.st_ino != self._inode or state.st_size < self._offset

    def stream(self) -> Iterator[Record]:
        try:
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                if self._is_other(state):
                    self._inode = state.st_ino
                    self._offset = self._first_offset(file.fileno(), state.st_size)
                if state.st_size == self._offset:
                    return
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    record = parse_line(line)
                    if record is not None and record.time >= self._since_s:
                        yield record
        except FileNotFoundError:
            return

    def _first_offset(self, file: int, size: int) -> int:
        """Find the start of a line before which everything is older than ``since_s``, searching back from the end."""
        if self._since_s == -float("inf"):
            return 0
        low = size
        while low > 0:
            low = max(0, low - _BLOCK_BYTES)
            start = 0
            block = os.pread(file, _BLOCK_BYTES, low)
            if low > 0:
                start = block.find(b"\n") + 1
                if start == 0:
                    continue
            for line in block[start:].splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                record = parse_line(line)
                if record is not None:
                    if record.time < self._since_s:
                        return low + start
                    break
                start += len(line)
        return 0


def _read(path: Path) -> Iterator[Record]:
    try:
        with path.open("rb") as file:
            for line in file:
                record = parse_line(line) if line.endswith(b"\n") else None
                if record is not None:
                    yield record
    except FileNotFoundError:
        return


def _modified_s(folder: Path) -> float:
    files = (folder / EVENTS_FILE, folder / STEPS_FILE)
    return max(path.stat().st_mtime for path in files if path.exists())
