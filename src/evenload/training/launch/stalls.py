"""`StallMonitor`: find the rank that neither works nor dies, from what the workers report. No process and no clock.

A rank is stalled if the others wait for it past their deadline while it reads samples or computes all that time: a loader that
hangs, a device that hangs. So is a process that is stopped (SIGSTOP), and, once the others have waited for `timeout_s`, one that
waits for samples in an evaluation, or whose threads don't run, and that uses no processor. Left alone are those that start their
loader, compile, compute their first steps, write a checkpoint, or run the script's own code, which may take as long as the script
wants. If all wait for one another, and nothing moves, none of them is to blame: a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from evenload.training.launch.membership_messages import Activity, Waits

STOPPED_S = 4.0
"""A process that is stopped for so long is stalled, whatever it did."""
AWAITED_S = 1.0
"""The same, where the repair of a loss waits for it: training shall go on within 3 s."""
GIVEN_UP_S = 600.0
"""The run fails once a member has been stopped for so long, if the others can't go on without it or have ended."""
EVERY_S = 0.25
_LONGEST_GAP_S = 1.0
"""After a longer time without a look this process itself was stopped, and what it knows is old."""
_WAIT_LASTS_S = 1.3
"""A worker that waits says so every half second."""
_FRESH_S = 3.0
"""A worker reports once a second."""
_SAME_WAIT = 0.8
"""A stalled rank entered its segment at most a little later than the others began to wait."""
_ABSENT_S = 30.0
"""A wait for the script's own code on one rank is reported after so long."""
WORKS = 0.05
"""A process that computes uses at least this part of a core, on a machine with much to do, too."""
_SILENT_S = 10.0
"""A worker that has not reported for so long is seen by the part of a core that it uses."""
_OWN_CODE = "it has been in the script's own code"
_SILENT = "none of its threads of Python has run"
_IN_STEP = {"data": "it has waited for samples", "compute": "it has been in forward or backward"}


@dataclass(frozen=True)
class StallFindings:
    stalled: dict[str, str]
    """Worker -> reason, for people."""
    absent: dict[str, str]
    """Workers for whose own code the others wait for long, each reported once in a wait."""
    is_too_long: bool
    """The others have waited for those that stall so long that they don't go on waiting."""
    given_up: set[str]
    """Those that stall and have been stopped for `GIVEN_UP_S`."""
    halted_s: float
    """Seconds for which all members have been stopped."""
    deadlock_s: float
    """Seconds for which all have waited for one another while nothing moved; 0 if they don't."""


class StallMonitor:
    """The workers' reports, and how long their processes have been stopped. Times are of one monotonic clock."""

    def __init__(self, used_s: Callable[[str], float] = lambda worker: math.nan) -> None:
        """`used_s` returns the processor time of a worker; NaN: it isn't known."""
        self._used_s = used_s
        self._activities: dict[str, tuple[Activity, float]] = {}
        self._waits: dict[str, tuple[Waits, float]] = {}
        self._stopped_since_s: dict[str, float] = {}
        self._awaited_since_s: dict[str, float] = {}
        """Of those that are stopped."""
        self._halted_since_s = math.inf
        self._used_before_s: dict[str, float] = {}  # until the last report
        self._judged_s = 0.0
        self._reported: set[str] = set()

    def take(self, message: Activity | Waits, now_s: float) -> None:
        if isinstance(message, Activity):
            self._activities[message.worker] = message, now_s
            self._used_before_s[message.worker] = self._used_s(message.worker)
        else:
            self._waits[message.worker] = message, now_s

    def begin_generation(self) -> None:
        """Forget who waits: the members change."""
        self._waits.clear()

    def is_due(self, now_s: float) -> bool:
        return now_s - self._judged_s >= EVERY_S

    def judge(
        self, members: Sequence[str], stopped: Collection[str], now_s: float, awaited: Collection[str] = ()
    ) -> StallFindings:
        """Return who stalls; `members` run; of them and others `stopped` are stopped; a loss's repair waits for `awaited`."""
        if was_halted := now_s - self._judged_s > _LONGEST_GAP_S:
            self._waits.clear()
        for name in [one for one in self._activities if was_halted or one in stopped]:  # no time passes there
            self._activities[name] = replace(self._activities[name][0], stuck_s=0.0), now_s
        self._judged_s = now_s
        is_halted = bool(members) and {*members} <= {*stopped}  # whoever stops all that run means it
        if was_halted or is_halted:
            self._stopped_since_s.clear()
            self._awaited_since_s.clear()
        self._halted_since_s = min(math.inf if was_halted else self._halted_since_s, now_s) if is_halted else math.inf
        stalled = {} if is_halted else self._too_long_stopped(stopped, now_s, awaited)
        given_up = {name for name in stalled if now_s - self._stopped_since_s[name] >= GIVEN_UP_S}
        waits = {name: wait for name, (wait, at_s) in self._waits.items() if now_s - at_s <= _WAIT_LASTS_S}
        waits_s = min((wait.seconds for wait in waits.values()), default=0.0)
        in_step_s = min((wait.seconds for wait in waits.values() if wait.in_step), default=math.inf)
        if waits and waits_s < _ABSENT_S:
            self._reported.clear()
        is_too_long = bool(waits) and waits_s >= max(wait.limit_s for wait in waits.values())
        absent: dict[str, str] = {}
        for name in members if waits else ():
            if name in waits or name not in self._activities or name in stalled:
                continue
            activity, at_s = self._activities[name]
            waits_too, silent_s = activity.segment in ("wait", "comm", "compile"), now_s - at_s
            seconds = silent_s + (0 if waits_too else activity.seconds)  # one that reports nothing more is still there
            if seconds < _SAME_WAIT * waits_s or (waits_too and silent_s <= _SILENT_S):
                continue
            what = _SILENT if waits_too else _IN_STEP.get(activity.segment)
            hangs = what in _IN_STEP.values() and seconds >= _SAME_WAIT * in_step_s
            if is_too_long and not hangs:
                is_idle = self._used_s(name) - self._used_before_s[name] < WORKS * silent_s
                hangs = activity.segment == "data" or (is_idle and silent_s > _SILENT_S and in_step_s < math.inf)
            if hangs:
                if not activity.excuse:
                    stalled[name] = f"{what or _OWN_CODE} for {seconds:.1f} s{self._where(name)}"
            elif waits_s >= _ABSENT_S and name not in self._reported:
                self._reported.add(name)
                absent[name] = f"{what or _OWN_CODE} for {seconds:.0f} s{self._where(name)}"
        halted_s = max(0.0, now_s - self._halted_since_s)
        return StallFindings(stalled, absent, is_too_long, given_up, halted_s, self._deadlock_s(members, now_s))

    def _too_long_stopped(self, stopped: Collection[str], now_s: float, awaited: Collection[str]) -> dict[str, str]:
        """Note since when workers are stopped; return those that stall by it, each with the sentence that says so."""
        self._stopped_since_s = {name: self._stopped_since_s.get(name, now_s) for name in stopped}
        held_up = [name for name in stopped if name in awaited]
        self._awaited_since_s = {name: self._awaited_since_s.get(name, now_s) for name in held_up}
        return {
            name: f"its process has been stopped (SIGSTOP) for {now_s - since_s:.1f} s{self._where(name)}"
            for name, since_s in self._stopped_since_s.items()
            if now_s - since_s >= STOPPED_S or now_s - self._awaited_since_s.get(name, now_s) >= AWAITED_S
        }

    def _deadlock_s(self, members: Sequence[str], now_s: float) -> float:
        known = [self._activities[name] for name in members if name in self._activities]
        fresh = [activity.stuck_s for activity, at_s in known if now_s - at_s <= _FRESH_S]
        return min(fresh) if 1 < len(fresh) == len(members) else 0.0

    def describe_deadlock(self, members: Sequence[str], device_of: Callable[[str], str], seconds: float) -> str:
        places = [f"\n  rank {n} ({device_of(name)}){self._where(name)}" for n, name in enumerate(members)]
        return (
            f"all ranks have waited for one another for {seconds:.0f} s, and nothing was sent or received:{''.join(places)}\n"
            "either they call different things, such as a run.reduce on one rank and a collective of torch on another, or one "
            "left its loop by a value of its own, such as the loss of its island (use `if run.any(flag): break`), or "
            "the network between two of them drops packets. If they need longer, set init(timeout_s=...)"
        )

    def _where(self, name: str) -> str:
        activity, _ = self._activities.get(name, (None, 0.0))
        return f", last seen at {activity.position}" if activity is not None and activity.position else ""
