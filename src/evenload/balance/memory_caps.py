"""Limits on micro-batches that follow from running out of memory: one retry, then half down to one sample; higher again on trial.

No clock, no I/O: where the calls are the same on all ranks, the caps are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenload.balance.split import num_micro

RETRY_EVERY = 32
"""Steps. Memory in pieces comes back in a step or two where the sizes still change, and then the retries would cost more than
smaller micro-batches."""
FIRST_TRIAL = 200
"""Steps without a failure before a higher cap is tried."""
SINGLE_TRIES = 3
"""Times that one sample must not fit in a step before the model counts as too big: another process may hold the memory."""
_LONGER = 4
"""A trial that failed, at the cost of one repeated step, makes the steps before the next so many times as long."""


@dataclass(frozen=True)
class _Trial:
    before: tuple[int | None, ...]
    caps: tuple[int | None, ...]


class MemoryCaps:
    def __init__(self, limits: Sequence[int | None]) -> None:
        """Args:
        limits: the user's caps by rank, which no trial exceeds.
        """
        self._limits = tuple(limits)
        self._interval = FIRST_TRIAL
        self._changed_at = 0
        self._retried_at: int | None = None
        self._trial: _Trial | None = None
        self._single = -1, 0
        """The last step in which one sample did not fit, and how often."""

    def may_retry(self, step: int) -> bool:
        """Return whether a step is repeated as it is, after free blocks were returned to the device."""
        allowed = self._retried_at is None or step - self._retried_at >= RETRY_EVERY
        if allowed:
            self._retried_at = step
        return allowed

    def gives_up(self, step: int) -> bool:
        """Return whether a step in which one sample did not fit, again, can't be repeated any more."""
        self._single = step, self._single[1] + 1 if self._single[0] == step else 1
        return self._single[1] >= SINGLE_TRIES

    def lower(self, caps: Sequence[int | None], largest: Sequence[int | None], step: int) -> tuple[int | None, ...]:
        """Return the caps from now on, after ranks ran out of memory.

        Args:
            caps: the present ones.
            largest: samples of the largest micro-batch of each rank that ran out; None for the others.
            step: the present one.
        """
        self._changed_at = step
        trial, self._trial = self._trial, None
        if trial is not None and tuple(caps) == trial.caps:
            self._interval *= _LONGER
            if all(size is None or size > (cap or size) for size, cap in zip(largest, trial.before, strict=True)):
                return trial.before
        return tuple(cap if size is None else max(size // 2, 1) for cap, size in zip(caps, largest, strict=True))

    def trial(self, caps: Sequence[int | None], shares: Sequence[int], step: int) -> tuple[int | None, ...] | None:
        """Return higher caps to be tried, the lowest that save a micro-batch; None if it is too early or nothing is saved."""
        if caps is self._limits or caps == self._limits:
            return None  # none was lowered
        count = num_micro(tuple(shares), tuple(caps))
        if step - self._changed_at < self._interval or count < 2:
            return None
        raised = tuple(
            cap if cap is None or cap == limit else min(max(cap, -(-share // (count - 1))), limit or share)
            for cap, limit, share in zip(caps, self._limits, shares, strict=True)
        )
        if num_micro(tuple(shares), raised) >= count:
            return None
        self._changed_at = step
        self._trial = _Trial(tuple(caps), raised)
        return raised
