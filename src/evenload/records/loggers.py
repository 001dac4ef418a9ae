"""Other places for metrics, by their own libraries: TensorBoard.

Evenload's own figures get names of their own; ``loss`` is written once, the user's where they log it.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from evenload.errors import ConfigError
from evenload.records.summary import summarise
from evenload.records.values import SEGMENTS, StepRecord


class Logger(Protocol):
    """One further place for metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes what the user gave to `run.log`."""

    def step(self, record: StepRecord, logged: Mapping[str, float]) -> None:
        """Takes a committed step; ``logged`` names what `log` has already written for it."""

    def close(self) -> None:
        """Writes everything and lets go of the files."""


def check_loggers(names: tuple[str, ...]) -> None:
    """Checks without importing anything that the loggers can be opened; the same on every rank.

    Raises:
        ConfigError: an unknown name, or its package is missing.
    """
    for name in names:
        if name not in _OPENERS:
            raise ConfigError(f"there is no logger {name!r}; expected some of {', '.join(sorted(_OPENERS))}")
        if importlib.util.find_spec(name) is None:
            raise _missing(name)


def open_loggers(names: tuple[str, ...], folder: Path) -> tuple[Logger, ...]:
    """Opens the loggers of a run folder.

    Raises:
        ConfigError: as `check_loggers`, or the package doesn't import.
    """
    check_loggers(names)
    return tuple(_OPENERS[name](folder) for name in names)


class TensorBoard:
    """Event files in ``<run folder>/tensorboard``, written by tensorboard's own record writer; needs no torch.

    A sitting that begins where an earlier one has left event files first writes a session start at its first step,
    which makes TensorBoard drop the points of steps that are done again.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._event_pb = importlib.import_module("tensorboard.compat.proto.event_pb2")
            self._summary_pb = importlib.import_module("tensorboard.compat.proto.summary_pb2")
            writer = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ImportError as error:
            raise _missing("tensorboard") from error
        target = folder / "tensorboard"
        target.mkdir(parents=True, exist_ok=True)
        earlier = sorted(target.glob("events.out.tfevents.*"))
        self._restart = bool(earlier)
        self._names: set[str] = set()
        now = time.time()
        # TensorBoard reads the files of a folder in the order of their names, which begin with whole seconds.
        path = target / f"events.out.tfevents.{int(now):010d}.evenload.{len(earlier):04d}"
        self._file = path.open("wb")
        self._writer = writer.RecordWriter(self._file)
        self._write(self._event_pb.Event(wall_time=now, file_version="brain.Event:2"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes the user's metrics under their own names."""
        self._names.update(metrics)
        self._scalars(metrics, step, time.time())

    def step(self, record: StepRecord, logged: Mapping[str, float]) -> None:
        """Writes loss, throughput, and for each rank share, busy, memory and seconds."""
        summary = summarise([record])
        scalars = {name: value for name, value in record.metrics.items() if name not in logged}
        if "loss" not in self._names:
            scalars["loss"] = record.loss
        scalars["evenload/samples_per_s"] = summary.samples_per_s
        scalars["evenload/step_s"] = record.seconds
        scalars["evenload/busy"] = summary.busy
        for index, rank in enumerate(record.ranks):
            scalars[f"share/rank{index}"] = record.shares[index]
            scalars[f"memory_bytes/rank{index}"] = rank.memory_bytes
            for name in SEGMENTS:
                scalars[f"{name}/rank{index}"] = getattr(rank, name)
        self._scalars(scalars, record.step, record.time)

    def close(self) -> None:
        """Closes the event file."""
        self._file.close()

    def _scalars(self, scalars: Mapping[str, float], step: int, wall_time: float) -> None:
        if self._restart:
            self._restart = False
            start = self._event_pb.SessionLog(status=self._event_pb.SessionLog.START)
            self._write(self._event_pb.Event(wall_time=wall_time, step=step, session_log=start))
        values = [self._summary_pb.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = self._event_pb.Event(wall_time=wall_time, step=step, summary=self._summary_pb.Summary(value=values))
        self._write(event)

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()


def _missing(name: str) -> ConfigError:
    return ConfigError(
        f"loggers={name!r} is set, but the package {name} can't be imported here; "
        f"pip install 'evenload[{name}]', or leave the logger out"
    )


_OPENERS: dict[str, Callable[[Path], Logger]] = {"tensorboard": TensorBoard}
