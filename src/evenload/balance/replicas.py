"""Decide which replicas of one process are worth using. No clock, no I/O, as in rebalance.py.

Replicas share an interpreter, and often cores and memory, so one may take more from the others than it gives. Nobody's own
seconds show that, so it is tried, on steps that count like all others:

* **In turns**: for two steps only one replica computes at a time. What it needs then, and how long it is blocked meanwhile, is
  undisturbed by the others; what it is blocked longer side by side it waits for the interpreter. Separate processes would
  not. (Slower on the processor, by shared memory or caches, they would be too.)
* **Without one**: for a few steps the replica with the smallest share gets no samples. If the steps are as fast, and are so
  again in a second trial, it is left out; after a long while it is tried again.

A replica without samples does nothing at all (in separate processes it would compute one that doesn't count), so shares
among the others are those of a `Balancer` that knows only them.

Short steps scatter with heavy tails (blocks.py), so their trials last longer. One without a replica is made only where the times
in turns promise a gain, and the replica is left out only if the steps became surely shorter: by the least gain of
short_steps.py, and by more than the noise.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from evenload.balance.blocks import BLOCK_S
from evenload.balance.contention import TURNS, Contention, ReplicaObservation, contention
from evenload.balance.decision import Decision, Observation
from evenload.balance.neighbours import mean_and_error
from evenload.balance.rebalance import Balancer
from evenload.balance.short_steps import LEAST_GAIN, LEAST_OWN_S, LEAST_SAVED_S
from evenload.balance.split import Caps, even_shares, num_micro, split_batch
from evenload.balance.values import Cost
from evenload.errors import ConfigError

LEAST_HELP = 0.02
"""A replica stays if the steps are at least this part shorter with it."""
_SETTLED = 8
"""So many steps under the same shares, before anything is tried."""
_LOOK_EVERY = 16
_TRIAL = 5
"""Steps without a replica; the first doesn't count."""
_SETTLED_S, _TRIAL_S, _TURNS_S = 0.8, 0.5, 0.1
"""The same for short steps, in seconds together; by then the last move of the `Balancer` has been judged."""
_MOST_STEPS = 2048
_SURE = 3.0
"""Standard errors by which short steps must be shorter."""
_LOST_AFTER = 32
_RETRY_AFTER = 1000


@dataclass(frozen=True)
class _ReplicaTrial:
    """Steps under other shares, to see what a replica is worth."""

    rank: int
    returns: bool
    """It was left out and is let in; else the other way round."""
    shares: tuple[int, ...]
    num_micro: int
    usual_s: float
    """Median seconds of the steps before; of short steps the mean."""
    usual_error_s: float
    """Standard error of the mean of short steps; 0 of others."""
    num_steps: int


class ReplicaBalancer:
    def __init__(
        self,
        num_samples: int,
        num_replicas: int,
        caps: Caps = None,
        *,
        shares: tuple[int, ...] | None = None,
        num_micro_batches: int | None = None,
        adapts: bool = True,
    ) -> None:
        """As `Balancer`; a replica with a share of 0 samples is left out.

        Without ``adapts`` shares never move, and only the contention is measured.
        """
        self.num_samples = num_samples
        self.shares = shares or even_shares(num_samples, num_replicas)
        if len(self.shares) != num_replicas or sum(self.shares) != num_samples:
            raise ConfigError(
                f"shares {self.shares} sum to {sum(self.shares)}: expected {num_replicas} of them, {num_samples} in sum"
            )
        self.num_micro = num_micro_batches or num_micro(self.shares, caps)
        self.quantum = 1
        self._caps: tuple[int | None, ...] = tuple(caps) if caps is not None else (None,) * num_replicas
        self._adapts = adapts
        self._costs: list[Cost | None] = [None] * num_replicas
        self._recent: deque[ReplicaObservation] = deque(maxlen=_MOST_STEPS)
        self._turns: list[ReplicaObservation] = []
        self._turns_left = 0
        self._contention: Contention | None = None
        self._alone: dict[int, Cost] | None = None
        """Of each replica in turns, as if all of it were its samples'; None until then."""
        self._side_by_side_s = 0.0
        self._note: str | None = None
        self._has_noted = False
        self._trial: _ReplicaTrial | None = None
        self._tried: list[ReplicaObservation] = []
        self._num_settled = 0
        self._num_waiting = 0
        self._settled_on: set[tuple[int, ...]] = set()
        self._doubted: int | None = None
        self._since_left_out = 0
        self._active: tuple[int, ...] = ()
        self._inner: Balancer | None = None
        self._begin_with(self.shares, self.num_micro, num_warmup=1)

    @property
    def costs(self) -> tuple[Cost, ...] | None:
        known = tuple(cost for cost in self._costs if cost is not None)
        return known if len(known) == len(self._costs) else None

    @property
    def foresees(self) -> bool:
        """As of `Balancer`."""
        return self._inner is None or self._inner.foresees

    @property
    def rest_s(self) -> float:
        """As of `Balancer`."""
        return self._inner.rest_s if self._inner is not None else 0.0

    @property
    def takes_turns(self) -> bool:
        return self._turns_left > 0

    def take_note(self) -> str | None:
        """Return the line about steps that are too short to balance, once."""
        note, self._note = self._note, None
        return note

    def take_contention(self) -> Contention | None:
        """Return what was found since the last call, once."""
        found, self._contention = self._contention, None
        return found

    def observe(self, seen: ReplicaObservation) -> Decision | None:
        """Add one step, in order; return new shares where they pay or are to be tried."""
        if seen.left_out or sum(seen.shares) != self.num_samples:
            return None
        if seen.in_turns:
            self._take_turn(seen)
            return None
        if self._trial is not None:
            return self._observe_trial(self._trial, seen)
        if any(bool(share) != (rank in self._active) for rank, share in enumerate(seen.shares)):
            self._lost(seen)
            return None
        decision = self._ask(seen)
        if decision is not None:
            return decision
        if (seen.shares, seen.num_micro) != (self.shares, self.num_micro):
            return None
        if self._recent and self._recent[-1].num_micro != seen.num_micro:
            self._recent.clear()
        self._recent.append(seen)
        self._since_left_out += 1
        self._num_settled = self._num_settled + 1 if len(self._recent) > 1 else 1
        is_due = self._num_settled % (_SETTLED if self._alone is None else _LOOK_EVERY) == 0
        if not is_due or self._num_settled < self._num_needed(_SETTLED, _SETTLED_S):
            return None
        return self._try_something()

    def set_caps(self, caps: Caps) -> Decision | None:
        """Set new limits of memory; return shares that keep them if the present ones don't."""
        if caps is None:
            return None
        self._caps = tuple(caps)
        trial, self._trial = self._trial, None
        if self._inner is None:
            return self._back(trial) if trial is not None else None
        decision = self._inner.set_caps([caps[rank] for rank in self._active])
        if decision is not None:
            return self._widened(decision)
        return self._back(trial) if trial is not None else None

    # -- shares ---------------------------------------------------------------------------------------------------------

    def _begin_with(self, shares: tuple[int, ...], count: int, num_warmup: int = 0) -> None:
        self.shares, self.num_micro = shares, count
        self._active = tuple(rank for rank, share in enumerate(shares) if share)
        self._recent.clear()
        self._turns.clear()
        self._turns_left = 0
        self._since_left_out = 0
        self._inner = None
        if self._adapts and len(self._active) > 1:
            self._inner = Balancer(
                self.num_samples,
                len(self._active),
                [self._caps[rank] for rank in self._active],
                shares=tuple(shares[rank] for rank in self._active),
                num_micro_batches=count,
                num_warmup=num_warmup,
            )

    def _ask(self, seen: ReplicaObservation) -> Decision | None:
        if self._inner is None:
            return None
        decision = self._inner.observe(
            Observation(
                seen.step,
                tuple(seen.shares[rank] for rank in self._active),
                seen.num_micro,
                tuple(seen.own_s[rank] for rank in self._active),
                seen.step_s or seen.together_s,
            )
        )
        if (note := self._inner.take_note()) is not None and not self._has_noted:
            self._note, self._has_noted = note, True
        if (costs := self._inner.costs) is not None:
            for rank, cost in zip(self._active, costs, strict=True):
                self._costs[rank] = cost
        return self._widened(decision) if decision is not None else None

    def _widened(self, decision: Decision) -> Decision:
        """Extend a decision on the active replicas to all."""
        shares = [0] * len(self.shares)
        for rank, share in zip(self._active, decision.shares, strict=True):
            shares[rank] = share
        about = None if decision.rank is None else self._active[decision.rank]
        wide = replace(decision, shares=tuple(shares), rank=about)
        if 0 in decision.shares:
            self._begin_with(wide.shares, wide.num_micro)
        else:
            self.shares, self.num_micro = wide.shares, wide.num_micro
            self._recent.clear()
            self._turns_left = 0
        return wide

    def _lost(self, seen: ReplicaObservation) -> None:
        """Count steps of another set of replicas than was decided: normal for the lead of a decision, but not for long."""
        self._num_waiting += 1
        if self._num_waiting > _LOST_AFTER:
            self._num_waiting = 0
            self._begin_with(seen.shares, seen.num_micro)

    # -- what is tried --------------------------------------------------------------------------------------------------

    def _try_something(self) -> Decision | None:
        self._num_waiting = 0
        if self._alone is None and len(self._active) > 1:
            self._turns_left = self._num_needed(TURNS, _TURNS_S)
            return None
        if not self._adapts or (self._inner is not None and self._inner.costs is None):
            return None
        may_pay = len(self._active) > 1 and self._active not in self._settled_on
        if may_pay and (not self._is_short or self._may_be_shorter_without()):
            rank = self._smallest()
            return self._begin_trial(rank, [r for r in self._active if r != rank], returns=False)
        if self._since_left_out >= _RETRY_AFTER and len(self._active) < len(self.shares):
            self._since_left_out = 0
            absent = [r for r in range(len(self.shares)) if r not in self._active]
            if absent:
                rank = min(absent, key=lambda r: (self._cost_of(r).per_sample_s, r))
                return self._begin_trial(rank, sorted([*self._active, rank]), returns=True)
        return None

    def _cost_of(self, rank: int) -> Cost:
        cost = self._costs[rank]
        if cost is not None:
            return cost
        # Never measured (left out since a resume, or alone from the beginning): as fast as what there is.
        return Cost(0.0, max(self._usual_s(), 1e-9) / self.num_samples)

    def _usual_s(self) -> float:
        newest = itertools.islice(reversed(self._recent), 2 * _SETTLED)
        return median(seen.together_s for seen in newest) if self._recent else 0.0

    @property
    def _is_short(self) -> bool:
        return bool(self._recent) and self._usual_s() < BLOCK_S

    def _num_needed(self, usual: int, least_s: float) -> int:
        """Return how many steps show something: `usual`, of short ones those of `least_s` seconds."""
        if not self._is_short:
            return usual
        return min(max(usual, math.ceil(least_s / max(self._usual_s(), 1e-9))), _MOST_STEPS)

    def _newest(self, usual: int, least_s: float) -> list[ReplicaObservation]:
        return list(self._recent)[-self._num_needed(usual, least_s) :]

    def _smallest(self) -> int:
        return min(self._active, key=lambda r: (self.shares[r], -r))

    def _may_be_shorter_without(self) -> bool:
        """Return whether the smallest share might be left out of short steps, by what the others need in turns."""
        costs = [cost for r, cost in (self._alone or {}).items() if r in self._active and r != self._smallest()]
        with_s = min(self._side_by_side_s, fmean(seen.together_s for seen in self._newest(_TRIAL, _TRIAL_S)))
        if not costs or with_s < LEAST_OWN_S:
            return False
        return with_s - split_batch(self.num_samples, costs).expected_s > max(LEAST_SAVED_S, LEAST_GAIN * with_s)

    def _begin_trial(self, rank: int, active: Sequence[int], *, returns: bool) -> Decision | None:
        caps = [self._caps[r] for r in active]
        if None not in caps and sum(cap for cap in caps if cap is not None) < 1:
            return None
        split = split_batch(self.num_samples, [self._cost_of(r) for r in active], caps)
        shares = [0] * len(self.shares)
        for r, share in zip(active, split.shares, strict=True):
            shares[r] = share
        if returns and not shares[rank]:
            return None
        usual_s, error_s, num_steps = self._usual_s(), 0.0, self._num_needed(_TRIAL, _TRIAL_S)
        if self._is_short:
            usual_s, error_s = mean_and_error([seen.together_s for seen in self._newest(_TRIAL, _TRIAL_S)])
        self._trial = _ReplicaTrial(rank, returns, tuple(shares), split.num_micro, usual_s, error_s, num_steps)
        self._tried.clear()
        self._num_waiting = 0
        return Decision(tuple(shares), split.num_micro, "trial", rank, None, "", usual_s, split.expected_s)

    def _observe_trial(self, trial: _ReplicaTrial, seen: ReplicaObservation) -> Decision | None:
        if seen.shares != trial.shares:
            self._num_waiting += 1
            if self._num_waiting > _LOST_AFTER:
                self._trial = None
            return None
        self._tried.append(seen)
        if len(self._tried) < trial.num_steps:
            return None
        tried_s = median(one.together_s for one in self._tried[1:])
        helps = (
            tried_s <= (1 - LEAST_HELP) * trial.usual_s
            if trial.returns
            else trial.usual_s <= (1 - LEAST_HELP) * tried_s
        )
        if trial.usual_error_s:
            tried_s, error_s = mean_and_error([one.together_s for one in self._tried[1:]])
            least_s = max(LEAST_SAVED_S, LEAST_GAIN * trial.usual_s, _SURE * math.hypot(error_s, trial.usual_error_s))
            helps = (trial.usual_s - tried_s > least_s) == trial.returns
        with_s, without_s = (tried_s, trial.usual_s) if trial.returns else (trial.usual_s, tried_s)
        self._trial = None
        everyone = tuple(sorted({*self._active, trial.rank}))
        if not trial.returns and not helps and self._doubted != trial.rank:
            # The machine may have been disturbed: to lose a device for long takes two trials that agree.
            self._doubted = trial.rank
            return self._back(trial)
        self._doubted = None
        if helps != trial.returns:
            self._settled_on.add(everyone)
            return self._back(trial)
        old = self.shares[trial.rank]
        self._begin_with(trial.shares, trial.num_micro)
        new = trial.shares[trial.rank]
        kind = "returned" if trial.returns else "left_out"
        what = "helps again" if trial.returns else "only slows the rest"
        reason = (
            f"rank {trial.rank} {what}: {_seconds(with_s)} a step with it, {_seconds(without_s)} without: share {old} → "
            f"{new} of {self.num_samples}"
        )
        return Decision(
            trial.shares,
            trial.num_micro,
            kind,
            trial.rank,
            None,
            reason,
            *((without_s, with_s) if new else (with_s, without_s)),
        )

    def _back(self, trial: _ReplicaTrial) -> Decision:
        self._recent.clear()
        return Decision(self.shares, self.num_micro, "trial", trial.rank, None, "", trial.usual_s, trial.usual_s)

    # -- contention -----------------------------------------------------------------------------------------------------

    def _take_turn(self, seen: ReplicaObservation) -> None:
        if not self._turns_left:
            return
        self._turns_left -= 1
        if self._recent and seen.shares == self._recent[-1].shares:
            self._turns.append(seen)
        if self._turns_left or not self._turns:
            return
        self._contention = contention(self._newest(2 * _SETTLED, _TRIAL_S), self._turns)
        self._side_by_side_s = self._contention.side_by_side_s
        times_s = zip(self._turns[0].shares, self._contention.alone_s, strict=True)
        self._alone = {r: Cost(0.0, time_s / share) for r, (share, time_s) in enumerate(times_s) if share}
        self._turns.clear()


def _seconds(time_s: float) -> str:
    return f"{time_s:.3g} s" if time_s >= 1 else f"{time_s * 1e3:.3g} ms"
