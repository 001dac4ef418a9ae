"""Costs of a step on the present devices, for the queue: medians over the newest usual steps of one size."""

from __future__ import annotations

from collections import deque
from statistics import median

from evenload.balance.scaling import StepCosts
from evenload.training.adaptive_batch.growth import BatchGrowth
from evenload.training.step.step import Step

_NUM_STEPS = 32
_LEAST_STEPS = 3
"""No costs are reported of fewer steps: the first ones compile, and fill caches."""


class RecentSteps:
    def __init__(self) -> None:
        self._size: tuple[int, int, int] | None = None
        """Samples and micro-batches of a step, and number of ranks."""
        self._seconds: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS)
        """Of a step, and of the slowest rank's computing in it."""
        self._memory_bytes = 0
        self._cap = 0

    def add(self, step: Step) -> None:
        """Take a committed step; the shorter last step of an epoch, and unusual ones, don't count."""
        stats = step.stats.timed
        if stats is None or stats.unusual or (plan := stats.plan) is None:
            return
        size = plan.num_samples, plan.num_micro, plan.world_size
        if size != self._size:
            before = self._size
            is_short = before is not None and size[0] < before[0] and size[1:] == before[1:] and plan.step > 0
            if is_short and size[0] != step.loader.batch_size:
                return
            self._size = size
            self._seconds.clear()
        self._seconds.append((stats.whole_seconds(), max(stats.own_seconds())))
        self._memory_bytes = step.stats.most_memory_bytes
        self._cap = min((cap for cap in step.planner.assignments[-1].caps if cap is not None), default=0)

    def costs(self, growth: BatchGrowth | None) -> StepCosts | None:
        """Return the costs; None before enough steps. `growth` chooses the batch, None where it is fixed."""
        if self._size is None or len(self._seconds) < _LEAST_STEPS:
            return None
        num_samples, num_micro, _ = self._size
        step_s, compute_s = (median(column) for column in zip(*self._seconds, strict=True))
        if not step_s > 0:
            return None
        base, limit, noise = (0, 0, None) if growth is None else (growth.base, growth.limit, growth.noise_samples)
        return StepCosts(
            num_samples,
            num_micro,
            min(compute_s, step_s),
            step_s,
            memory_bytes=self._memory_bytes,
            cap=self._cap,
            base_batch=base,
            max_batch=limit,
            noise_samples=noise,
        )
