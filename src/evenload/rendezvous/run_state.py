"""`RunState`: what the machines of a run must know to go on without its coordinator, and which of them may.

Note [Majority]
  Two sides of a network that is cut must not both train on. So a group of machines goes on only with more than half of the
  *voters*: the machines that took part at the last change that was confirmed. Of exactly half of them, the side with the
  coordinator goes on; where that has certainly ended, the side with the lowest number. A machine whose supervisor has certainly
  ended (its system is up, and refuses connections at the port) does not vote: it can't train on.
  A change of the voters is confirmed once a group that may go on, by the old voters and by the new ones, has received it. Until
  then both sets count. Any two groups that may go on have a machine in common, so the later one knows what the earlier decided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from evenload.rendezvous import world
from evenload.rendezvous.world import Machine

_FORMER = Machine("", "", "", ())
"""In place of one that is gone for good: the same machine gets another number each time that it comes back."""


@dataclass(frozen=True)
class RunState:
    """The coordinator's announcement to all machines while ranks train."""

    version: int
    """Grows with each announcement, also by the next coordinator."""
    machines: tuple[Machine, ...]
    """All that ever took part, by number; without content where nobody needs it any more."""
    voters: tuple[tuple[int, ...], ...]
    """The voters of the last confirmed change, then those of the changes since; the coordinator of that time comes first."""
    members: Mapping[str, Any] = field(default_factory=dict)
    """`MembershipDecider.state`; empty before training begins: until then the loss of the coordinator ends the run."""

    @property
    def coordinator(self) -> int:
        return self.voters[-1][0]

    @property
    def present(self) -> tuple[int, ...]:
        """The machines that take part, the coordinator first."""
        return self.voters[-1]

    def without_former(self) -> RunState:
        """Return this state without what it knows of machines that neither vote nor have a worker; all keep their numbers."""
        needed = {place["node"] for place in self.members.get("places", {}).values()}.union(*self.voters)
        machines = tuple(one if node in needed else _FORMER for node, one in enumerate(self.machines))
        return replace(self, machines=machines)

    def may_go_on(self, group: Collection[int], ended: Collection[int] = ()) -> bool:
        """Return whether these machines may go on without the others; `ended`: machines whose supervisors have ended."""
        for voters in self.voters:
            alive = {*voters} - {*ended}
            decisive = voters[0] if voters[0] in alive else min(alive, default=-1)
            if 2 * len(alive & {*group}) + (decisive in group) <= len(alive):
                return False
        return True


def from_message(raw: Mapping[str, Any]) -> RunState:
    """Read a state from a message of another machine, whose version is ours."""
    return RunState(
        int(raw["version"]),
        world.from_message(raw).machines,
        tuple(tuple(map(int, one)) for one in raw["voters"]),
        dict(raw["members"]),
    )
