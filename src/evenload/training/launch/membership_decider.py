"""Decide who takes part in a run: events in, instructions out, without any process, socket or clock.

The members change in one of two ways. A lost member makes an urgent change: the survivors abort what they wait for. Joins and
leaves make a change at the end of a step, and only one of these is outstanding at a time. A change has taken effect when all
its members have switched to it. An urgent change replaces one that has not: it holds the survivors alone, so a worker whose
admission was in progress is started again, and one whose leave was in progress stays until the next change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evenload.rendezvous.rank_backends import common_backend
from evenload.training.launch.membership_messages import LostWorker, MembershipChange, from_line, to_line

_DELAYS_S = (0.0, 1.0, 5.0, 15.0)
"""Before the first, second, ... restart at one place, or of all: what fails again and again must not take time from others."""

_NUM_LOSSES = 20
"""Losses that the report of an end names; every machine is sent them with each change."""

NOT_BEGUN = "training has not begun"
LOOP_ENDED = "the training loop has ended"


def restart_delay_s(num_before: int) -> float:
    """Return the seconds to wait before a restart that follows so many others."""
    return _DELAYS_S[min(num_before, len(_DELAYS_S) - 1)]


@dataclass(frozen=True)
class WorkerPlace:
    """The device, or several, on which a worker runs; its successors run there too."""

    index: int
    """Unique in a run, from 0."""
    device: str
    """For people: ``cuda:0``, ``cpu``."""
    device_name: str = ""
    inner_backend: str = ""
    """`WorkerSpec.inner_backend`."""
    node: int = 0
    """Number of its machine; 0 in a run on one."""
    local_rank: int = 0
    """Index of the device on its machine."""


@dataclass(frozen=True)
class SendChange:
    change: MembershipChange
    to: tuple[str, ...]
    """The members, and the workers that leave with this change."""


@dataclass(frozen=True)
class StartWorker:
    worker: str
    place: WorkerPlace
    delay_s: float = 0.0


@dataclass(frozen=True)
class EndWorker:
    """Kill a worker that is no member: its end is no failure."""

    worker: str


@dataclass(frozen=True)
class EndRun:
    reason: str
    """All causes, for people."""


@dataclass(frozen=True)
class Notice:
    """A line for the user."""

    text: str


Instruction = SendChange | StartWorker | EndWorker | EndRun | Notice


class MembershipDecider:
    """The members of a run, those on their way in or out, and the restarts that each place has left."""

    def __init__(self, places: Mapping[str, WorkerPlace], store: str, max_restarts: int, num_restarts: int = 0) -> None:
        """`places`: those of the first members, by rank; `max_restarts`: restarts of lost workers at each place, of which
        `num_restarts` have happened.
        """
        self.members = tuple(places)
        """Members of the newest change, sent or in effect; the index is the rank."""
        self.places = dict(places)
        """The place of each worker that is a member, joins or leaves."""
        self.store = store
        self.losses: list[LostWorker] = []
        """The last members that were lost, the newest last."""
        self._max_restarts = max_restarts
        self._number = 0
        self._effective = self.members
        self._pending: MembershipChange | None = None
        self._switched: set[str] = set()
        self._why_not: dict[str, str] = dict.fromkeys(self.members, NOT_BEGUN)
        self._joiners: dict[str, bool] = {}
        """Workers that run their preamble (False) or stand at their first step (True)."""
        self._leaving: list[str] = []
        self._lost: dict[str, LostWorker] = {}
        """Since the change that took effect last."""
        self._to_start: list[StartWorker] = []
        self._num_restarts = Counter({place.index: num_restarts for place in places.values() if num_restarts})
        self._num_started = len(self.members)
        self._finished = self._stops = False
        """The script has ended on a worker; no loss is dealt with any more."""
        self.lost_late: list[str] = []
        """Workers that were lost after another's script had ended, before their own had."""
        self.scripts_ended: set[str] = set()

    # -- what is known ----------------------------------------------------------------------------------------------------

    @property
    def joiners(self) -> tuple[str, ...]:
        return tuple(self._joiners)

    @property
    def pending(self) -> MembershipChange | None:
        """The change that has not taken effect."""
        return self._pending

    @property
    def awaited(self) -> tuple[str, ...]:
        """The members that have not followed a change after a loss, which all wait for."""
        change = self._pending
        return () if change is None or not change.urgent else tuple({*change.workers} - self._switched)

    @property
    def expected(self) -> tuple[str, ...]:
        """Those that the others wait for: the members, and workers whose leave has not taken effect."""
        return tuple(dict.fromkeys((*(one for one in self._effective if one not in self._lost), *self.members)))

    @property
    def num_restarts(self) -> int:
        """At the place that has had most, without workers that have not joined."""
        joining = Counter(self.places[name].index for name in (*self._joiners, *(s.worker for s in self._to_start)))
        return max((self._num_restarts - joining).values(), default=0)

    @property
    def staying(self) -> tuple[str, ...]:
        """The workers that train or will: members and joiners that were not requested to leave."""
        waiting = [start.worker for start in self._to_start]
        known = dict.fromkeys((*self.members, *self._effective, *self._joiners, *waiting))
        stay = [worker for worker in known if worker not in self._lost and not self.leaves(worker)]
        return (*stay, *self.lost_late)

    def state(self) -> dict[str, Any]:
        """Return what a decider elsewhere needs to go on as this one; JSON can hold it."""
        known = dict.fromkeys((*self.staying, *self.members, *self._effective, *self._leaving))
        return {
            "members": self.members,
            "effective": self._effective,
            "places": {worker: asdict(self.places[worker]) for worker in known},
            "losses": [asdict(loss) for loss in self.losses],
            "number": self._number,
            "pending": None if self._pending is None else to_line(self._pending),
            "why_not": dict(self._why_not),
            "joiners": [*self._joiners, *(start.worker for start in self._to_start)],
            "leaving": [*self._leaving],
            "lost": [asdict(loss) for loss in self._lost.values()],
            "num_restarts": [*self._num_restarts.items()],
            "num_started": self._num_started,
            "finished": self._finished or self._stops,
            "max_restarts": self._max_restarts,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], store: str) -> MembershipDecider:
        """Return the decider of a `state`, with another store; workers that were to start are joiners."""
        decider = cls({k: WorkerPlace(**place) for k, place in state["places"].items()}, store, state["max_restarts"])
        decider.members, decider._effective = tuple(state["members"]), tuple(state["effective"])
        decider.losses = [LostWorker(**loss) for loss in state["losses"]]
        decider._lost = {loss["worker"]: LostWorker(**loss) for loss in state["lost"]}
        pending = None if state["pending"] is None else from_line(state["pending"])
        decider._pending = pending if isinstance(pending, MembershipChange) else None
        decider._why_not, decider._leaving = dict(state["why_not"]), list(state["leaving"])
        decider._joiners = dict.fromkeys(state["joiners"], False)
        decider._num_restarts = Counter(dict(state["num_restarts"]))
        decider._number, decider._num_started = state["number"], state["num_started"]
        decider._finished = decider._stops = state["finished"]
        return decider

    @property
    def changes(self) -> bool:
        """True while a change has not taken effect, or a worker is on its way in or out."""
        return bool(self._pending or self._joiners or self._leaving or self._to_start)

    def rank_of(self, worker: str) -> int:
        """Return the rank of a member, the one that a worker leaves, or the one that a joiner would get."""
        known = next((names for names in (self.members, self._effective) if worker in names), (*self.members, worker))
        return known.index(worker)

    def leaves(self, worker: str) -> bool:
        """Return True for a worker that was requested to leave: its end with exit code 0 is no loss."""
        return worker in self._leaving or (self._pending is not None and worker in self._pending.left)

    def why_not_without(self, workers: Sequence[str]) -> str:
        """Return why the run can't go on without these members; empty if it can."""
        survivors = [worker for worker in self._effective if worker not in workers and worker not in self._lost]
        if not survivors:
            return "no rank is left"
        if self._stops or (self._finished and not workers):
            return LOOP_ENDED
        return next((self._why_not[worker] for worker in survivors if self._why_not[worker]), "")

    # -- events -----------------------------------------------------------------------------------------------------------

    def capable(self, worker: str, why_not: str) -> list[Instruction]:
        if worker in self._why_not:
            self._why_not[worker] = why_not
        return []

    def lost(
        self, losses: Sequence[LostWorker], restart: bool = True, new_coordinator: bool = False
    ) -> list[Instruction]:
        """Members or joiners died or don't respond; without `restart` their places stay empty.

        `new_coordinator`: the members change in any case, because the store and the last change may be lost.
        """
        instructions: list[Instruction] = []
        lost_members = [loss for loss in losses if loss.worker in self._effective and loss.worker not in self._lost]
        lost_joiners = [loss for loss in losses if loss.worker in self._joiners]
        if lost_members and (why := self.why_not_without([loss.worker for loss in lost_members])):
            causes = [*(loss.reason for loss in lost_members), *(f"lost before: {loss.reason}" for loss in self.losses)]
            return [EndRun("\n".join([*causes, f"the run can't go on: {why}"]))]
        self.losses = [*self.losses, *lost_members][-_NUM_LOSSES:]
        in_admission = self._pending.joined if self._pending is not None else ()
        for loss in lost_joiners:
            del self._joiners[loss.worker]
            self._restart(loss, instructions, restart, "before it could join")
        if lost_joiners and not (self._joiners or self._to_start) and all(map(self.leaves, self.members)):
            self._leaving.clear()  # nobody has come in their place
        self._lost |= {loss.worker: loss for loss in lost_members}
        if self._finished:
            self.lost_late += [one.worker for one in lost_members if one.worker not in self.scripts_ended]
        for loss in lost_members:
            self._restart(loss, instructions, restart, "")
        if new_coordinator or lost_members or any(loss.worker in in_admission for loss in lost_joiners):
            instructions += self._change_urgently(lost_joiners)
        elif self._pending is None:
            instructions += self._starts()
        return instructions

    def ended(self, worker: str) -> list[Instruction]:
        """A worker that was requested to leave has ended; LostWorker says so to those that still expect it."""
        self._leaving = [other for other in self._leaving if other != worker]
        if worker not in self._effective or worker in self._lost:
            return []
        text = f"rank {self.rank_of(worker)} ({self.places[worker].device}) has left"
        self._lost[worker] = LostWorker(worker, text, 0.0)  # also for a change that replaces the one with which it left
        if self._pending is None or worker in self._pending.workers:
            if why := self.why_not_without([worker]):
                return [EndRun(f"{text}\nthe run can't go on: {why}")]
            return self._change_urgently(())
        return []

    def fields_of_joiner(self, start: StartWorker) -> dict[str, Any]:
        """Return the fields by which the `WorkerSpec` of a worker that is to join differs from its device's."""
        names = [self.places[name].device_name for name in self.members]
        return {
            "rank": len(self.members),
            "world_size": len(self.members) + 1,
            "workers": (*self.members, start.worker),
            "device_names": (*names, start.place.device_name),
            "generation": 0,
            "joining": True,
        }

    def ready(self, worker: str) -> list[Instruction]:
        if worker not in self._joiners:
            return [] if worker in (*self.members, *self._effective) else [EndWorker(worker)]
        self._joiners[worker] = True
        return self._change_at_boundary()

    def switched(self, worker: str, number: int) -> list[Instruction]:
        change = self._pending
        if change is None or number != change.number:
            return []
        self._switched.add(worker)
        if not self._switched.issuperset(change.workers):
            return []
        for joined in change.joined:
            self._joiners.pop(joined, None)
            self._why_not[joined] = ""
        for gone in {*self._effective} - {*change.workers}:
            del self._why_not[gone]
        self._effective, self._pending, self._lost = change.workers, None, {}
        return [*self._starts(), *self._change_at_boundary()]

    def request_leave(self, worker: str) -> list[Instruction]:
        if worker in self._joiners and not (self._pending is not None and worker in self._pending.joined):
            del self._joiners[worker]
            return [EndWorker(worker)]
        waiting = [start for start in self._to_start if start.worker == worker]
        if waiting:
            self._to_start.remove(waiting[0])
            return []
        if not self.leaves(worker):
            self._leaving.append(worker)
        return self._change_at_boundary()

    def request_join(self, place: WorkerPlace) -> list[Instruction]:
        self._to_start.append(self._successor(place, 0.0))
        return self._starts() if self._pending is None else []

    def finished(self, worker: str = "", goes_on: bool = False) -> list[Instruction]:
        """A script has ended, on `worker` if given: nobody can join any more; with `goes_on` others may be lost."""
        self._finished = True
        self._stops = self._stops or not (worker and goes_on)
        if worker:
            self.scripts_ended.add(worker)
        change = self._pending
        if change is not None and not change.urgent and worker in self._effective and worker not in self._switched:
            # All switch at the end of one step, and this worker has no further one.
            self._pending, self.members = None, self._effective
        joining = [worker for worker in self._joiners if worker not in self.members]
        for worker in joining:
            del self._joiners[worker]
        self._to_start.clear()
        return [EndWorker(worker) for worker in joining]

    # -- decisions --------------------------------------------------------------------------------------------------------

    def _change_urgently(self, lost_joiners: Sequence[LostWorker]) -> list[Instruction]:
        instructions: list[Instruction] = []
        replaced = self._pending
        for worker in replaced.joined if replaced is not None else ():
            if worker in self._joiners:
                # It may have joined already on some ranks: a fresh process is simpler than its way back.
                del self._joiners[worker]
                instructions.append(EndWorker(worker))
                self._to_start.append(self._successor(self.places[worker], 0.0))
        for worker in replaced.left if replaced is not None else ():
            if worker not in self._lost and worker not in self._leaving:
                self._leaving.append(worker)
        survivors = tuple(worker for worker in self._effective if worker not in self._lost)
        return [self._send(survivors, (*self._lost.values(), *lost_joiners), urgent=True), *instructions]

    def _change_at_boundary(self) -> list[Instruction]:
        """Return the change for all that are ready to join, or want to leave, now that no other is outstanding."""
        if self._pending is not None or self._finished:
            return []
        joined = [worker for worker, is_ready in self._joiners.items() if is_ready]
        left = [worker for worker in self._leaving if worker in self._effective]
        stay = [worker for worker in self._effective if worker not in left]
        if not stay:  # the first member waits until another has received its state
            stay, left = [left[0]], left[1:]
        if not joined and not left:
            return []
        self._leaving = [worker for worker in self._leaving if worker not in left]
        return [self._send((*stay, *joined), (), urgent=False)]

    def _send(self, workers: tuple[str, ...], lost: Sequence[LostWorker], urgent: bool) -> SendChange:
        self._number += 1
        places = [self.places[worker] for worker in workers]
        gone = {loss.worker for loss in lost}
        self._pending = MembershipChange(
            number=self._number,
            workers=workers,
            joined=tuple(worker for worker in workers if worker not in self._effective),
            lost=tuple(lost),
            left=tuple(worker for worker in self._effective if worker not in workers and worker not in gone),
            store=self.store,
            urgent=urgent,
            device_names=tuple(place.device_name for place in places),
            backend=common_backend([place.inner_backend for place in places]),
        )
        self._switched = set()
        self.members = workers
        return SendChange(self._pending, (*workers, *self._pending.left))

    def _restart(self, loss: LostWorker, instructions: list[Instruction], restart: bool, when: str) -> None:
        place = self.places[loss.worker]
        used = self._num_restarts[place.index]
        text = " ".join(filter(None, [loss.reason, when]))
        if loss.worker in self._effective:
            num_left = sum(1 for worker in self._effective if worker not in self._lost)
            text += f"; {num_left} rank{'s go' if num_left != 1 else ' goes'} on"
        if self._finished:
            text += f"; it is not restarted: {LOOP_ENDED}"
        elif self.leaves(loss.worker):
            self._leaving = [worker for worker in self._leaving if worker != loss.worker]
        elif restart and used < self._max_restarts:
            self._num_restarts[place.index] += 1
            self._to_start.append(self._successor(place, restart_delay_s(used)))
            text += f"; it is restarted ({used + 1} of {self._max_restarts})"
        elif restart:
            limit = f"its {used} restarts are used up" if used else "restarts are off"
            text += f"; it is not restarted: {limit} (--max-restarts {self._max_restarts})"
        else:
            text += "; it is not restarted"
        instructions.append(Notice(text))

    def _successor(self, place: WorkerPlace, delay_s: float) -> StartWorker:
        worker = f"worker-{self._num_started}"
        self._num_started += 1
        self.places[worker] = place
        return StartWorker(worker, place, delay_s)

    def _starts(self) -> list[Instruction]:
        starts, self._to_start = self._to_start, []
        if self._finished:
            return []
        self._joiners |= {start.worker: False for start in starts}
        return list(starts)
