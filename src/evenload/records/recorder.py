"""Writes what happens: the run folder, the loggers, and plain lines where nobody else shows them."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, StepError
from evenload.records import lines
from evenload.records.console import PlainLines
from evenload.records.loggers.catalogue import check_loggers
from evenload.records.loggers.feeder import Feeder, close_feeders, start_feeders
from evenload.records.values import Event, Logged, Record, StepRecord

CONFIG_FILE = "config.toml"


class Recorder:
    """The one writer of a run folder; a process whose folder is None says and writes nothing.

    Each record is one unbuffered append, so a reader in another process sees it at once and a crash tears at most the
    last line. A folder of an earlier sitting is appended to, never cut; its torn last line is ended first. The events
    ``open`` and ``close`` (without a message) frame a sitting.

    Metrics of `log` become part of the record of their step. Where that is already written (an evaluation after the
    epoch's last step), they follow as a line of their own, which the reader joins to the step.

    Args:
        folder: the run folder, made where it isn't there; None on ranks that write nothing.
        loggers: further places, such as ``"tensorboard"``. They follow the records in threads of their own; one that
            fails is told once and tried again, and never stops training.
        logger_options: for each logger by name, its options.
        hyperparameters: what the loggers are told of the run: its settings.
        console: print plain lines and the messages of events on stdout; for a script started without a launcher.
        log_every_s: seconds between two plain lines.
        total_steps: steps of the whole run, where known; for the time left.

    Raises:
        ConfigError: the folder can't be written, holds records of another schema, or a logger's package is missing
            (this one on every rank).
    """

    def __init__(
        self,
        folder: Path | None,
        loggers: tuple[str, ...] = (),
        console: bool = False,
        log_every_s: float = 10.0,
        total_steps: int | None = None,
        logger_options: Mapping[str, Mapping[str, Any]] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        check_loggers(loggers, logger_options)
        self._folder = folder
        self._lock = threading.Lock()
        self._pending: dict[int, dict[str, float]] = {}
        self._last_step = -1
        self._closed = folder is None
        self._console = PlainLines(log_every_s) if console and folder is not None else None
        self._feeders: tuple[Feeder, ...] = ()
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as opened:  # all of it, or nothing is left open
                self._events = opened.enter_context(contextlib.closing(_AppendOnly(folder / lines.EVENTS_FILE)))
                self._steps = opened.enter_context(contextlib.closing(_AppendOnly(folder / lines.STEPS_FILE)))
                self._feeders = start_feeders(loggers, folder, logger_options or {}, hyperparameters or {}, self._tell)
                opened.pop_all()
        except OSError as error:
            raise ConfigError(
                f"the run folder {folder} can't be written ({error}); set project_dir to a folder that can"
            ) from error
        self.event("open", "", total_steps=total_steps)

    def event(self, kind: str, message: str, step: int | None = None, **fields: Any) -> None:
        """Writes one event; its message, unless empty, is also printed where this recorder prints.

        Args:
            kind: one word for programs, such as ``rebalance``.
            message: one sentence for people.
            step: the global step it belongs to.
            **fields: the same as plain values. Known to the views: ``shares`` (the event is the reason for them),
                ``speeds_per_s`` (of kind ``solo_speeds``), ``total_steps``, ``epoch_steps``, ``devices`` (a name for
                each rank).
        """
        if self._closed:
            return
        event = Event(kind, message, time.time(), step, fields)
        with self._lock:
            self._events.write(lines.event_line(event))
            self._show(event)

    def step(self, record: StepRecord) -> None:
        """Writes one committed step, with what `log` gave for it before; the user's names win over the record's."""
        if self._closed:
            return
        with self._lock:
            logged: dict[str, float] = {}
            if not record.arm:  # a window's step is no training: it neither takes metrics nor ends the wait for them
                logged = self._pending.pop(record.step, {})
                for earlier in [step for step in self._pending if step < record.step]:
                    self._write_logged(Logged(earlier, self._pending.pop(earlier)))
                self._last_step = record.step
            self._steps.write(lines.step_line(record, {**record.metrics, **logged} if logged else record.metrics))
            for feeder in self._feeders:
                feeder.wake()
            self._show(record)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Takes the user's metrics for a step.

        Args:
            metrics: numbers by name, or what turns into one number (a tensor of one element).
            step: the global step they belong to.

        Raises:
            StepError: a value isn't a number; raised on ranks that write nothing, too.
        """
        for name, value in metrics.items():
            if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
                raise _not_a_number(name, value)
        if self._closed:
            return
        numbers = {str(name): _as_float(name, value) for name, value in metrics.items()}
        with self._lock:
            if step > self._last_step:
                self._pending.setdefault(step, {}).update(numbers)
            else:
                self._write_logged(Logged(step, numbers))
                for feeder in self._feeders:
                    feeder.wake()

    def settings(self, table: Mapping[str, Any]) -> None:
        """Writes the resolved settings as `config.toml`, all of it or none; a value of None is left out."""
        if self._folder is None:
            return
        import tomli_w

        partial = self._folder / f"{CONFIG_FILE}.partial"
        partial.write_text(tomli_w.dumps(_toml(table)), encoding="utf-8")
        partial.replace(self._folder / CONFIG_FILE)

    def close(self, ended_well: bool = True) -> None:
        """Writes what is pending, waits a while for the loggers, and closes the files; a second call does nothing.

        Args:
            ended_well: what the loggers are told of the run's end.
        """
        if self._closed:
            return
        with self._lock:
            for step, metrics in self._pending.items():
                self._write_logged(Logged(step, metrics))
            self._pending.clear()
        close_feeders(self._feeders, ended_well)
        self.event("close", "")
        with self._lock:
            self._closed = True
            if self._console is not None:
                _print(self._console.finish())
            self._events.close()
            self._steps.close()

    def _tell(self, logger: str, message: str) -> None:
        self.event("logger", message, logger=logger)

    def _write_logged(self, logged: Logged) -> None:
        self._steps.write(lines.logged_line(logged))

    def _show(self, record: Record) -> None:
        if self._console is not None:
            _print(self._console.take(record))


class _AppendOnly:
    """A file that only grows, one whole line a write."""

    def __init__(self, path: Path) -> None:
        torn, empty = _inspect(path)
        self._file = path.open("ab", buffering=0)
        if torn:
            self.write(b"\n")
        if empty:
            self.write(lines.header_line(time.time()))

    def write(self, line: bytes) -> None:
        """Appends a line in one call of the system, unless the disk takes only a part of it."""
        written = self._file.write(line)
        while written < len(line):
            written += self._file.write(line[written:])

    def close(self) -> None:
        self._file.close()


def _inspect(path: Path) -> tuple[bool, bool]:
    """Whether the last line of a file is torn, and whether there is nothing in it; checks the schema on the way."""
    try:
        with path.open("rb") as file:
            lines.parse_line(file.readline())
            size = file.seek(0, 2)
            if size == 0:
                return False, True
            file.seek(size - 1)
            return file.read(1) != b"\n", False
    except FileNotFoundError:
        return False, True


def _print(texts: list[str]) -> None:
    for text in texts:
        print(text, file=sys.stdout, flush=True)


def _as_float(name: object, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_a_number(name, value) from error


def _not_a_number(name: object, value: Any) -> StepError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return StepError(f"run.log: {name!r} is {shown}; expected a number, or a tensor with one element")


def _toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _toml(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_toml(part) for part in value if part is not None]
    if isinstance(value, bool | int | float | str):
        return value
    return str(value)
