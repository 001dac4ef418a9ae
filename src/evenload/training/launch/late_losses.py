"""Losses at the end of a run: a script has ended on one rank, and another rank is lost.

The others go on, because they hold the weights: the next rank 0 writes the last checkpoint. If the script had not ended on the
lost rank, the run fails after that, and starts again from there: what that rank had still to do is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from evenload.rendezvous.peer_monitor import FailureCause
from evenload.training.launch.membership_decider import LOOP_ENDED, MembershipDecider
from evenload.training.launch.membership_messages import MessageChannel
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.remote_workers import RemoteWorker

_STILL_S = 30.0
_OVER_S = 2.0
"""Time for a change to take effect, where a worker has closed its run: it saw the loss too late, or never will."""


class LateLosses:
    def __init__(self, workers: Mapping[str, WorkerProcess | RemoteWorker]) -> None:
        self.goes_on = False
        """True if the others go on; not on several machines."""
        self._workers = workers
        self._cause: FailureCause | None = None
        """Of the first worker that was lost before its script had ended."""
        self._since_s = self._looked_s = self._all_ran_s = 0.0
        self._named: set[str] = set()

    def why_not(self, decider: MembershipDecider, lost: Collection[str]) -> str:
        """Return why the others can't go on: one of them has closed its run, so all had saved. Empty if they can."""
        others = [name for name in decider.members if name not in lost]
        return LOOP_ENDED if decider.scripts_ended and self._has_closed(others) else ""

    def note(self, decider: MembershipDecider, causes: Mapping[str, FailureCause]) -> None:
        """Note members that are lost."""
        if decider.scripts_ended:
            self._since_s = time.monotonic()
            unfinished = [cause for name, cause in causes.items() if name not in decider.scripts_ended]
            self._cause = self._cause or next(iter(unfinished), None)

    def end_cause(self, decider: MembershipDecider, have_ended: bool) -> FailureCause | None:
        """Return why the run fails: its last workers `have_ended`, but a lost one had not, or a change can't take effect."""
        now_s, before_s = time.monotonic(), self._looked_s
        self._looked_s = now_s
        if now_s - before_s > _OVER_S:  # this process was stopped
            self._since_s, self._all_ran_s = now_s if self._since_s else 0.0, now_s
        is_late = self._since_s and decider.pending is not None and now_s - self._since_s > _OVER_S
        if (have_ended and decider.lost_late) or (is_late and self._has_closed(decider.members)):
            return self._cause or FailureCause(decider.losses[-1].reason, 1, time_s=time.time(), lost=True)
        return None

    def name_running(self, decider: MembershipDecider, names: Sequence[str], print_line: Callable[[str], None]) -> None:
        """Name each of these members, and workers that have left, once that still runs long after another has ended."""
        running = [name for name in names if self._workers[name].poll() is None]
        if running == names:
            self._all_ran_s = time.monotonic()
        for name in running if time.monotonic() - self._all_ran_s > _STILL_S else ():
            where = decider.places[name].device
            rank = f"rank {decider.rank_of(name)} ({where})" if name in decider.members else f"{where}, which had left,"
            if name not in self._named:
                print_line(f"{rank} still runs, {_STILL_S:.0f} s after another has ended; the run ends with it")
            self._named.add(name)

    def _has_closed(self, names: Collection[str]) -> bool:
        """Return whether one of these has closed its run: it receives no change any more."""
        channels = [self._workers[name].channel for name in names]
        return any(isinstance(channel, MessageChannel) and channel.ended for channel in channels)
