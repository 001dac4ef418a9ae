"""Find means of the samples that a loss bends: a clamp, an absolute value, a maximum of a mean (flooding).

`|mean - b| + b` is the mean where all parts of a batch lie on the same side of b, so gradients of a few samples look right until
the loss comes near b. The graph of the loss shows the operation from the first step on. A branch of Python (`if loss > b`) is in
no graph; the losses of few samples scatter more than that of many, so some of them lie on the other side sooner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from evenload.training.verify.sides import Gradient

FEW = 2
"""Samples of each of the smallest parts: some code takes one sample for no batch."""
_BENDS = ("Abs", "Clamp", "Relu", "LeakyRelu", "Hardtanh", "Threshold", "Maximum", "Minimum")
_OPERANDS = ("_saved_self", "_saved_other", "_saved_result")
_BOUNDS = ("_saved_min", "_saved_max")
_FAR = 1000.0
"""A bound that is so many times as large or as small as the mean is a guard against overflow or division by 0."""
_EQUAL = 1e-6
_MOST_NODES = 1000
_BENT = (
    "loss_fn bends a mean over its samples ({}): it is that of each micro-batch, and the result is right only while all of them "
    "lie on one side. Bend the loss of each sample before the mean, or let encode return the loss of each sample and bend their "
    "mean in batch_loss: step.backward(encode, batch_loss=fn)"
)
Bend = tuple[str, tuple[float, ...]]
"""The name of an operation, and the scalars that it was given."""


def find_bends(loss: torch.Tensor) -> list[Bend]:
    """Return the operations that bend a scalar on the way to the loss, before its backward."""
    found: list[Bend] = []
    stack, seen = [loss.grad_fn], set[torch.autograd.graph.Node]()
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if node is None or node in seen or not _is_scalar(node):
            continue
        seen.add(node)
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name.removesuffix("Min").removesuffix("Max") in _BENDS:
            given = [value for key in _OPERANDS if isinstance(value := getattr(node, key, None), torch.Tensor)]
            values = tuple(float(value.detach().abs()) for value in given if value.numel() == 1)  # of complex ones, too
            if not _is_guard(node, values):
                found.append((name, values))
        stack += [following for following, _ in node.next_functions]
    return found


def describe_bends(whole: Sequence[Bend], parts: Sequence[Sequence[Bend]]) -> str:
    """Return what is wrong with a loss that bends a mean of its samples; empty where none does.

    A scalar that is equal in the whole and in its parts depends on no sample (a norm of weights). Other numbers of operations in
    the parts are those of single samples.
    """
    for part in parts:
        if [name for name, _ in part] != [name for name, _ in whole]:
            continue
        for (name, ones), (_, others) in zip(whole, part, strict=True):
            if any(abs(a - b) > _EQUAL * max(abs(a), abs(b)) for a, b in zip(ones, others, strict=True)):
                return _BENT.format(f"{name.lower()} of a scalar, as in flooding or free bits")
    return ""


def describe_few(whole: Gradient, parts: Sequence[Gradient], tolerance: float) -> str:
    """Return what is wrong where the mean of the losses of the smallest parts is not that of the whole; empty if it is.

    `tolerance`: relative difference that counts as rounding.
    """
    units = math.fsum(part.units for part in parts)
    if not units or abs(units - whole.units) > _EQUAL * abs(whole.units):
        return ""  # a number of what is rare, at least 1
    gap = abs(math.fsum(part.loss * part.units for part in parts) / units - whole.loss)
    size = math.fsum(abs(part.loss) * part.units for part in parts) / units
    if not tolerance * size < gap < math.inf:
        return ""
    how = f"the losses of two samples each have another mean than the loss of all, by {gap / size:.1%}: a branch by the loss?"
    return _BENT.format(how)


def _is_scalar(node: torch.autograd.graph.Node) -> bool:
    made: Sequence[Any] = getattr(node, "_input_metadata", ())
    return len(made) == 1 and math.prod(made[0].shape) == 1


def _is_guard(node: torch.autograd.graph.Node, values: Sequence[float]) -> bool:
    bounds = [bound for key in _BOUNDS if isinstance(bound := getattr(node, key, None), int | float)]
    return bool(bounds) and all(
        bound != 0 and not (abs(value) / _FAR < abs(bound) < abs(value) * _FAR) for bound in bounds for value in values
    )
