"""Limit the balancer where steps are short: shares move on trial, and stay where the steps became shorter.

Short steps (blocks.py) scatter with heavy tails, and part of each rank's seconds depends on nothing but the moment: what else
ran on its core, how soon it woke up. A line through such seconds promises gains that don't come. So

* seconds below `LEAST_OWN_S` show no speed: shares stay, and one line says so where they would have moved;
* evidence is `_EVIDENCE` blocks under the present shares, and a gain must be one of the whole step, exchange included, in
  proportion to the samples that move: where most of a step is fixed, samples move far for little;
* the first move goes a small part of the way, at most `_TRIAL_PART` of any share. It stays if whole steps became surely shorter,
  by a quarter of what was expected at least (neighbours.py); then the next one goes all the way, and is judged likewise. A
  move that isn't confirmed is taken back, and the next trial comes later.
"""

from __future__ import annotations

from collections.abc import Sequence

from evenload.balance.decision import format_seconds
from evenload.balance.split import MayLeave, slowest_s
from evenload.balance.values import Cost

LEAST_OWN_S = 0.0005
LEAST_SAVED_S = 0.0001
"""A plan and the exchange of a step take about as long; they vary by as much."""
LEAST_GAIN = 0.05
_LEAST_CONFIRMED_GAIN = 0.02
"""Of the whole step. It is smaller once a move was confirmed: then the ranks are unequal for sure."""
_BIG_GAIN = 0.15
"""Expected gains as large are tried also where a batch has few samples, and one is more than `_TRIAL_PART` of a share."""
_TRIAL_PART = 0.095
_EVIDENCE, _EVIDENCE_CONFIRMED, _MUCH_EVIDENCE = 32, 12, 64
_LOOK_EVERY = 4
_LEAST_OF_EXPECTED = 0.25
"""Part of the expected gain that must come."""
_LEAST_OF_MOVED = 0.25
"""A move that takes a tenth from a share must make the whole step shorter by this part of a tenth."""

Key = tuple[tuple[int, ...], int]
"""Shares and K."""


class ShortSteps:
    def __init__(self) -> None:
        self.is_confirmed = False
        """True if a move made the steps as much shorter as expected, since a speed last changed."""
        self._note: str | None = None
        self._has_noted = False

    def take_note(self) -> str | None:
        """Return the line about steps that are too short to balance, once."""
        note, self._note = self._note, None
        return note

    def is_due(self, num_under: int, num_steps: int) -> bool:
        """Return whether there is evidence enough to look at.

        `num_under`: blocks under the present shares. `num_steps`: of which the ranks' costs are known.
        """
        least = _EVIDENCE_CONFIRMED if self.is_confirmed else _EVIDENCE
        return min(num_under, num_steps) >= least and num_under % _LOOK_EVERY == 0

    def allowed(
        self,
        now: Key,
        new: Key,
        costs: Sequence[Cost],
        may_leave: MayLeave,
        quantum: int,
        whole_s: float,
        num_steps: int,
    ) -> tuple[Key, float] | None:
        """Return how far to go from `now` to `new`, and the seconds that this must save; None to stay.

        `whole_s`: of a whole step. `num_steps`: as in `is_due`.
        """
        before_s = slowest_s(costs, *now, may_leave)
        saved_s = before_s - slowest_s(costs, *new, may_leave)
        if before_s < LEAST_OWN_S:
            if saved_s > LEAST_GAIN * before_s:
                self._note_once(before_s, whole_s)
            return None
        least_gain = _LEAST_CONFIRMED_GAIN if self.is_confirmed else LEAST_GAIN
        if saved_s < LEAST_SAVED_S or saved_s < whole_s * max(least_gain, _LEAST_OF_MOVED * _part_taken(now, new)):
            return None
        goal: Key | None = new
        if not self.is_confirmed:
            may_take_more = num_steps >= _MUCH_EVIDENCE and saved_s >= _BIG_GAIN * whole_s
            goal = _on_trial(now, new, costs, may_leave, whole_s, quantum, may_take_more)
        if goal is None:
            return None
        expected_s = before_s - slowest_s(costs, *goal, may_leave)
        return goal, max(_LEAST_OF_EXPECTED * expected_s, _LEAST_OF_MOVED * _part_taken(now, goal) * whole_s)

    def _note_once(self, before_s: float, whole_s: float) -> None:
        if not self._has_noted:
            self._has_noted = True
            self._note = (
                f"steps of {format_seconds(whole_s)} are too short to balance: no rank computes longer than "
                f"{format_seconds(before_s)} in one, which doesn't show its speed; the shares stay"
            )


def _on_trial(
    now: Key,
    new: Key,
    costs: Sequence[Cost],
    may_leave: MayLeave,
    whole_s: float,
    quantum: int,
    may_take_more: bool,
) -> Key | None:
    before_s = slowest_s(costs, *now, may_leave)
    near = _part_of_the_way(now[0], new[0], quantum), now[1]
    if before_s - slowest_s(costs, *near, may_leave) > _LEAST_CONFIRMED_GAIN * whole_s:
        return near
    if not may_take_more:
        return None
    # A sample is a large part of a share. The next one in the same direction, or all where it relieves no one.
    one = _part_of_the_way(now[0], new[0], quantum, at_least=quantum), now[1]
    return one if slowest_s(costs, *one, may_leave) < before_s else new


def _part_taken(now: Key, new: Key) -> float:
    """Return the largest part that a move takes from a share."""
    return max((1 - to / here for to, here in zip(new[0], now[0], strict=True) if here), default=0.0)


def _part_of_the_way(now: tuple[int, ...], new: tuple[int, ...], quantum: int, at_least: int = 0) -> tuple[int, ...]:
    """Return shares that differ from `now` by `_TRIAL_PART` of each at most, or by `at_least` samples."""
    limits = [max(_TRIAL_PART * share, at_least) for share in now]
    way = [there - here for there, here in zip(new, now, strict=True)]
    part = min([1.0, *(limit / abs(step) for limit, step in zip(limits, way, strict=True) if step)])
    moves = [int(part * step / quantum) * quantum for step in way]
    while surplus := sum(moves):
        # What was rounded down on one side is taken from the other.
        largest = max(range(len(moves)), key=lambda rank: moves[rank] if surplus > 0 else -moves[rank])
        moves[largest] -= quantum if surplus > 0 else -quantum
    return tuple(here + move for here, move in zip(now, moves, strict=True))
