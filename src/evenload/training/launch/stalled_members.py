"""`StalledMembers`: which members don't respond, from what the workers report and from whether their processes are stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from evenload.training.launch.membership_decider import MembershipDecider
from evenload.training.launch.membership_messages import Activity, Suspects, Waits
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.remote_workers import RemoteWorker
from evenload.training.launch.stalls import StallMonitor

_OPINIONS_S = 0.3
"""Time from the first suspicion to the decision, for the opinions of the other ranks."""


@dataclass
class FoundStalls:
    """Members by name, with a sentence for people."""

    suspects: dict[str, str] = field(default_factory=dict)
    """Without whom a collective of the others failed."""
    stalled: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """About members that are waited for, and are no stall."""


class StalledMembers:
    def __init__(
        self,
        workers: Mapping[str, WorkerProcess | RemoteWorker],
        gone: Collection[str],
        is_quiet: Callable[[str], bool],
        where: Callable[[str], str],
    ) -> None:
        """`gone`: workers whose end is dealt with; `is_quiet`: nothing comes from the worker's machine; `where`: its device."""
        self._workers = workers
        self._gone = gone
        self._is_quiet = is_quiet
        self._where = where
        self._suspects: dict[str, Suspects] = {}
        """The newest suspicion of each worker."""
        self._suspected_s = 0.0
        self._monitor = StallMonitor()
        self._reported: set[str] = set()

    def take(self, message: Suspects | Activity | Waits) -> None:
        if not isinstance(message, Suspects):
            self._monitor.take(message, time.monotonic())
            return
        if not self._suspects:
            self._suspected_s = time.monotonic()
        self._suspects[message.worker] = message

    def begin_generation(self) -> None:
        """Forget who waits, and for whom: the members change."""
        self._suspects.clear()
        self._monitor.begin_generation()

    def is_news(self, name: str) -> bool:
        """Return True at the first call with a name."""
        is_new = name not in self._reported
        self._reported.add(name)
        return is_new

    def judge(self, decider: MembershipDecider) -> FoundStalls:
        """Return who does not respond now. Those whose processes have ended are left out: that is dealt with elsewhere."""
        found = FoundStalls()
        if self._suspects and time.monotonic() - self._suspected_s >= _OPINIONS_S:
            self._judge_suspects(decider, found)
        now_s = time.monotonic()
        if not self._monitor.is_due(now_s):
            return found
        members = [name for name in decider.members if name not in self._gone and not self._is_quiet(name)]
        judged = self._monitor.judge(members, [name for name in members if self._workers[name].is_stopped()], now_s)
        found.lines = [
            f"{self._who(decider, name)}: {why}; the other ranks wait" for name, why in judged.absent.items()
        ]
        found.stalled = {
            name: f"{self._who(decider, name)} does not respond: {reason}"
            for name, reason in judged.stalled.items()
            if name not in found.suspects and self._workers[name].poll() is None
        }
        return found

    def _judge_suspects(self, decider: MembershipDecider, found: FoundStalls) -> None:
        """Add the one that most suspect, if it still runs."""
        messages, self._suspects = self._suspects, {}
        named = [message.suspect for message in messages.values() if message.suspect in decider.members]
        stopped = [name for name in decider.members if self._workers[name].is_stopped()]
        candidates = stopped or named
        if not candidates:
            return
        suspect = max(dict.fromkeys(candidates), key=lambda name: (candidates.count(name), decider.rank_of(name)))
        if self._workers[suspect].poll() is not None or suspect in self._gone or self._is_quiet(suspect):
            return
        reason = next((message.reason for message in messages.values() if message.suspect == suspect), "")
        state = "is stopped (SIGSTOP)" if suspect in stopped else "does not respond"
        found.suspects[suspect] = f"{self._who(decider, suspect)} {state}{f': {reason}' if reason else ''}"

    def _who(self, decider: MembershipDecider, name: str) -> str:
        return f"rank {decider.rank_of(name)} ({self._where(name)})"
