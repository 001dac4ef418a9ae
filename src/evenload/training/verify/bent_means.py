"""Find means of the samples that a loss bends: a clamp, an absolute value, a maximum of a mean (flooding).

`|mean - b| + b` is the mean where all parts of a batch lie on the same side of b, so gradients of a few samples look right until
the loss comes near b. The graph of the loss shows the operation from the first step on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_BENDS = ("Abs", "Clamp", "Relu", "LeakyRelu", "Hardtanh", "Threshold", "Maximum", "Minimum")
_OPERANDS = ("_saved_self", "_saved_other", "_saved_result")
_BOUNDS = ("_saved_min", "_saved_max")
_FAR = 1000.0
"""A bound that is so many times as large or as small as the mean is a guard against overflow or division by 0."""
_EQUAL = 1e-6
_MOST_NODES = 1000
Bend = tuple[str, tuple[float, ...]]
"""The name of an operation, and the scalars that it was given."""


def find_bends(loss: torch.Tensor) -> list[Bend]:
    """Return the operations that bend a scalar on the way to the loss, before its backward."""
    found: list[Bend] = []
    stack, seen = [loss.grad_fn], set()
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if node is None or node in seen or not _is_scalar(node):
            continue
        seen.add(node)
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name.removesuffix("Min").removesuffix("Max") in _BENDS:
            given = [value for key in _OPERANDS if isinstance(value := getattr(node, key, None), torch.Tensor)]
            values = tuple(float(value.detach()) for value in given if value.numel() == 1)
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
                return (
                    f"loss_fn bends a mean over its samples ({name.lower()} of a scalar, as in flooding or free bits): it is "
                    "that of each micro-batch, and the result is right only while all of them lie on one side. Bend the loss "
                    "of each sample before the mean, or let encode return the loss of each sample and bend their mean in "
                    "batch_loss: step.backward(encode, batch_loss=fn)"
                )
    return ""


def _is_scalar(node: torch.autograd.graph.Node) -> bool:
    made = getattr(node, "_input_metadata", ())
    return len(made) == 1 and math.prod(made[0].shape) == 1


def _is_guard(node: torch.autograd.graph.Node, values: Sequence[float]) -> bool:
    bounds = [bound for key in _BOUNDS if isinstance(bound := getattr(node, key, None), int | float)]
    return bool(bounds) and all(
        bound != 0 and not (abs(value) / _FAR < abs(bound) < abs(value) * _FAR) for bound in bounds for value in values
    )
