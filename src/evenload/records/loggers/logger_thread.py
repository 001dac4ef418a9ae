"""A thread that sends the steps of a run from its records to one logger, so that training never waits for it."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from evenload.atomic_file import write_atomically
from evenload.errors import ConfigError
from evenload.records.lines import STEPS_FILE
from evenload.records.loggers.catalogue import open_logger
from evenload.records.loggers.logger import Logger, LoggerContext, RefusedError
from evenload.records.loggers.scalars import LoggerPosition, read_records, starts_over, to_scalars

FOLDER = "loggers"
"""Folder inside the run folder with the position of each logger, and a lock against a second sender."""
OPEN_TIMEOUT_S = 15.0
"""A run waits this long for its loggers to open, then starts while they are retried."""
CLOSE_TIMEOUT_S = 20.0
"""A finished run waits this long for its loggers."""
SEND_TIMEOUT_S = 600.0
"""`evenload show --to` waits this long."""
BATCH_INTERVAL_S = 0.25
"""Between two batches, so that short steps are sent together."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 60.0
"""After a failure; doubled each time."""


class LoggerThread:
    """The sender of one run to one logger.

    The records are the queue: nothing is kept in memory, so nothing is lost if the logger, its server or this process
    dies. The next session continues from the stored position. Nested ``settings`` are left out. ``report`` receives one
    sentence for the user, from any thread.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: Mapping[str, Any],
        settings: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self.num_sent = 0
        """Number of `StepScalars` that the logger has accepted from this thread."""
        self._folder = folder
        self._options = dict(options)
        self._settings = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
        self._report = report
        self._position = LoggerPosition()
        self._logger: Logger | None = None
        self._lock: IO[bytes] | None = None
        self._error: ConfigError | None = None
        self._has_failed = False
        """A failure was reported and is not over yet."""
        self._first_attempt = threading.Event()
        """The first attempt to open has ended, successfully or not."""
        self._is_detached = False
        """`wait_open` has returned: a permanent error is reported instead of raised."""
        self._wake = threading.Event()
        self._is_wanted = False
        """The script waits for the logger to be open (`tracker`)."""
        self._served = threading.Event()
        """Every record so far is sent."""
        self._closing = False
        self._done = False
        self._succeeded = True
        self._deadline_s = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"evenload-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_open(self, timeout_s: float) -> None:
        """Wait until the first attempt to open has ended; raise `ConfigError` if only the user can make it open."""
        if not self._first_attempt.wait(timeout_s):
            self._report_failure("has not opened yet")
        self._is_detached = True
        if self._error is not None:
            raise self._error

    def wake(self) -> None:
        self._wake.set()

    def tracker(self) -> Any | None:
        """Send every record so far and return the library's own object, or else the logger; None if it does not open in time."""
        self._is_wanted = True
        end_s = time.monotonic() + OPEN_TIMEOUT_S
        self._served.clear()
        self._wake.set()
        while not self._served.wait(0.05) or self._logger is None:
            if time.monotonic() > end_s or self._error is not None:
                return None
        return getattr(self._logger, "raw", self._logger)

    def finish(self, succeeded: bool = True, timeout_s: float | None = None) -> None:
        """Send the remaining records within ``timeout_s`` and close the logger; returns at once."""
        self._succeeded = succeeded
        self._deadline_s = time.monotonic() + (CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)
        self._closing = True
        self._wake.set()

    def close(self) -> bool:
        """Wait after `finish` until the logger is closed or has timed out; return whether it received everything."""
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()) + MIN_PAUSE_S)
        if not self._done and self._error is None:
            self._drop(for_good=True)
            self._report(
                f"{self.name} has not received all steps; they are kept in the run folder and sent by the next session, or "
                f"by: evenload show {self._folder} --to {self.name}"
            )
        return self._done

    # The thread

    def _run(self) -> None:
        pause_s = MIN_PAUSE_S
        try:
            while not self._done:
                try:
                    self._serve()
                    pause_s = MIN_PAUSE_S
                except ConfigError as error:
                    self._error = error
                    if self._is_detached:
                        self._report(f"{self.name} is disabled: {error}")
                    return
                except Exception as error:
                    if time.monotonic() > self._deadline_s:
                        return
                    self._report_failure(f"fails: {type(error).__name__}: {_first_line(error)}")
                    self._drop(for_good=False)
                    pause_s = MIN_PAUSE_S if self._closing else pause_s
                    if time.monotonic() + pause_s > self._deadline_s:
                        return
                    self._first_attempt.set()
                    self._pause(pause_s)
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            self._first_attempt.set()
            if self._lock is not None:
                self._lock.close()

    def _serve(self) -> None:
        """Send all new records, then wait for more or close the logger."""
        if self._lock is None:
            self._lock_and_load()
        if self._logger is None and (self._is_wanted or not self._position.run_id):
            self._logger = self._open()  # at once, so that permanent errors are raised before the first step
        # A run known to the destination is opened only if there is something to send: training may already be complete.
        self._first_attempt.set()
        # Read before the records, so that records written before `finish` are sent.
        closing = self._closing
        while self._send():
            pass
        if self._has_failed:
            self._has_failed = False
            self._report(f"{self.name} works again and has received every step so far")
        if closing:
            if self._logger is not None:
                self._logger.close(self._succeeded)
            self._done = True
            return
        self._served.set()
        self._wake.wait()
        self._wake.clear()
        if not (self._closing or (self._is_wanted and not self._served.is_set())):
            time.sleep(BATCH_INTERVAL_S)

    def _lock_and_load(self) -> None:
        folder = self._folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _acquire_lock(folder / f"{self.name}.lock")
        with suppress(OSError, ValueError, TypeError):
            self._position = LoggerPosition(**json.loads((folder / f"{self.name}.json").read_text()))
        steps = self._folder / STEPS_FILE
        if self._position.offset > (steps.stat().st_size if steps.exists() else 0):
            self._position = LoggerPosition()  # it belongs to records that were replaced

    def _open(self) -> Logger:
        logger = open_logger(
            self.name, LoggerContext(self._folder, self._options, self._settings, self._position.run_id)
        )
        newest = logger.newest_step
        if newest is not None and newest < self._position.newest:
            # The logger or its process died before it stored all it had accepted: search the run's records again.
            self._position = replace(self._position, newest=newest, offset=self._position.start)
        elif newest is not None:
            self._position = replace(self._position, newest=newest)
        self._position = replace(self._position, run_id=logger.run_id)
        self._save()
        return logger

    def _send(self) -> bool:
        """Send one batch; return whether there may be more records."""
        records, offset = read_records(self._folder / STEPS_FILE, self._position.offset)
        if offset == self._position.offset:
            return False
        if starts_over(records, self._position) and not (self._logger is not None and self._logger.accepts_rewrites):
            if self._logger is not None:
                self._logger.close(True)
            self._logger = None
            self._position = LoggerPosition(start=self._position.offset, offset=self._position.offset)
        if self._logger is None:
            self._logger = self._open()
            return True  # the position may have moved back: read again
        batch, position = to_scalars(records, self._position, self._logger.accepts_rewrites)
        if batch:
            try:
                self._logger.write(batch)
                self.num_sent += len(batch)
            except RefusedError as error:
                span = f"step {batch[0].step}" if len(batch) == 1 else f"steps {batch[0].step} to {batch[-1].step}"
                self._report(f"{self.name} rejects {span}, which it will not contain: {_first_line(error)}")
        self._position = replace(position, offset=offset)
        self._save()
        return True

    def _drop(self, for_good: bool) -> None:
        logger, self._logger = self._logger, None
        if logger is not None:
            with suppress(Exception):
                logger.drop(for_good)

    def _save(self) -> None:
        with suppress(OSError):  # on a full disk the next batch saves it
            write_atomically(self._folder / FOLDER / f"{self.name}.json", json.dumps(asdict(self._position)))

    def _report_failure(self, failure: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(
                f"{self.name} {failure}; training continues, its steps are kept in the run folder and sent later"
            )

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        was_closing = self._closing
        while (left_s := end - time.monotonic()) > 0 and self._closing == was_closing:
            time.sleep(min(left_s, 0.1))


def start_logger_threads(
    names: tuple[str, ...],
    folder: Path,
    options: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    report: Callable[[str, str], None],
) -> tuple[LoggerThread, ...]:
    """Open the loggers of a run, all at the same time; ``report`` receives the name of a logger and a sentence.

    Raises `ConfigError` if one cannot open until the user fixes something; none stays open.
    """
    threads = tuple(
        LoggerThread(name, folder, options.get(name, {}), settings, partial(report, name)) for name in names
    )
    end_s = time.monotonic() + OPEN_TIMEOUT_S
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.wait_open(max(0.0, end_s - time.monotonic()))
    except ConfigError:
        close_logger_threads(threads, succeeded=False, timeout_s=2.0)
        raise
    return threads


def close_logger_threads(threads: tuple[LoggerThread, ...], succeeded: bool, timeout_s: float | None = None) -> None:
    """Close all loggers of a run at the same time, so that the slowest determines the duration."""
    for thread in threads:
        thread.finish(succeeded, timeout_s)
    for thread in threads:
        thread.close()


def send(name: str, folder: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Send a logger what it lacks of a finished run; return the number of `StepScalars` that it accepted.

    Raises `ConfigError` if it does not open or accept them; a further attempt continues from the same position.
    """
    reports: list[str] = []
    thread = LoggerThread(name, folder, options, settings, reports.append)
    thread.start()
    try:
        thread.wait_open(SEND_TIMEOUT_S)
    finally:
        thread.finish(timeout_s=0.0 if reports else SEND_TIMEOUT_S)
        done = thread.close()
    if not done:
        raise ConfigError(f"{folder} was not sent to {name}: {reports[0].partition(';')[0]}")
    return thread.num_sent


def _acquire_lock(path: Path) -> IO[bytes]:
    """Acquire a lock that ends with this process and that its loader workers do not inherit."""
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise BlockingIOError("another process sends the steps of this run to it") from None
    return file


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"
