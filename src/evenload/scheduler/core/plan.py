"""The result of planning: what to do now, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from evenload.scheduler.core.events import Command
from evenload.scheduler.core.policy import PolicyDecision
from evenload.scheduler.core.values import Job


@dataclass(frozen=True)
class Plan:
    """Commands, and the reason why each waiting job waits."""

    commands: tuple[Command, ...]
    waits: dict[str, str] = field(default_factory=dict)
    """Job → why it has no devices; this and what follows are filled by ``plan(..., explain=True)`` alone."""
    order: tuple[Job, ...] = ()
    """Those that run or could, the most deserving first."""
    decision: PolicyDecision | None = None
    """Of the policy; None where there was nothing for it to decide."""
