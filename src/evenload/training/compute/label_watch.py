"""Warn once if a loss without weight is no mean over samples (a sum, or a mean over other units), or a weight no count."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch

from evenload.training.compute.weighting import ignores_labels
from evenload.training.launch.print_once import warn_once

_MAX_NODES = 64
"""Operations searched, from the loss backwards."""
_MEAN, _SUM = 1, 2
"""`reduction="mean"` and `reduction="sum"` as torch stores them."""
_KEEPS_A_SUM = (
    "ViewBackward",
    "AliasBackward",
    "UnsafeViewBackward",
    "ReshapeAliasBackward",
    "AddBackward",
    "ToCopyBackward",
)
"""Operations after which a sum over samples is still one."""


_ZERO_WEIGHT = (
    "loss_fn returned a loss other than 0 with the weight 0: these samples count for nothing. For a sum over all samples divided "
    "by the number of some (focal loss by positives) that is wrong: use batch_loss (docs/loss-function.md#which-weight)"
)


class LabelWatch:
    """Checks the first micro-batches, and all for a loss that counts for nothing."""

    def __init__(self) -> None:
        self._left = 3
        self._has_seen_zero = False
        self._lock = threading.Lock()

    def check(self, data: Any, loss: torch.Tensor, weight: torch.Tensor | float | None) -> None:
        """Check the data, the loss and its weight, if it came with one, of a micro-batch."""
        if type(weight) is float and not weight and not self._has_seen_zero:
            self._has_seen_zero = bool(number := float(loss.detach())) and math.isfinite(number)
            if self._has_seen_zero:
                warn_once(_ZERO_WEIGHT)
        if not self._left:
            return
        with self._lock:  # replicas check concurrently
            if not self._left:
                return
            self._left -= 1
            if message := describe_unweighted(data, loss) if weight is None else describe_weight(loss, weight):
                self._left = 0
        if message:
            warn_once(message)


def describe_unweighted(data: Any, loss: torch.Tensor) -> str:
    """Return why a loss without weight is no mean over the samples of `data`, and what to return; empty if nothing shows it."""
    if ignores_labels(data):
        return (
            "the batch's labels contain -100, but loss_fn returned no weight, so its mean over tokens is not the "
            "global batch's. Return (loss, evenload.count_tokens(batch['labels'])) instead"
        )
    if (mean := find_partial_mean(loss)) is not None:
        return (
            f"the loss is a mean over {mean[0]:g} of {mean[1]} labels (ignore_index={mean[2]}, or class weights), but "
            "loss_fn returned no weight, so it is not the global batch's mean. Return the units of the mean too: "
            f"(loss, (labels != {mean[2]}).sum()), or with class weights (loss, class_weights[labels].sum())"
        )
    if has_sum(loss):
        return (
            "the loss is a sum over a part of the batch (reduction='sum'), so it depends on the sizes of the parts. "
            "Return a mean over samples: reduction='mean', or loss.sum() / len(labels)"
        )
    return ""


def describe_weight(loss: torch.Tensor, weight: torch.Tensor | float) -> str:
    """Return why a weight counts no units of the loss, and what to return; empty if nothing shows it."""
    number = float(weight)
    if not 0 < number < 1 and (number.is_integer() or number != float(loss.detach())):
        return ""
    return (
        f"loss_fn returned (loss, weight) with the weight {number:.3g}: the second value counts the units that the "
        "loss is a mean over (samples, tokens, pixels), and weights it. Return a metric by name: "
        "return {'loss': loss, 'accuracy': accuracy}; it is averaged into step.metrics"
    )


def find_partial_mean(loss: torch.Tensor) -> tuple[float, int, int] | None:
    """Find a cross-entropy in the loss whose mean leaves out or weights labels: its units, its labels, its ignore_index."""
    for node in _operations(loss):
        if node.name().startswith("NllLoss"):
            num_labels = node._saved_target.numel()
            units = float(node._saved_total_weight)
            is_mean = node._saved_reduction == _MEAN
            return (units, num_labels, _signed(node._saved_ignore_index)) if is_mean and units != num_labels else None
    return None


def has_sum(loss: torch.Tensor) -> bool:
    """Return whether the loss, or a term of it, is a loss function of torch with ``reduction="sum"``, not divided by anything."""
    return any(getattr(node, "_saved_reduction", None) == _SUM for node in _operations(loss, through=_KEEPS_A_SUM))


def _operations(loss: torch.Tensor, through: tuple[str, ...] = ("",)) -> Iterator[Any]:
    """Yield operations of the loss's graph from the last one backwards; behind those whose names begin with one of `through`."""
    left, seen = [loss.grad_fn], 0
    while left and seen < _MAX_NODES:
        node: Any = left.pop(0)
        if node is None:
            continue
        seen += 1
        yield node
        if node.name().startswith(through):
            left += [following for following, _ in node.next_functions]


def _signed(number: int) -> int:
    # Autograd shows saved integers as unsigned ones.
    return number - (1 << 64) if number >= 1 << 63 else number
