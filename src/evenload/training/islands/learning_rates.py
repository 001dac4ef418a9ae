"""`LearningRates`: whether the islands' learning rates are still the same.

Where islands take equal steps, their schedules are equal as long as nothing of an island's own enters them: its loss differs
from that of the others, so a scheduler that steps by it sets other rates there. Rounding does not count: unlike machines
compute the cosine of a schedule with other last digits, which grow where the rate comes near 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from evenload.errors import StepError

NUM_VALUES = 3
"""Length of a row."""
_MOST_ROUNDED = 1e-4
"""Largest difference that counts as rounding, as a part of the highest rate or of the metric."""


class LearningRates:
    """Of registered optimizers, and of schedulers by a metric."""

    def __init__(self, optimizers: Sequence[Optimizer], plateaus: Sequence[ReduceLROnPlateau]) -> None:
        self._optimizers = [*optimizers, *(one.optimizer for one in plateaus if one.optimizer not in optimizers)]
        self._plateaus = plateaus
        self._highest = 0.0

    def row(self) -> tuple[float, float, float]:
        """Return the mean rate, the highest that it was so far, and the sum of the best metrics, whose signs do not count."""
        groups = [group for one in self._optimizers for group in one.param_groups if group.get("lr") is not None]
        rate = fmean([float(group["lr"]) for group in groups] or [0.0])
        first = fmean([float(group.get("initial_lr", group["lr"])) for group in groups] or [0.0])
        self._highest = max(self._highest, rate, first)
        # The best value so far differs long before the rate does.
        bests = [abs(float(one.best)) for one in self._plateaus]
        return rate, self._highest, math.fsum(best for best in bests if math.isfinite(best))

    @staticmethod
    def check(rows: Sequence[Sequence[float]], leaders: Sequence[int]) -> None:
        """Raise StepError unless the rows of all ranks, each as `row` returns it, are equal; all ranks have the same rows."""
        first, highest, best = rows[0]
        for rate, _, seen in rows:
            if abs(rate - first) > _MOST_ROUNDED * highest or not math.isclose(seen, best, rel_tol=_MOST_ROUNDED):
                shown = ", ".join(f"{rows[rank][0]:.6g}" for rank in leaders)
                raise StepError(
                    f"the islands' schedules have parted (learning rates {shown}): something steps them by a value of an island "
                    "alone, such as ReduceLROnPlateau by its loss. Step it with one value for all, such as that of run.reduce, "
                    "after the loop"
                )
