"""`Diagnosis`: decides on rank 0 what to compare next, until the cause of a difference is known."""

from __future__ import annotations

import math
from dataclasses import replace

from evenload.training.compute.batch_loss import CoupledLoss
from evenload.training.compute.batchnorm import has_global_statistics
from evenload.training.verify import causes
from evenload.training.verify.findings import NARROW_INSIDE, Comparison, DifferenceCause, compare
from evenload.training.verify.saved_state import batch_norms
from evenload.training.verify.sides import Gradient, Variant, VerifyCall


class Diagnosis:
    """Comparisons of one call so far, and the causes they show.

    The order of the tests: data, repetition, randomness (each would falsify the tests after it), the loss, BatchNorm.
    """

    def __init__(self, call: VerifyCall, tolerance: float) -> None:
        self.tolerance = tolerance
        self.comparisons: list[Comparison] = []
        self.causes: list[DifferenceCause] = []
        self.equal = False
        self._call = call
        self._seeds_gap = 0.0

    def add(self, variant: Variant, split: Gradient, one: Gradient) -> Variant | None:
        """Take a comparison; return the variant to compare next, or None."""
        call = self._call
        self.comparisons.append(compare(_name(variant), call.tracked, split, one))
        following = self._next(variant, one)
        if isinstance(following, Variant):
            return following
        if self._seeds_gap:
            self.causes.append(self._randomness(variant))
        if following is not None:
            self.causes.append(following)
        unprepared = [worst for worst in self.comparisons[-1].unprepared if worst.difference > self.tolerance]
        if unprepared:
            self.equal = False
            self.causes.append(
                causes.unprepared_cause([w.name for w in unprepared], [w.difference for w in unprepared])
            )
        return None

    def _next(self, variant: Variant, one: Gradient) -> Variant | DifferenceCause | None:
        """Return the variant to compare next, the cause of the difference, or None if there is no more to find."""
        call, tolerance = self._call, self.tolerance
        good = self.comparisons[-1].difference <= tolerance
        own = [(name, module) for name, module in batch_norms(call.models) if not has_global_statistics(module)]
        if not math.isfinite(one.norm()) or not math.isfinite(one.loss):
            return _not_finite(one)
        if good and not variant.no_own_batch_norm:
            self.equal = True
            return None
        if good:
            names, kinds = [name for name, _ in own], [type(module).__name__ for _, module in own]
            return causes.batch_norm_cause(names, kinds, self.comparisons[-1].difference)
        if variant.no_own_batch_norm:
            return _unknown(self.comparisons[0])
        if variant == Variant():
            early = causes.data_cause(call) or causes.repeat_cause(call, one, variant, tolerance)
            if early is not None:
                return early
        if not variant.shared_draws and (gap := causes.is_random(call, one, variant, tolerance)):
            self._seeds_gap = self._seeds_gap or gap
            return Variant(no_dropout=True, shared_draws=variant.no_dropout)
        if tolerance < self.comparisons[-1].difference <= NARROW_INSIDE:
            return _unknown(self.comparisons[-1])  # most likely rounding, in which no test finds anything
        # Without BatchNorm: over a part of the batch its statistics differ, even if the split shares them.
        alone = replace(variant, no_batch_norm=True)
        cause = None if isinstance(call.loss_fn, CoupledLoss) else causes.loss_cause(call, alone, tolerance)
        if variant.shared_draws and cause is not None and cause.kind == "coupled":
            # Noise that could not be matched looks the same in one sample, but not on average; see `_randomness`.
            return cause if causes.is_coupled_on_average(call, alone) else None
        if cause is not None:
            return cause
        if own and call.context.groups.world_size > 1:
            return replace(variant, no_own_batch_norm=True)
        return _unknown(self.comparisons[-1])

    def _randomness(self, variant: Variant) -> DifferenceCause:
        finding = f"two seeds in one process differ by {self._seeds_gap:.1e}: "
        if not variant.shared_draws:
            return DifferenceCause(
                "randomness",
                finding + "dropout, drawn on each rank separately and equal in distribution only",
                "nothing to do; the comparison without dropout decides",
            )
        if self.equal:
            return DifferenceCause(
                "randomness",
                finding + "loss_fn draws random numbers on each rank separately, equal in distribution only",
                "nothing to do; the comparison with the same numbers for each sample decides",
            )
        return DifferenceCause(
            "randomness",
            finding
            + "loss_fn draws random numbers that could not be made the same on both sides, so other causes were not tested",
            "draw them in the dataset's __getitem__, where they belong to the sample, or disable them to verify",
        )


def _name(variant: Variant) -> str:
    if variant == Variant():
        return "as it is"
    parts = []
    if variant.no_dropout:
        parts.append("dropout off")
    if variant.shared_draws:
        parts.append("each sample's random numbers the same")
    if variant.no_own_batch_norm:
        parts.append("BatchNorm of one rank alone as in evaluation")
    return ", ".join(parts)


def _unknown(comparison: Comparison) -> DifferenceCause:
    return DifferenceCause(
        "unknown",
        f"a difference of {comparison.difference:.1e} is left, which none of the usual causes explains: the data, repetition, "
        "randomness, the loss of parts, and BatchNorm were tested",
        "check whether loss_fn or the model uses its rank, its device, or its number of samples; if not, please report this",
    )


def _not_finite(one: Gradient) -> DifferenceCause:
    return DifferenceCause(
        "not_finite",
        f"in one process the loss is {one.loss:g}, and the norm of its gradient {one.norm():g}: there is nothing to compare",
        "look at log, sqrt and division in the loss, and at the first batch",
    )
