"""The queue at one time, as `decide` sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evenload.balance.run_times import NOTHING_SEEN, PastRuns
from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.values import Job, Reservation, Settings, User


@dataclass(frozen=True)
class QueueSnapshot:
    """Everything a decision may depend on besides the time. Snapshots share parts and never change them."""

    jobs: tuple[Job, ...]
    """All that have not ended, in the order of submission."""
    layout: Layout
    closed: Mapping[str, str]
    """Devices on which nothing new may start, and why."""
    users: Mapping[str, User]
    reservations: tuple[Reservation, ...]
    settings: Settings
    past: PastRuns = NOTHING_SEEN
    """Run times of jobs that have ended, as the shell remembers them."""
    midnight_s: float = 0.0
    """The queue's time at some midnight of the wall clock, for hours of the day."""
