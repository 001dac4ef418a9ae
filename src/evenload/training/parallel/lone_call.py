"""`LoneCall`: the pieces of a call of `ReplicaStrategy.run` on a rank alone, for steps that repeat it (step/straight.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from evenload.training.compute.micro_steps import LossSums, StepContext
from evenload.training.compute.model_parameters import ModelParameters
from evenload.training.parallel.local_reducer import LocalReducer
from evenload.training.parallel.strategy import GlobalTotals, StepResult


class LoneCall(NamedTuple):
    """The pieces, as they are since the last call."""

    context: StepContext
    reducer: LocalReducer
    parameters: ModelParameters
    frozen: Sequence[nn.Parameter]
    """Parameters that no call may find trainable."""
    touched: list[int]
    """Of the last call: 1 for each slot that received a gradient."""
    agree: Callable[[GlobalTotals], list[int]]
    """Returns the same where other slots received one."""
    finish: Callable[[Sequence[int], LossSums, float, float], StepResult]
    """Takes `touched`, the sums, N and the mean loss."""
