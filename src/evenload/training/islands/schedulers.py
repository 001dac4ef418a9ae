"""Set schedulers to the global step where islands take unequal numbers of steps, so that no schedule depends on devices.

The user's loop calls ``scheduler.step()`` in each of an island's h steps, which stand for L global steps. At their end the
scheduler returns to where it was and makes L steps, as it would on one device.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenload.errors import StepError


class FollowedScheduler:
    """A scheduler, and its state when the island's steps began."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        parts = getattr(scheduler, "_schedulers", [])
        self._parts: list[LRScheduler] = [scheduler, *parts]
        self._states: list[dict[str, Any]] = []
        self._groups: list[dict[str, Any]] = []
        self.begin()

    def begin(self) -> None:
        """Note where it stands before the first of an island's steps."""
        # The inner schedulers of a SequentialLR are saved as parts of their own.
        self._states = [
            copy.deepcopy({key: value for key, value in vars(part).items() if key not in ("optimizer", "_schedulers")})
            for part in self._parts
        ]
        groups = self._scheduler.optimizer.param_groups
        self._groups = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in groups]

    @property
    def num_steps(self) -> int:
        """Steps since `begin`."""
        # A ChainedScheduler counts only in its parts.
        return max(
            int(part.last_epoch) - int(state.get("last_epoch", 0))
            for part, state in zip(self._parts, self._states, strict=True)
            if hasattr(part, "last_epoch")
        )

    def end(self, num_batches: int, num_steps: int, *, left_early: bool) -> None:
        """Set it `num_steps` after `begin`, if it stepped once for each of an island's batches; one between loops stays.

        Raises:
            StepError: it stepped in some of the batches alone, or by a metric.
        """
        made = self.num_steps
        name = type(self._scheduler).__name__
        if made and isinstance(self._scheduler, ReduceLROnPlateau):
            raise StepError(
                f"{name} was stepped inside the loop, where each island has a loss of its own and, with local_steps='auto', as "
                "many steps as its speed allows: the islands' learning rates would part. Call it once an epoch, after the loop, "
                "with one value for all, such as that of run.reduce"
            )
        if made == 0 or made == num_batches == num_steps or (left_early and made != num_batches):
            return
        if made != num_batches:
            raise StepError(
                f"{name} made {made} steps in the {num_batches} steps of an island; with local_steps='auto' call "
                "scheduler.step() once in each loop body, or once an epoch after the loop"
            )
        for part, state in zip(self._parts, self._states, strict=True):
            vars(part).update(copy.deepcopy(state))
        for group, values in zip(self._scheduler.optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(values))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer steps in between, as torch expects
            for _ in range(num_steps):
                self._scheduler.step()


def follow_all(values: Iterable[Any]) -> list[FollowedScheduler]:
    return [FollowedScheduler(value) for value in values if isinstance(value, LRScheduler)]
