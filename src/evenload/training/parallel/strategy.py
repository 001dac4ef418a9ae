"""What a strategy is: how models are spread over ranks, and how their gradients become those of the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from evenload.training.comm.groups import Groups


class Strategy(Protocol):
    """One way to spread models. The step drives it; it never sees a batch or a loss function."""

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        """Takes the models of a generation; they stay the user's own objects."""

    def detach(self) -> None:
        """Leaves the user's own modules bare."""

    def begin(self, call_index: int, *, expect: bool) -> None:
        """Starts an attempt of the step's `call_index`-th backward; without `expect` nothing learnt earlier is used."""

    def backward(self, loss: torch.Tensor, *, last: bool, idle: bool) -> None:
        """Backward of one micro-batch; `idle` ones take part in collectives but never count."""

    def report(self) -> tuple[float, bool]:
        """After the own backwards: a key of what was touched here, and whether the attempt must be done again."""

    def resolve(self, same: bool) -> None:
        """All ranks agreed on the attempt; `same` tells whether their keys were equal."""

    def finish(self, correction: float) -> bool:
        """Ends the reduction; `.grad` is final. Returns whether it is finite."""

    def rollback(self) -> None:
        """All ranks agreed to do the attempt again: gradients are as they were before it."""

    def abort(self) -> None:
        """This rank's attempt ended with an error; gradients are as they were before it. Waits for nobody."""

    def clear(self) -> None:
        """Takes the gradients of the last call away (a skipped step), and those of later calls until `clear_skip`."""

    def clear_skip(self) -> None:
        """A new update begins: what was skipped before has no part in it."""

    def state_dict(self) -> Mapping[int, Any]:
        """What earlier calls taught, by index of the call; equal on all ranks."""

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Puts back what `state_dict` returned, after steps that ranks did alone."""

    def covers(self, param: torch.Tensor) -> bool:
        """Whether this parameter's gradient is made that of the global batch."""

    def leftovers(self) -> list[str]:
        """Names of parameters that hold a gradient before a step's first backward."""
