"""Brings the steps of a run to one logger, from the records, in a thread of its own; training never waits for it."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from evenload.errors import ConfigError
from evenload.records.lines import STEPS_FILE
from evenload.records.loggers.catalogue import open_logger
from evenload.records.loggers.logger import Logger, Opening, RefusedError
from evenload.records.loggers.points import Mark, begins_anew, read_records, to_points

FOLDER = "loggers"
"""Below the run folder: for each logger its mark, and the lock that makes one process at a time its feeder."""
OPEN_PATIENCE_S = 15.0
"""How long a run waits for its loggers to open before it goes on without them, for the time being."""
CLOSE_PATIENCE_S = 20.0
"""How long a run that is over waits for what is still to be brought."""
SEND_PATIENCE_S = 600.0
"""How long `evenload show --to` waits."""
GATHER_S = 0.25
"""Between two batches, so that a logger gets several steps at once where steps are short."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""After a fault; doubled each time."""


class Feeder:
    """One logger of one run, from its opening to its end.

    The records are the queue: nothing is kept in memory, nothing is lost when the logger, its server or this process dies,
    and the next sitting goes on where this one stopped.

    Args:
        name: of the logger.
        folder: the run folder.
        options: what the user set for this logger.
        settings: the run's hyperparameters; nested ones are left out.
        tell: takes one sentence for the user, from any thread.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: Mapping[str, Any],
        settings: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        self.name = name
        self.num_points = 0
        """How many points the logger has taken from this feeder."""
        self._folder = folder
        self._options = dict(options)
        self._settings = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
        self._tell = tell
        self._mark = Mark()
        self._logger: Logger | None = None
        self._lock: IO[bytes] | None = None
        self._problem: ConfigError | None = None
        self._fault = ""
        """The fault of now, told already; empty where all is well."""
        self._first_try = threading.Event()
        """The first attempt to open has ended, well or not."""
        self._unattended = False
        """Nobody waits for the opening any more: a problem must be told, not raised."""
        self._wake = threading.Event()
        self._closing = False
        self._done = False
        self._ended_well = True
        self._give_up_s = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"evenload-{name}", daemon=True)

    def start(self) -> None:
        """Begins to open the logger."""
        self._thread.start()

    def wait_open(self, patience_s: float) -> None:
        """Waits until the logger is open, or has failed to, or takes too long; the latter two are tried on.

        Raises:
            ConfigError: it will never open before the user mends something.
        """
        if not self._first_try.wait(patience_s):
            self._trouble("has not opened yet")
        self._unattended = True
        if self._problem is not None:
            raise self._problem

    def wake(self) -> None:
        """There are new records."""
        self._wake.set()

    def finish(self, ended_well: bool = True, patience_s: float | None = None) -> None:
        """There will be no more records: the logger gets what is left, within ``patience_s``, and is closed."""
        self._ended_well = ended_well
        self._give_up_s = time.monotonic() + (CLOSE_PATIENCE_S if patience_s is None else patience_s)
        self._closing = True
        self._wake.set()

    def close(self) -> bool:
        """After `finish`: waits until the logger is closed or given up; whether it has everything."""
        self._thread.join(max(0.0, self._give_up_s - time.monotonic()) + FIRST_PAUSE_S)
        if not self._done and self._problem is None:
            self._drop(for_good=True)
            self._tell(
                f"{self.name} has not got all steps; they are in the run folder, and come with the next sitting or by: "
                f"evenload show {self._folder} --to {self.name}"
            )
        return self._done

    # In the thread

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while not self._done:
                try:
                    self._serve()
                    pause_s = FIRST_PAUSE_S
                except ConfigError as error:
                    self._problem = error
                    if self._unattended:
                        self._tell(f"{self.name} is given up: {error}")
                    return
                except Exception as error:
                    if time.monotonic() > self._give_up_s:
                        return
                    self._trouble(f"fails: {type(error).__name__}: {_first_line(error)}")
                    self._drop(for_good=False)
                    pause_s = FIRST_PAUSE_S if self._closing else pause_s
                    if time.monotonic() + pause_s > self._give_up_s:
                        return
                    self._first_try.set()
                    self._pause(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._first_try.set()
            if self._lock is not None:
                self._lock.close()

    def _serve(self) -> None:
        """Brings what there is, and waits for more, or ends the logger."""
        if self._lock is None:
            self._take_up()
        if self._logger is None and not self._mark.run_id:
            self._logger = self._open()  # now, so that what only the user can mend is told before the first step
        # A run that the place knows is opened again when there is something to bring: perhaps nothing more is trained.
        self._first_try.set()
        # Asked before the last look at the records: what came between a look and `finish` is brought too.
        closing = self._closing
        while self._bring():
            pass
        if self._fault:
            self._fault = ""
            self._tell(f"{self.name} works again and has every step up to now")
        if closing:
            if self._logger is not None:
                self._logger.close(self._ended_well)
            self._done = True
            return
        self._wake.wait()
        self._wake.clear()
        if not self._closing:
            time.sleep(GATHER_S)

    def _take_up(self) -> None:
        """Becomes the one feeder of this run's logger, and learns how far it has got."""
        place = self._folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(place / f"{self.name}.lock")
        self._mark = _read_mark(place / f"{self.name}.json")
        if self._mark.offset > _size(self._folder / STEPS_FILE):
            self._mark = Mark()  # these are no longer the records it was of

    def _open(self) -> Logger:
        logger = open_logger(self.name, Opening(self._folder, self._options, self._settings, self._mark.run_id))
        there = logger.newest_step
        if there is not None and there < self._mark.newest:
            # What it took was not safe yet when it, or its own process, died: the run's records are looked through for it.
            self._mark = replace(self._mark, newest=there, offset=self._mark.start)
        elif there is not None:
            self._mark = replace(self._mark, newest=there)
        self._mark = replace(self._mark, run_id=logger.run_id)
        self._save()
        return logger

    def _bring(self) -> bool:
        """Gives the logger one batch; whether there may be more to read."""
        records, offset = read_records(self._folder / STEPS_FILE, self._mark.offset)
        if offset == self._mark.offset:
            return False
        if begins_anew(records, self._mark) and not (self._logger is not None and self._logger.takes_again):
            if self._logger is not None:
                self._logger.close(True)
            self._logger = None
            self._mark = Mark(start=self._mark.offset, offset=self._mark.offset)
        if self._logger is None:
            self._logger = self._open()
            return True  # the place may lack more than was believed: read again
        points, mark = to_points(records, self._mark, self._logger.takes_again)
        if points:
            try:
                self._logger.write(points)
                self.num_points += len(points)
            except RefusedError as error:
                span = f"step {points[0].step}" if len(points) == 1 else f"steps {points[0].step} to {points[-1].step}"
                self._tell(f"{self.name} refuses {span}, which it will lack: {_first_line(error)}")
        self._mark = replace(mark, offset=offset)
        self._save()
        return True

    def _drop(self, for_good: bool) -> None:
        logger, self._logger = self._logger, None
        if logger is not None:
            with suppress(Exception):
                logger.drop(for_good)

    def _save(self) -> None:
        """Keeps the mark; where the disk is full, a later batch does."""
        path = self._folder / FOLDER / f"{self.name}.json"
        partial = path.with_suffix(".partial")
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(self._mark)))
            partial.replace(path)

    def _trouble(self, fault: str) -> None:
        """Tells a fault, once until it is over."""
        if not self._fault:
            self._fault = fault
            self._tell(f"{self.name} {fault}; training goes on, its steps are kept in the run folder and brought later")

    def _pause(self, seconds: float) -> None:
        """Waits; the end of the run cuts it short."""
        end = time.monotonic() + seconds
        was_closing = self._closing
        while (left_s := end - time.monotonic()) > 0 and self._closing == was_closing:
            time.sleep(min(left_s, 0.1))


def start_feeders(
    names: tuple[str, ...],
    folder: Path,
    options: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    tell: Callable[[str, str], None],
) -> tuple[Feeder, ...]:
    """Opens the loggers of a run, all at once.

    Args:
        names: the loggers, as `catalogue.check_loggers` has let them pass.
        folder: the run folder.
        options: for each logger by name.
        settings: the run's hyperparameters.
        tell: takes a logger's name and a sentence.

    Raises:
        ConfigError: one will never open before the user mends something; none is left open.
    """

    def teller(name: str) -> Callable[[str], None]:
        return lambda sentence: tell(name, sentence)

    feeders = tuple(Feeder(name, folder, options.get(name, {}), settings, teller(name)) for name in names)
    end_s = time.monotonic() + OPEN_PATIENCE_S
    for feeder in feeders:
        feeder.start()
    try:
        for feeder in feeders:
            feeder.wait_open(max(0.0, end_s - time.monotonic()))
    except ConfigError:
        for feeder in feeders:
            feeder.finish(ended_well=False, patience_s=2.0)
        for feeder in feeders:
            feeder.close()
        raise
    return feeders


def close_feeders(feeders: tuple[Feeder, ...], ended_well: bool) -> None:
    """Ends all feeders of a run, side by side: together they take no longer than the slowest."""
    for feeder in feeders:
        feeder.finish(ended_well)
    for feeder in feeders:
        feeder.close()


def send(name: str, folder: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Brings a logger what it lacks of a run that is over, and waits for it.

    Args:
        name: the logger, as `catalogue.check_loggers` has let it pass.
        folder: the run folder.
        options: of this logger.
        settings: the run's hyperparameters.

    Returns:
        How many points it took.

    Raises:
        ConfigError: it doesn't open, or doesn't take them; what it has is kept, so that the next attempt goes on.
    """
    told: list[str] = []
    feeder = Feeder(name, folder, options, settings, told.append)
    feeder.start()
    try:
        feeder.wait_open(SEND_PATIENCE_S)
    finally:
        feeder.finish(patience_s=0.0 if told else SEND_PATIENCE_S)
        done = feeder.close()
    if not done:
        raise ConfigError(f"{folder} was not brought to {name}: {told[0].partition(';')[0]}")
    return feeder.num_points


def _take_lock(path: Path) -> IO[bytes]:
    """A lock that ends with this process, and that its loader workers don't inherit.

    Raises:
        BlockingIOError: another process brings this run's steps to this logger.
    """
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise BlockingIOError("another process brings this run's steps to it") from None
    return file


def _read_mark(path: Path) -> Mark:
    try:
        return Mark(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Mark()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "without a word"
