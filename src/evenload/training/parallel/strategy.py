"""`Strategy`: one way to spread models over ranks. It runs the plan of a step; everything else about the step is the engine's.

    engine: plan -> strategy.run -> all agree (`BackwardCall.exchange`, inside run) -> committed, or rolled back and run again

A strategy computes its part of the global batch, calls `exchange` once with what it computed, and then sets `.grad` of the
user's parameters to the gradient of the global batch. Micro-batches, reducers and processes are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from evenload.balance.values import StepPlan
from evenload.training.comm.clock import Segment
from evenload.training.comm.groups import Groups
from evenload.training.compute.device_sums import DeviceTotals, UnreadTotals
from evenload.training.compute.grad_norms import UnreadNorms
from evenload.training.compute.micro_steps import LossFn
from evenload.training.data.global_batch import GlobalBatch

OK, OUT_OF_MEMORY, LATE_GRADIENT, UNWANTED, INTERRUPTED, RAISED, FRAGMENTED, AWAY = range(8)
"""Status of an attempt on one rank. `UNWANTED`: it was interrupted for another replica, or used shared randomness.
`INTERRUPTED`: a collective inside it ended because another rank failed. `RAISED`: the user's code raised an exception.
`FRAGMENTED`: memory ran out on a GPU of which torch's allocator holds free blocks. `AWAY`: it computes nothing, as planned."""


class LocalResult(NamedTuple):
    """Sums over the micro-batches that one rank, or one replica of a process, has computed."""

    status: int = OK
    weighted: bool = False
    units: float = 0.0
    """Sum of the weights."""
    loss_sum: float = 0.0
    """Sum of weight x mean loss. What the host does not know, because a device does, is NaN here, on all ranks."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Name -> sum of weight x value."""
    touched_key: float = 0.0
    """Checksum of the parameters that received a gradient; 0 where it need not be equal on all ranks."""
    touched: tuple[float, ...] = ()
    """The same parameters, as bits (arrivals.py); sent where a row has room for them."""
    has_zero: bool = False
    """True if a weight on the device is 0, in a call that looks for it (`LossSums.looks_for_zero`)."""
    squared_norm: float | None = None
    """Squared norm of the own gradient, in a call that measures it."""
    seconds: Mapping[Segment, float] | None = None
    """Of each segment; None takes them from the rank's clock."""
    times_late: bool = False
    """True if the clock's times are read later, because the host does not wait for the device. Equal on all ranks."""
    memory_bytes: int | None = None
    """Peak memory; None: of the rank's device."""


class GlobalTotals(NamedTuple):
    """Totals that all ranks agreed on; the same on all of them."""

    units: float
    """N, the sum of all weights; NaN if they are on devices."""
    loss: float
    """Weighted mean over the global batch; NaN if it is on devices."""
    same_touched: bool
    """True if all ranks gave the same `touched_key`."""
    has_zero: bool = False
    """True if some rank found a weight of 0."""
    touched: tuple[list[int], list[int]] | None = None
    """`LocalResult.touched` of any rank and of all ranks, where these differ and are known."""


ReplicaTimes = tuple[Sequence[float], Sequence[float], float, bool]
"""Of one backward of replica threads: own_s and cpu_s of each replica, together_s, in_turns."""


class BackwardCall(NamedTuple):
    """One attempt of a `step.backward`, besides its plan, batch and loss function."""

    index: int  # type: ignore[assignment]
    """Index of the call within its step."""
    last_units: float | None
    """N of the same call in the last step, if there was one."""
    exchange: Callable[[Sequence[LocalResult]], GlobalTotals]
    """Report this rank's results (one per replica) and return the totals. `run` calls it once; collectives that are in
    progress continue meanwhile. It raises `AttemptFailedError` where a rank failed: let it pass."""
    may_expect: bool = True
    """False where the observations of earlier steps must not be used: they made the last attempt fail."""
    begins_update: bool = True
    """True if an optimizer stepped since the last call, so calls that were skipped before no longer count."""
    refuses_leftovers: bool = False
    """True if gradients that are present before the call, and not 0, are an error."""
    reads_late: bool = False
    """True if the totals may stay on the device: an optimizer that takes `found_inf` follows. Equal on all ranks."""
    in_turns: bool = False
    """True if replica threads compute one after the other, to be measured."""
    add_replica_times: Callable[[Sequence[float], Sequence[float], float, bool], None] = lambda *_: None
    """Takes the times of replica threads."""


class StepResult(NamedTuple):
    """Outcome of a call; the same on all ranks."""

    units: float
    loss: torch.Tensor
    """Weighted mean over the global batch, a scalar."""
    finite: bool
    """False if a gradient isn't finite. Then, or if the loss isn't, `.grad` is None, so an optimizer's step changes nothing."""
    nominal: float = 1.0
    """Divisor of the backwards (weighting.py)."""
    totals: DeviceTotals | None = None
    """Loss and metrics, if they did not travel in the exchange and the host has read them."""
    unread: UnreadTotals | None = None
    """The same where the host has not read them. Then `units` is NaN, `finite` is True, and `.grad` may not be finite."""
    discard: Callable[[], None] = lambda: None
    """Removes the gradients, if no optimizer has used them, so that an optimizer's step changes nothing."""
    touches: Callable[[torch.Tensor], bool] = lambda _: True
    """Returns whether a parameter received a gradient on some rank."""
    norms: UnreadNorms | None = None
    """Norms of the ranks' own gradients, where the device knows them, in a call that measures them."""
    norm: float | None = None
    """2-norm of the gradient, if the strategy knows it without further work."""


class AttemptFailedError(Exception):
    """The attempt failed on some rank, and all ranks know it. Never leaves the engine."""

    def __init__(self, statuses: Sequence[int]) -> None:
        super().__init__(f"statuses {list(statuses)}")
        self.statuses = tuple(statuses)


class Strategy(Protocol):
    """Executes plans. Columns of a plan are data-parallel coordinates, which need not be ranks.

    The engine looks for gradients that are left over (`BackwardCall.refuses_leftovers`) before `run`, unless the strategy has
    an attribute `finds_leftovers` that is true: it then finds them itself, without waiting for a device.
    """

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        """Take the models, which stay the user's own objects; all ranks call it. Attaching again replaces the models."""

    def detach(self) -> None:
        """Leave the user's own modules bare: no hooks, no swapped parts."""

    def run(self, plan: StepPlan, batch: GlobalBatch, loss_fn: LossFn, call: BackwardCall) -> StepResult:
        """Compute the global batch, everyone its part; then `.grad` is the gradient of the mean loss over the global batch.

        Gradients that were present before, from earlier calls of the same step, are added to. Raises whatever loss_fn raises.
        """

    def rollback(self, *, together: bool) -> None:
        """Restore the gradients from before a failed `run`, and end its collectives.

        `together`: all ranks do it, and none is gone; otherwise this rank must not wait for others.
        """

    def state_dict(self) -> Mapping[Any, Any]:
        """Return what a checkpoint or a peer needs besides the models; equal on all ranks."""

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Restore what `state_dict` returned."""

    def fingerprint(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks, by name, for the consistency check."""
