"""Writer of a run folder, with loggers and optional progress lines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenload.atomic_file import write_atomically
from evenload.errors import ConfigError, StepError
from evenload.records import lines
from evenload.records.console import ProgressLines
from evenload.records.folder_lock import lock_folder
from evenload.records.loggers.catalogue import check_loggers
from evenload.records.loggers.logger_thread import LoggerThread, close_logger_threads, start_logger_threads
from evenload.records.media import kind_of, write_media
from evenload.records.reader import last_step_in
from evenload.records.values import LateMetrics, OwnStep, Record, RunEvent, StepRecord

CONFIG_FILE = "config.toml"
_MOST_UNWRITTEN_BYTES = 1 << 24


class Recorder:
    """The only writer of a run folder; without a folder it writes and prints nothing.

    Each call is one unbuffered append, by `own_steps` of several records, so readers in other processes see it immediately
    and a crash can cut only the last line short. An existing folder is appended to, never truncated; an incomplete last
    line is terminated first. The events ``open`` and ``close`` (without a message) delimit a session.

    Metrics from `log` become part of the record of their step. If that record is already written (an evaluation after
    the last step of an epoch), they follow on a separate line, which the reader joins to the step.

    ``folder`` is created if missing. ``console`` prints progress lines and event messages on stdout, for scripts started
    without a launcher. Each logger follows the records in a separate thread; a failure is reported once and retried, and
    never stops training. Raises `ConfigError` if the folder is not writable or holds records of another schema, or, on
    every rank, if the package of a logger is missing.
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
        job: str | None = None,
        *,
        takes_over: bool = False,
    ) -> None:
        check_loggers(loggers, logger_options)
        self._folder = folder
        self._lock = threading.Lock()
        self._pending: dict[int, dict[str, float]] = {}
        self._pending_media: dict[int, dict[str, str]] = {}
        self._last_step = -1
        self._closed = folder is None
        self._console = ProgressLines(log_every_s) if console and folder is not None else None
        self._logger_threads: tuple[LoggerThread, ...] = ()
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as opened:  # on failure nothing stays open
                # A rank takes over from a process that may hang, with the lock.
                with contextlib.suppress(ConfigError) if takes_over else contextlib.nullcontext():
                    opened.enter_context(lock_folder(folder, waits=takes_over))
                self._events = opened.enter_context(contextlib.closing(_AppendOnlyFile(folder / lines.EVENTS_FILE)))
                self._steps = opened.enter_context(contextlib.closing(_AppendOnlyFile(folder / lines.STEPS_FILE)))
                self._logger_threads = start_logger_threads(
                    loggers, folder, logger_options or {}, hyperparameters or {}, self._logger_event
                )
                self._opened = opened.pop_all()
        except OSError as error:
            raise ConfigError(
                f"the run folder {folder} is not writable ({error}); set project_dir to a writable folder"
            ) from error
        of_job: dict[str, Any] = {} if job is None else {"job": job}
        self.event("open", "", total_steps=total_steps, **of_job)

    @property
    def is_followed(self) -> bool:
        """True if another process has written later steps into this folder."""
        return self._folder is not None and last_step_in(self._folder) > self._last_step

    def event(self, kind: str, message: str, step: int | None = None, **fields: Any) -> None:
        """Write one event; print its message, unless empty, if this recorder prints.

        The views use the fields ``shares`` (the event is their reason), ``speeds_per_s`` (of kind ``solo_speeds``),
        ``total_steps``, ``epoch_steps`` and ``devices`` (a name for each rank). The page of a run also shows ``reason``,
        ``rank`` or ``ranks``, ``device`` and ``host``, and ``seconds``: what the event cost.
        """
        if self._closed:
            return
        event = RunEvent(kind, message, time.time(), step, fields)
        with self._lock:
            self._events.write(lines.event_line(event))
            self._show(event)

    def step(self, record: StepRecord) -> None:
        """Write one committed step with the metrics logged for it; user metrics take precedence over those of the record."""
        if self._closed:
            return
        with self._lock:
            # Steps of a measurement take no metrics.
            self._steps.write(lines.step_line(record, record.metrics if record.arm else self._all_metrics(record)))
            if self._pending_media and not record.arm:
                self._write_media(record.step)
            for thread in self._logger_threads:
                thread.wake()
            if self._console is not None:
                self._show(record)

    def own_steps(self, steps: Sequence[OwnStep]) -> None:
        """Do what `step` does for committed steps of a rank alone, in one append."""
        if self._closed:
            return
        with self._lock:
            self._steps.write(b"".join([lines.own_step_line(step, self._all_metrics(step)) for step in steps]))
            for step in steps if self._pending_media else ():
                self._write_media(step.step)
            for thread in self._logger_threads:
                thread.wake()
            for step in steps if self._console is not None else ():
                self._show(step.record())

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record numbers, or objects that convert to one, and images, texts, histograms and tables (media.py).

        Raises:
            StepError: a value is neither; also on ranks that write nothing.
        """
        shown = {str(name): value for name, value in metrics.items() if is_media(name, value)}
        for name, value in metrics.items():
            if str(name) not in shown and not hasattr(value, "__float__"):
                raise _not_a_number(name, value)
        if self._closed or self._folder is None:
            return
        numbers = {str(name): as_float(name, value) for name, value in metrics.items() if str(name) not in shown}
        files = {name: write_media(self._folder, name, step, value) for name, value in shown.items()}
        with self._lock:
            if numbers and step > self._last_step:
                self._pending.setdefault(step, {}).update(numbers)
            elif numbers:
                self._write_late(LateMetrics(step, numbers))
            if files:
                self._pending_media.setdefault(step, {}).update(files)
            if step <= self._last_step:
                self._write_media(step)
                for thread in self._logger_threads:
                    thread.wake()

    def tracker(self, name: str) -> Any | None:
        """Return the own object of a logger's library, with every record so far sent; None if it does not open."""
        return next((thread.tracker() for thread in self._logger_threads if thread.name == name), None)

    def settings(self, table: Mapping[str, Any]) -> None:
        """Write the resolved settings to `config.toml` atomically, if there is room; values of None are left out."""
        if self._folder is None:
            return
        import tomli_w

        path = self._folder / CONFIG_FILE
        try:
            write_atomically(path, tomli_w.dumps(_toml(table)))
        except OSError as error:
            self.event("settings_not_written", f"SETTINGS NOT WRITTEN: {path} ({error}); training goes on")

    def close(self, succeeded: bool = True) -> None:
        """Write pending metrics, wait briefly for the loggers and close the files; a second call does nothing."""
        if self._closed:
            return
        with self._lock:
            for step, metrics in self._pending.items():
                self._write_late(LateMetrics(step, metrics))
            self._pending.clear()
            for step in list(self._pending_media):
                self._write_media(step)
        close_logger_threads(self._logger_threads, succeeded)
        self.event("close", "")
        with self._lock:
            self._closed = True
            if self._console is not None:
                print_lines(self._console.finish())
            self._opened.close()

    def _logger_event(self, logger: str, message: str) -> None:
        self.event("logger", message, logger=logger)

    def _all_metrics(self, record: StepRecord | OwnStep) -> Mapping[str, float]:
        """Return the metrics of the step that is written now, with those logged for it."""
        self._last_step = record.step
        if not self._pending:
            return record.metrics
        logged = self._pending.pop(record.step, {})
        # In the order of the steps: many may wait until theirs are written.
        while self._pending and (earlier := next(iter(self._pending))) < record.step:
            self._write_late(LateMetrics(earlier, self._pending.pop(earlier)))
        return {**record.metrics, **logged}

    def _write_late(self, logged: LateMetrics) -> None:
        self._steps.write(lines.late_metrics_line(logged))

    def _write_media(self, step: int) -> None:
        """Write the line of what was logged in this step, after that of the step."""
        if files := self._pending_media.pop(step, None):
            self._write_late(LateMetrics(step, {}, media=files))

    def _show(self, record: Record) -> None:
        if self._console is not None:
            print_lines(self._console.add(record))


def append_event(folder: Path, event: RunEvent) -> None:
    """Write one event into the folder of a run that no process writes. OSError: the folder is not writable."""
    with contextlib.closing(_AppendOnlyFile(folder / lines.EVENTS_FILE)) as file:
        file.write(lines.event_line(event))


class _AppendOnlyFile:
    """A file of records; what a full disk does not take is kept, and written once there is room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = b""
        self._is_full = False
        self._open()
        self.write(b"")

    def _open(self) -> None:
        torn, empty = _inspect(self._path)
        self._file = self._path.open("ab", buffering=0)
        header = lines.header_line(time.time()) if empty else b""
        self._unwritten = (b"\n" if torn else b"") + header + self._unwritten

    def write(self, line: bytes) -> None:
        """Append a line in one system call, unless the disk accepts only a part of it. OSError: too much waits for the disk."""
        self._unwritten += line
        try:
            if not os.fstat(self._file.fileno()).st_nlink:
                self._begin_anew()
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._is_full = False
        except OSError as error:
            if len(self._unwritten) > _MOST_UNWRITTEN_BYTES:
                raise
            if not self._is_full:
                self._is_full = True
                print_lines(
                    [
                        f"evenload: RECORDS WAIT: {self._path} can't be written ({error}); they are kept, training goes on"
                    ]
                )

    def _begin_anew(self) -> None:
        print_lines([f"evenload: RECORDS REMOVED: {self._path} was deleted while the run writes it; it begins anew"])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        before = self._file
        self._open()
        before.close()

    def close(self) -> None:
        if self._unwritten:
            with contextlib.suppress(OSError):
                self.write(b"")
        if self._unwritten:
            print_lines([f"evenload: RECORDS LOST: {len(self._unwritten)} bytes of {self._path} could not be written"])
        self._file.close()


def _inspect(path: Path) -> tuple[bool, bool]:
    """Return whether the last line of a file is incomplete, and whether the file is empty; check its schema."""
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


def print_lines(texts: list[str]) -> None:
    """Print, if stdout takes it: a full disk, a reader that is gone or an encoding is no reason to end a run."""
    for text in texts:
        with contextlib.suppress(OSError, ValueError):
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            # One call a line: unbuffered, `print` writes the newline by itself, and other ranks write between.
            sys.stdout.write(f"{text.encode(encoding, 'backslashreplace').decode(encoding)}\n")
            sys.stdout.flush()


def as_float(name: object, value: Any) -> float:
    """Return a logged value as a number; raise `StepError` if it is none."""
    if isinstance(value, str | bytes):
        raise _not_a_number(name, value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_a_number(name, value) from error


def is_media(name: object, value: Any) -> bool:
    """Return whether a value is an image, a text, a histogram or a table; StepError for a number as text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            float(value)
            raise StepError(f"run.log: {name!r} is the text {value!r}; expected a number: log it without formatting it")
    return kind_of(value) is not None


def _not_a_number(name: object, value: Any) -> StepError:
    shape = getattr(value, "shape", None)
    shown = repr(value) if not shape else f"a {type(value).__name__} of shape {tuple(shape)}"
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return StepError(
        f"run.log: {name!r} is {shown}; expected a number, or a tensor with one element (x.mean()), an image (channels, height, "
        "width), a text, a histogram (np.histogram(x)) or a table (a list of dicts); others go to run.tracker(name)"
    )


def _toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _toml(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_toml(part) for part in value if part is not None]
    if isinstance(value, bool | int | float | str):
        return value
    return str(value)
