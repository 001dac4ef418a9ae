"""What a logger is: what it is opened with, what it takes, what it must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Point:
    """Numbers of one step."""

    step: int
    """Global index of the step."""
    time: float
    """When it was committed, in seconds since 1970."""
    scalars: Mapping[str, float]
    """By name; may be NaN or infinite."""
    again: bool = False
    """Training went back to a checkpoint: this step and those after it replace what was given for them before."""


@dataclass(frozen=True)
class Opening:
    """What a logger is opened with."""

    folder: Path
    """The run folder."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the user set for this logger (``logger_options``); texts, where it came from the command line."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the run as resolved: its hyperparameters."""
    run_id: str = ""
    """`Logger.run_id` of an earlier sitting of this run; empty in the first one."""


class Logger(Protocol):
    """One further place for metrics; used by one thread alone.

    An opener ``(Opening) -> Logger`` raises `ConfigError` for what only the user can mend (a wrong option, nobody logged
    in); that ends the run before it begins. Whatever else it or `write` raises is taken for a passing fault: training goes
    on, and the same call is made again later.
    """

    run_id: str
    """What the place calls this run; kept in the run folder, for the next sitting. May be empty."""
    newest_step: int | None
    """The newest step that the place held when it was opened; -1 where it held none, None where it doesn't tell."""
    takes_again: bool
    """Whether points that are ``again`` may come; else such steps are left out, and the place keeps what it has."""

    def write(self, points: Sequence[Point]) -> None:
        """Takes points, steps rising. They count as taken when it returns; a step may have several points.

        Raises:
            RefusedError: the place will never take them; they are left out, and the user is told.
        """

    def close(self, ended_well: bool) -> None:
        """Hands over everything and lets go; ``ended_well`` is False where the script failed."""

    def drop(self, for_good: bool) -> None:
        """Lets go after a fault; the logger is then opened anew.

        Args:
            for_good: the run is over and nobody waits any longer; also called while `close` hangs in another thread. Nothing
                may be left that would keep the process from ending.
        """


class RefusedError(Exception):
    """What `Logger.write` raises for points that its place will never take, such as a name it doesn't allow."""
