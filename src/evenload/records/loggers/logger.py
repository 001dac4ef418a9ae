"""Interface of a logger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class StepScalars:
    """Scalars of one step."""

    step: int
    """Global index of the step."""
    time: float
    """Time of the commit, in seconds since 1970."""
    scalars: Mapping[str, float]
    """By name; may be NaN or infinite."""
    replaces: bool = False
    """Training went back to a checkpoint: discard what was written for this step and all later ones."""
    media: Mapping[str, str] = field(default_factory=dict)
    """Images, texts, histograms and tables: files in the run folder (records/media.py)."""


@dataclass(frozen=True)
class LoggerContext:
    """Arguments with which a logger is opened."""

    folder: Path
    """The run folder."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of this logger (``logger_options``); values from the command line are strings."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The resolved settings of the run: its hyperparameters."""
    run_id: str = ""
    """`Logger.run_id` of an earlier session of this run; empty in the first one."""


class Logger(Protocol):
    """A destination for metrics; used by a single thread.

    The factory ``(LoggerContext) -> Logger`` raises `ConfigError` for a problem that only the user can fix (a wrong
    option, no login), which ends the run before it starts. Any other exception from it or from `write` counts as
    temporary: training continues, and the call is repeated later.
    """

    run_id: str
    """The identifier of this run at the destination, kept in the run folder for the next session. May be empty."""
    newest_step: int | None
    """The newest step at the destination when it was opened; -1 if there was none, None if unknown."""
    accepts_rewrites: bool
    """Accept scalars with ``replaces``. Otherwise repeated steps are left out and the first values stay."""

    def write(self, batch: Sequence[StepScalars]) -> None:
        """Write scalars in the order of their steps; a step may occur several times. Returning confirms all of them.

        Raises:
            RefusedError: the destination will never accept them; they are left out and the user is notified.
        """

    def close(self, succeeded: bool) -> None:
        """Flush everything and close; ``succeeded`` is False if the script failed."""

    def drop(self, for_good: bool) -> None:
        """Release resources after a failure; the logger is then opened again.

        Args:
            for_good: the run is over and nothing waits any longer. May be called while `close` blocks in another
                thread; nothing may remain that keeps the process from exiting.
        """


class RefusedError(Exception):
    """Raised by `Logger.write` for scalars that the destination will never accept, such as an invalid name."""
