"""`StallMonitor`: find the rank that neither works nor dies, from what the workers report. No process and no clock.

A rank is stalled if the others wait for it past their deadline while it reads samples or computes all that time: a loader that
hangs, a device that hangs. So is a process that is stopped (SIGSTOP). Two kinds of ranks are left alone: one that starts its
loader, compiles or writes a checkpoint, and one that runs the script's own code between two steps, which may take as long as the
script wants.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from evenload.training.launch.membership_messages import Activity, Suspects, Waits

STOPPED_S = 4.0
"""A process that is stopped for so long is stalled, whatever it did."""
AWAITED_S = 1.0
"""The same, where the repair of a loss waits for it: training shall go on within 3 s."""
EVERY_S = 0.25
_LONGEST_GAP_S = 1.0
"""After a longer time without a look this process itself was stopped, and what it knows is old."""
_OPINIONS_S = 0.3
"""Time from the first suspicion to the decision, for the opinions of the other ranks."""
_WAIT_LASTS_S = 1.3
"""A worker that waits says so every half second."""
_SAME_WAIT = 0.8
"""A stalled rank entered its segment at most a little later than the others began to wait."""
_ABSENT_S = 30.0
"""A wait for the script's own code on one rank is reported after so long."""
_IN_STEP = {"data": "it has waited for samples", "compute": "it has been in forward or backward"}


@dataclass(frozen=True)
class StallFindings:
    stalled: dict[str, str]
    """Worker -> reason, for people."""
    absent: dict[str, str]
    """Workers for whose own code the others wait for long, each reported once."""


class StallMonitor:
    """The workers' reports, and how long their processes have been stopped. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._activities: dict[str, tuple[Activity, float]] = {}
        self._waits: dict[str, tuple[Waits, float]] = {}
        self._stopped_since_s: dict[str, float] = {}
        self._awaited_since_s: dict[str, float] = {}
        """Of those that are stopped."""
        self._judged_s = 0.0
        self._reported: set[tuple[str, str]] = set()
        self._suspects: dict[str, Suspects] = {}
        """The newest suspicion of each worker."""
        self._suspected_s = 0.0

    def take(self, message: Activity | Waits | Suspects, now_s: float) -> None:
        if isinstance(message, Activity):
            self._activities[message.worker] = message, now_s
        elif isinstance(message, Waits):
            self._waits[message.worker] = message, now_s
        else:
            self._suspected_s = self._suspected_s if self._suspects else now_s
            self._suspects[message.worker] = message

    def begin_generation(self) -> None:
        """Forget who waits, and for whom: the members change."""
        self._waits.clear()
        self._suspects.clear()

    def is_due(self, now_s: float) -> bool:
        return now_s - self._judged_s >= EVERY_S

    def judge(
        self, members: Sequence[str], stopped: Collection[str], now_s: float, awaited: Collection[str] = ()
    ) -> StallFindings:
        """Return the members that stall the others; `stopped` are stopped now, and the repair of a loss waits for `awaited`."""
        if now_s - self._judged_s > _LONGEST_GAP_S:
            self._stopped_since_s.clear()
            self._awaited_since_s.clear()
            self._waits.clear()
        self._judged_s = now_s
        stalled = self._most_suspected(members, stopped, now_s)
        if len(stopped) < len(members):  # whoever stops all of them means it
            held_up = [name for name in stopped if name in awaited]
            self._stopped_since_s = {name: self._stopped_since_s.get(name, now_s) for name in stopped}
            self._awaited_since_s = {name: self._awaited_since_s.get(name, now_s) for name in held_up}
            for name, since_s in self._stopped_since_s.items():
                if now_s - since_s >= STOPPED_S or now_s - self._awaited_since_s.get(name, now_s) >= AWAITED_S:
                    stalled[name] = (
                        f"its process has been stopped (SIGSTOP) for {now_s - since_s:.1f} s{self._where(name)}"
                    )
        waits_s = [wait.seconds for wait, at_s in self._waits.values() if now_s - at_s <= _WAIT_LASTS_S]
        absent: dict[str, str] = {}
        for name in members if waits_s else ():
            if name in self._waits or name not in self._activities or name in stalled:
                continue
            activity, at_s = self._activities[name]
            seconds = activity.seconds + now_s - at_s  # one that reports nothing more is still there
            if seconds < _SAME_WAIT * min(waits_s) or activity.segment in ("wait", "comm", "compile"):
                continue
            if (what := _IN_STEP.get(activity.segment)) is not None:
                if not activity.excuse:
                    stalled[name] = f"{what} for {seconds:.1f} s{self._where(name)}"
            elif min(waits_s) >= _ABSENT_S and (name, activity.position) not in self._reported:
                self._reported.add((name, activity.position))
                absent[name] = f"it has been between two steps for {seconds:.0f} s{self._where(name)}"
        return StallFindings(stalled, absent)

    def _most_suspected(self, members: Sequence[str], stopped: Collection[str], now_s: float) -> dict[str, str]:
        """Return the one without whom a collective has failed, in the opinion of most; it is the stopped one, if there is one."""
        if not self._suspects or now_s - self._suspected_s < _OPINIONS_S:
            return {}
        said, self._suspects = [*self._suspects.values()], {}
        is_one = 0 < len(stopped) < len(members)  # whoever stops all of them means it
        named = [*stopped] if is_one else [one.suspect for one in said if one.suspect in members]
        if not named:
            return {}
        suspect = max(named, key=lambda name: (named.count(name), members.index(name)))
        reason = next((one.reason for one in said if one.suspect == suspect), "a collective has failed")
        return {suspect: f"its process is stopped (SIGSTOP): {reason}" if suspect in stopped else reason}

    def _where(self, name: str) -> str:
        activity, _ = self._activities.get(name, (None, 0.0))
        return f", last seen at {activity.position}" if activity is not None and activity.position else ""
