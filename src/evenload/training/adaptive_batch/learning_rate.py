"""The learning rate of a batch that has grown: multiplied while the optimizer steps, and put back.

Nobody else sees it: a scheduler, the user's own code and checkpoints find the rate that was set.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Optimizer

from evenload.balance.batch import rate_gain
from evenload.training.adaptive_batch.growth import BatchGrowth


class RateFollower:
    """Follows one `BatchGrowth` by one of config's rules of `batch_lr`."""

    def __init__(self, growth: BatchGrowth, rule: str) -> None:
        self._growth = growth
        self._rule = rule
        self._set: list[tuple[dict[str, Any], Any]] = []
        self.gains: dict[str, float] = {}
        """The factor of each kind of optimizer that has stepped, as of its last step."""

    def gain(self, optimizer: Optimizer) -> float:
        """The factor of this epoch: a function of the batch and the noise scale that all ranks heard."""
        return self._gain(isinstance(optimizer, SGD))

    def expected(self) -> dict[str, float]:
        """The factors of now, for the optimizers that have stepped."""
        return {name: self._gain(name == SGD.__name__) for name in self.gains}

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self.after()  # a step that raised has not been told as done
        gain = self.gain(optimizer)
        self.gains[SGD.__name__ if isinstance(optimizer, SGD) else type(optimizer).__name__] = gain
        if gain == 1.0:
            return
        for group in (g for g in optimizer.param_groups if g.get("lr") is not None):
            self._set.append((group, group["lr"]))
            group["lr"] = group["lr"] * gain

    def after(self) -> None:
        """It has stepped: the rates are as they were set."""
        for group, rate in self._set:
            group["lr"] = rate
        self._set = []

    def _gain(self, is_sgd: bool) -> float:
        rule = self._rule if self._rule != "auto" else "adascale" if is_sgd else "sqrt"
        now = self._growth.now
        return rate_gain(now.noise, self._growth.base, now.batch_size, rule=rule)
