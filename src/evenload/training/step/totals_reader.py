"""`TotalsReader`: take the totals of each backward, and skip an update that is not finite.

Note [When totals are read]
  On a CPU, and where the loss travelled in the exchange, the host knows the totals when a backward ends. On a GPU it would wait
  for them. There they are read after the next backward has been queued, and the optimizer skips a step that is not finite by
  its `found_inf`, which lies on the device. They are read at once where something else than such an optimizer may use the
  gradients: the call of a step is read late only if in the step before it was followed by fused optimizers of torch alone, which
  had stepped before, or by another backward at the same weights. So an update by hand, and an optimizer that calls
  `step.backward` itself, never see gradients that are not finite. What is read, and when, is a page:
  docs/decisions/late-reading.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from evenload.errors import EvenloadError, NonFiniteError, PeerLostError
from evenload.training.comm.generation import Generation
from evenload.training.compute.precision import Precision
from evenload.training.parallel.strategy import StepResult
from evenload.training.step.report import NO_REPORTS, Reports
from evenload.training.step.stats import StepStats
from evenload.training.step.step_recorder import StepRecorder

MAX_SKIPPED_STEPS = 3
"""Steps in a row that may be skipped for a non-finite gradient that no loss scale explains."""


@dataclass
class DeviceCall:
    """A backward whose totals were summed on the device."""

    stats: StepStats
    index: int
    """Of the call in its step."""
    step: int
    result: StepResult
    is_unread: bool
    is_used: bool = False
    """True once an optimizer has stepped under its `found_inf`."""
    followers: WeakSet[Optimizer] = field(default_factory=WeakSet)
    """Optimizers that stepped after it."""
    is_late_again: bool = True
    """False if the same call of the next step must be read at once."""


class TotalsReader:
    def __init__(self, precision: Precision, recorder: StepRecorder) -> None:
        self.units: dict[int, float] = {}
        """N of each call of a step, of the newest step whose totals all ranks have read."""
        self.used_units = 0.0
        """Sum of N over the first calls of all steps whose gradients were finite."""
        self._precision = precision
        self._recorder = recorder
        self._skipped: dict[int, int] = {}
        self._newest_units: dict[int, float] = {}
        """Read since `agree_units`: some ranks may have read later than others."""
        self.waited = False
        """True if the host has waited for the device at the end of the last backward."""
        self.is_torn = False
        """True after a backward of which a lost rank's part is missing here: its gradients were not used."""
        self._call: DeviceCall | None = None
        """The last backward, if its totals were summed on the device."""
        self._late: dict[int, WeakSet[Optimizer]] = {}
        """The calls of a step that may be read late, with the optimizers that followed them."""
        self._generation: Generation | None = None
        self._num_stepping = 0
        self._guarded: Optimizer | None = None
        self._has_reported = False

    @property
    def in_optimizer(self) -> bool:
        """True while an optimizer steps."""
        return self._num_stepping > 0

    # -- the backwards, on all ranks alike ------------------------------------------------------------------------------

    def may_be_late(self, index: int, generation: Generation, accumulates: bool = False) -> bool:
        """Begin a backward; return whether its totals may be read after the next one. All ranks return the same.

        `accumulates`: no weight has changed since another backward of the same step.
        """
        if self._call is not None:
            self._end_update(accumulates=accumulates)
        if generation is not self._generation:
            # A rank that was away, or ran alone, knows other optimizers.
            self._generation = generation
            self._late.clear()
        return index in self._late and self._num_stepping == 0 and not self._precision.scaled

    def take(
        self, stats: StepStats, step: int, result: StepResult, metrics: Mapping[str, float], reports: Reports
    ) -> None:
        """Take the result of a backward.

        Args:
            stats: of its step.
            step: global index of its step.
            result: of the strategy.
            metrics: totals that travelled in the exchange; empty if `result` has them.
            reports: of the ranks; empty where the host does not know their losses.

        Raises:
            StepError: of the backward before; see `read`.
            NonFiniteError: too many steps in a row were not finite.
        """
        if self._call is not None or self._newest_units:
            self.agree_units()
        self._call = None
        totals = result.totals
        self.waited = totals is not None
        if result.unread is not None or totals is not None:
            self._call = DeviceCall(stats, stats.calls, step, result, is_unread=result.unread is not None)
        if result.unread is not None:
            stats.unread = result.unread
            return
        self.units[stats.calls] = result.units
        stats.loss = float(result.loss) if totals is None else totals.loss
        stats.metrics |= metrics if totals is None else totals.metrics
        self._follow(stats, stats.calls, step, result.finite, result.units, reports)

    def agree_units(self) -> None:
        """Read the totals, and use their N from now on; all ranks call it at the same point."""
        if self._call is not None:
            self.read()
        if self._newest_units:
            self.units |= self._newest_units
            self._newest_units = {}

    # -- reading, at any time ---------------------------------------------------------------------------------------------

    def read(self, *, waits: bool = True) -> None:
        """Read the totals of the last backward, if nobody has; without `waits` only if the host need not wait.

        Raises:
            StepError: a weight of its step is negative or not finite, or all are 0.
            NonFiniteError: too many steps in a row were not finite.
            PeerLostError: see `UnreadTotals.read`.
        """
        call = self._call
        unread = None if call is None or not call.is_unread else call.result.unread
        if call is None or unread is None or not (waits or unread.is_here):
            return
        call.is_unread, call.stats.unread = False, None
        try:
            totals = unread.read()
        except EvenloadError as error:
            self.is_torn = isinstance(error, PeerLostError)
            self._discard(call)
            raise
        self._newest_units[call.index] = totals.units
        finite = totals.finite and math.isfinite(totals.loss)
        if not finite:
            self._discard(call)
        call.stats.loss = totals.loss
        call.stats.metrics |= totals.metrics
        self._follow(call.stats, call.index, call.step, totals.finite, totals.units)

    # -- optimizers -------------------------------------------------------------------------------------------------------

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Let an optimizer that is about to step skip gradients that are not finite."""
        self._num_stepping += 1
        call = self._call
        if call is None or not any(map(call.result.touches, _params_of(optimizer))):
            return
        takes = takes_found_inf(optimizer)
        if not takes:
            self._report(optimizer)
            call.is_late_again = False
        if call.is_unread and call.result.unread is not None:
            if takes and optimizer in self._late.get(call.index, ()):
                optimizer.found_inf = call.result.unread.found_inf  # type: ignore[attr-defined]
                self._guarded = optimizer
                call.is_used = True
            else:
                # Its state must begin with finite gradients: fused SGD leaves its momentum as it is in a skipped first step.
                self.read()
        if not call.stats.skipped:
            call.followers.add(optimizer)

    def after_optimizer(self) -> None:
        self._num_stepping = max(0, self._num_stepping - 1)
        if self._guarded is not None:
            del self._guarded.found_inf  # type: ignore[attr-defined]
            self._guarded = None

    def end_body(self, *, finished: bool) -> None:
        """End a loop body. If no optimizer has used the gradients, weights may be updated by hand: the totals are read now.

        `finished` is False after a `break` or an exception, which an error must not replace.
        """
        self._num_stepping = 0
        if self._call is not None:
            if finished and not self._call.is_used:
                self.read()
            self._end_update()

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _discard(self, call: DeviceCall) -> None:
        if not call.is_used:
            call.result.discard()

    def _end_update(self, *, accumulates: bool = False) -> None:
        """Note what followed the last backward, at the next one or at the end of the loop body."""
        call = self._call
        if call is None:
            return
        if (call.followers or accumulates) and call.is_late_again:
            # Gradients that are not finite are removed when the next backward has been queued: before an optimizer steps.
            self._late.setdefault(call.index, WeakSet()).update(call.followers)
        elif not (call.stats.skipped and call.is_late_again):
            self._late.pop(call.index, None)
        if not call.is_unread:
            self._call = None

    def _follow(
        self, stats: StepStats, index: int, step: int, finite: bool, units: float, reports: Reports = NO_REPORTS
    ) -> None:
        """Adapt the scale of fp16 to a backward whose loss `stats` holds, and note whether it is skipped."""
        if self._precision.scaled:
            self._precision.update(finite)
        unread_norms = None
        if index == 0:
            unread_norms, stats.unread_norms = stats.unread_norms, None
        if finite and unread_norms is not None:
            stats.norms = unread_norms.read()
        if finite and math.isfinite(stats.loss):
            self._skipped[index] = 0
            self.used_units += units if index == 0 else 0.0
        else:
            self._skip(stats, index, step, _blamed(stats.loss, reports.column("loss_sum")))

    def _skip(self, stats: StepStats, index: int, step: int, what: str) -> None:
        # No gradient is left, or `found_inf` was set, so the optimizer's step changes nothing, on all ranks.
        stats.skipped = True
        precision = self._precision
        if not precision.scaled or precision.exhausted:
            self._skipped[index] = self._skipped.get(index, 0) + 1
        in_a_row = self._skipped.get(index, 0)
        scale = f"; the loss scale is now {precision.scale:g}" if precision.scaled else ""
        self._recorder.event("skipped", f"step {step} is skipped: {what} is not finite{scale}", step=step)
        if in_a_row >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{what} was NaN or infinite in {in_a_row} steps in a row, the last at step {step}; look "
                "at the learning rate, at the data of these steps, and at log, sqrt or division in the loss"
            )

    def _report(self, optimizer: Optimizer) -> None:
        if self._has_reported or self._precision.scaled:
            return
        self._has_reported = True
        name = type(optimizer).__name__
        remedy = f"{name}(..., fused=True)" if "fused" in optimizer.defaults else "torch.optim.AdamW(..., fused=True)"
        self._recorder.event(
            "reads_at_once",
            f"the host waits for the GPU once in each step, because {name} can't skip a step that is not finite by itself; "
            f"{remedy} can, and the host then waits for nothing",
        )


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether the optimizer skips its step where its attribute `found_inf` is 1: a fused one of torch's own.

    A subclass with a step of its own may do more in it than the step that it inherits.
    """
    own_step = type(optimizer).step.__module__ or ""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return (
        fused and own_step.startswith("torch.optim.") and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    )


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _blamed(loss: float, sums: Sequence[float]) -> str:
    """Return what is not finite, given the ranks' sums of the loss where the host knows them."""
    not_finite = [str(rank) for rank, value in enumerate(sums) if not math.isfinite(value)]
    if not_finite:
        return f"the loss of rank {', '.join(not_finite)}"
    return "the gradient" if math.isfinite(loss) else "the loss"
