"""`Strategy`: how models are spread over ranks, and how their gradients become those of the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from evenload.training.comm.groups import Groups


class Strategy(Protocol):
    """One way to spread models. The engine calls it; it never sees a batch or a loss function."""

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        """Take the models of a generation; they stay the user's own objects."""

    def detach(self) -> None:
        """Remove all hooks from the user's modules."""

    def begin(self, call_index: int, *, expect: bool) -> None:
        """Start an attempt of the step's `call_index`-th backward; without `expect` no earlier observation is used."""

    def backward(self, loss: torch.Tensor, *, last: bool, idle: bool) -> None:
        """Run the backward of one micro-batch; an `idle` one takes part in collectives but does not count."""

    def report(self) -> tuple[float, bool]:
        """Return a key of the parameters touched here, and whether the attempt must be repeated."""

    def resolve(self, same: bool) -> None:
        """Accept the attempt on all ranks; `same` means that their keys were equal."""

    def finish(self, correction: float) -> bool:
        """End the reduction, after which `.grad` is final; return whether it is finite."""

    def rollback(self) -> None:
        """Restore the gradients from before the attempt, which all ranks repeat."""

    def abort(self) -> None:
        """Restore the gradients from before the attempt after an error on this rank, without waiting for other ranks."""

    def clear(self) -> None:
        """Remove the gradients of the last call (a skipped step), and those of later calls until `clear_skip`."""

    def clear_skip(self) -> None:
        """Begin a new update: earlier skipped calls no longer affect it."""

    def state_dict(self) -> Mapping[int, Any]:
        """Return observations of earlier calls, by index of the call; equal on all ranks."""

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Restore what `state_dict` returned, after steps of each rank alone."""

    def covers(self, param: torch.Tensor) -> bool:
        """Return whether this parameter's gradient becomes that of the global batch."""

    def leftovers(self) -> list[str]:
        """Return the names of parameters that hold a nonzero gradient."""
