"""Scale the learning rate of a grown batch during the optimizer's step, and restore it.

Schedulers, the user's code and checkpoints see only the rate that was set.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Optimizer

from evenload.balance.batch import rate_gain
from evenload.training.adaptive_batch.growth import BatchGrowth


class RateFollower:
    """Scales learning rates for one `BatchGrowth` by a rule of `batch_lr`."""

    def __init__(self, growth: BatchGrowth, rule: str) -> None:
        self._growth = growth
        self._rule = rule
        self._set: list[tuple[dict[str, Any], Any]] = []
        self.gains: dict[str, float] = {}
        """Factor of each kind of optimizer at its last step."""

    def gain(self, optimizer: Optimizer) -> float:
        """Return the factor of this epoch: a function of the batch and the noise scale, equal on all ranks."""
        return self._gain(isinstance(optimizer, SGD))

    def expected(self) -> dict[str, float]:
        return {name: self._gain(name == SGD.__name__) for name in self.gains}

    def before(self, optimizer: Optimizer) -> None:
        self.after()  # after a step that raised
        gain = self.gain(optimizer)
        self.gains[SGD.__name__ if isinstance(optimizer, SGD) else type(optimizer).__name__] = gain
        if gain == 1.0:
            return
        for group in (g for g in optimizer.param_groups if g.get("lr") is not None):
            self._set.append((group, group["lr"]))
            group["lr"] = group["lr"] * gain

    def after(self) -> None:
        for group, rate in self._set:
            group["lr"] = rate
        self._set = []

    def _gain(self, is_sgd: bool) -> float:
        rule = self._rule if self._rule != "auto" else "adascale" if is_sgd else "sqrt"
        now = self._growth.now
        return rate_gain(now.noise, self._growth.base, now.batch_size, rule=rule)
