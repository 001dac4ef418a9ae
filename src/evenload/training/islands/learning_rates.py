"""`LearningRates`: whether the islands' learning rates are still the same.

Where islands take equal steps, their schedules are equal as long as nothing of an island's own enters them: its loss differs
from that of the others, so a scheduler that steps by it sets other rates there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from evenload.errors import StepError


class LearningRates:
    """Of registered optimizers, and of schedulers by a metric."""

    def __init__(self, optimizers: Sequence[Optimizer], plateaus: Sequence[ReduceLROnPlateau]) -> None:
        self._optimizers = [*optimizers, *(one.optimizer for one in plateaus if one.optimizer not in optimizers)]
        self._plateaus = plateaus

    def row(self) -> tuple[float, float]:
        """Return a checksum that does not depend on the order of objects, and a rate to be shown."""
        groups = [group for one in self._optimizers for group in one.param_groups]
        rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
        # The best value so far differs long before the rate does.
        seen = [(float(one.best), one.num_bad_epochs) for one in self._plateaus]
        return float(sum(zlib.crc32(repr(value).encode()) for value in (*rates, *seen))), rates[0] if rates else 0.0

    @staticmethod
    def check(rows: Sequence[Sequence[float]], leaders: Sequence[int]) -> None:
        """Raise StepError unless the rows of all ranks, each as `row` returns it, are equal; all ranks have the same rows."""
        if len({row[0] for row in rows}) == 1:
            return
        shown = ", ".join(f"{rows[rank][1]:.6g}" for rank in leaders)
        raise StepError(
            f"the islands' schedules have parted (learning rates {shown}): something steps them by a value of an island alone, "
            "such as ReduceLROnPlateau by its loss. Step it with one value for all, such as that of run.reduce, after the loop"
        )
