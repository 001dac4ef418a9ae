"""Decide when a rank that has left the steps is tried again. No clock, no I/O.

A rank that is out reports no times, so nothing tells whether it became faster, except to let it return for a few steps. That
costs: its state must be sent to it, and where it is still slow the others wait for it. So trials are paid from a budget, a small
part (`BUDGET`) of the seconds that the job trains while ranks are out: over any long time they cost no more than that, and at
most two trials besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evenload.balance.decision import LEAD_STEPS, Observation, Seconds
from evenload.balance.first_look import HOPELESS, LEAST_S
from evenload.balance.split import Caps, Split, split_batch
from evenload.balance.values import Cost
from evenload.errors import ConfigError

BUDGET = 0.01
"""Part of the time that trials may cost."""
FIRST_TRIAL_AFTER = 128
"""Steps without a rank before its first trial; doubles with each that fails."""
_MOST_STEPS = 1 << 20
TRIAL_STEPS = 4
"""Steps of a trial; the first doesn't count, because the rank allocates and warms up."""
_UNCERTAINTY = 0.02
"""Relative, times the square root of the steps without the rank."""


@dataclass
class _Absence:
    num_steps: int = 0
    is_asked: bool = False
    is_recalled: bool = False


@dataclass
class ReturnTrial:
    """A rank that is tried, and how the job ran without it."""

    rank: int
    shares: tuple[int, ...]
    """Those of the trial."""
    before: tuple[tuple[int, ...], int]
    """Shares and K without the rank."""
    usual_s: float
    """Seconds of a step without it."""
    num_seen: int = 0
    num_waiting: int = 0
    is_hopeless: bool = False
    _num_steps: int = 0
    _num_paid: int = 0
    _own_s: float = 0.0
    """Of the rank in the steps after the first."""

    @property
    def is_over(self) -> bool:
        return self.num_seen >= TRIAL_STEPS or self.is_hopeless

    def ends_with(self, seen: Observation) -> bool:
        """Count a step, where short ones are merged too; return whether the trial ends with it because the rank is hopeless.

        One short step shows what happened beside it: steps of the rank that take less than `LEAST_S` are taken together.
        """
        own_s = seen.seconds[self.rank] if seen.shares == self.shares else None
        if own_s is None:
            return False
        self._num_steps += 1
        if self._num_steps == 1:
            return False
        self._own_s += own_s
        self.is_hopeless = self._own_s > max(LEAST_S, HOPELESS * self.usual_s * (self._num_steps - 1))
        if self.is_hopeless:
            self.num_seen = max(self.num_seen, 1)  # the first step was not in a block yet
        return self.is_hopeless

    def extra_s(self, step_s: float) -> float:
        """Return by how much the steps since the last call took longer than usual ones, at `step_s` each."""
        num_steps, self._num_paid = self._num_steps - self._num_paid, self._num_steps
        return num_steps * (step_s - self.usual_s)


class LeftOut:
    """The ranks that are out, and the budget of their trials."""

    def __init__(self, world_size: int) -> None:
        self.price_s = 0.0
        """Seconds that a return and the leaving after it cost besides the steps of a trial: the transfer of the state."""
        self._absences: dict[int, _Absence] = {}
        self._waits = [FIRST_TRIAL_AFTER] * world_size
        self._credit_s = 0.0
        self._dearest_s = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._absences))

    def __contains__(self, rank: int) -> bool:
        return rank in self._absences

    def observe(self, seconds: Seconds, step_s: float) -> None:
        """Add a step: the ranks without seconds are out."""
        for rank, time_s in enumerate(seconds):
            if time_s is not None:
                self._absences.pop(rank, None)
            else:
                self._absences.setdefault(rank, _Absence()).num_steps += 1
        if self._absences:
            # What wasn't spent for long is no reason for many trials at once.
            self._credit_s = min(self._credit_s + BUDGET * step_s, max(self._dearest_s, self.price_s))
            self._dearest_s = max(self._dearest_s, self.price_s)

    def ask(self, rank: int) -> None:
        """Try a rank at once, as far as the budget isn't overdrawn: its speed may have changed."""
        if rank in self._absences:
            self._absences[rank].is_asked = True

    def ask_if_faster(self, everyone: Split, than_s: float) -> None:
        """Try ranks that are out at once where `everyone`, a split by what was last known, takes less: others are slower now."""
        for rank in self.ranks if everyone.expected_s < than_s else ():
            if everyone.shares[rank]:
                self.ask(rank)

    def recalled(self, may_leave: Sequence[bool]) -> int | None:
        """Return a rank that is out and may not be any more, once."""
        for rank, absence in self._absences.items():
            if not may_leave[rank] and not absence.is_recalled:
                absence.is_recalled = True
                return rank
        return None

    def paid(self, seconds: float) -> None:
        """Take what a return really cost, beside the steps; it is the price of the next one."""
        self._credit_s -= seconds - self.price_s
        self.price_s = seconds

    def due(self, own_s: Callable[[int], float], step_s: float) -> int | None:
        """Return the rank to try now; `own_s` are its seconds for its share of a trial step, `step_s` those of a usual one."""
        for rank in sorted(self._absences, key=lambda r: -self._absences[r].num_steps):
            absence = self._absences[rank]
            time_s = own_s(rank)
            num_steps = TRIAL_STEPS + LEAD_STEPS
            if time_s > HOPELESS * step_s:  # the first, those that show it, and one until the next shares hold
                num_steps = 2 + math.ceil(LEAST_S / time_s)
            price_s = self.price_s + num_steps * max(0.0, time_s - step_s)
            if absence.is_asked:
                if self._credit_s >= 0:
                    return rank
            elif absence.num_steps >= self._waits[rank]:
                self._dearest_s = max(self._dearest_s, price_s)
                if self._credit_s >= price_s:
                    return rank
        return None

    def begin(self, rank: int) -> None:
        self._absences[rank] = _Absence()
        self._credit_s -= self.price_s

    def charge(self, seconds: float) -> None:
        """Take from the budget what steps of a trial took longer than usual ones."""
        self._credit_s -= max(0.0, seconds)

    def end(self, rank: int, *, returned: bool) -> None:
        self._waits[rank] = FIRST_TRIAL_AFTER if returned else min(2 * self._waits[rank], _MOST_STEPS)

    def split(
        self,
        num_samples: int,
        costs: Sequence[Cost],
        caps: Caps,
        num_micro: int | None,
        quantum: int,
        may_leave: Sequence[bool],
    ) -> Split:
        """Split over the ranks that are not out."""
        ranks = [rank for rank in range(len(costs)) if rank not in self]
        limits = None if caps is None else [caps[rank] for rank in ranks]
        leaves = [may_leave[rank] for rank in ranks]
        found = split_batch(num_samples, [costs[rank] for rank in ranks], limits, num_micro, quantum, leaves)
        shares = dict(zip(ranks, found.shares, strict=True))
        return replace(found, shares=tuple(shares.get(rank, 0) for rank in range(len(costs))))

    def aged(self, rank: int, cost: Cost) -> Cost:
        """Return a cost with the uncertainty that has grown since the rank left."""
        absence = self._absences.get(rank)
        if absence is None:
            return cost
        error_s = _UNCERTAINTY * cost.per_sample_s * absence.num_steps**0.5
        return Cost(cost.per_micro_s, cost.per_sample_s, (cost.per_sample_error_s**2 + error_s**2) ** 0.5)


def check_may_leave(may_leave: Sequence[bool] | None, world_size: int) -> tuple[bool, ...]:
    """Return who may leave; ConfigError where rank 0 may, or the number is wrong."""
    flags = tuple(may_leave) if may_leave is not None else (False,) * world_size
    if len(flags) != world_size or flags[0]:
        raise ConfigError(f"may_leave {flags} for {world_size} ranks: expected one for each, and that rank 0 stays")
    return flags
