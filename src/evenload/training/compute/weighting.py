"""Units and weights of losses, and the one division that makes a step exact.

A step's gradient is g = (sum_i w_i grad l_i) / N over all samples i of the global batch, N = sum_i w_i; see
docs/how-it-works.md. Each micro-batch's loss is a mean over its own units, so it enters the backward as
``loss * weight / nominal``: in units common to all ranks before anything is summed, and therefore also right where a
collective runs inside the backward. ``nominal`` is known to all ranks before the first backward; the sum is corrected once
by ``nominal / N``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from evenload.errors import ConfigError, StepError

IGNORED_LABEL = -100


class LossResult(NamedTuple):
    loss: torch.Tensor
    """Scalar with a graph: the mean over the micro-batch's units."""
    weight: float | torch.Tensor | None
    """Units that the loss is a mean over; None: samples. A tensor beside the loss, where it was to be left on the device."""
    metrics: Mapping[str, torch.Tensor | float] = MappingProxyType({})


def count_tokens(labels: torch.Tensor, shift: bool = True) -> torch.Tensor:
    """Count the labels that a language model's loss averages over.

    Args:
        labels: integer labels of any shape, ``(..., sequence)``; -100 is ignored by the loss.
        shift: the model shifts the labels itself (as Hugging Face's do), so the first label of each sequence is never predicted.

    Returns:
        A scalar int64 tensor on the labels' device.
    """
    if not isinstance(labels, torch.Tensor):
        raise ConfigError(
            f"count_tokens received a {type(labels).__name__}: expected the tensor of labels, batch['labels']"
        )
    if labels.is_floating_point():
        raise ConfigError(
            f"count_tokens received a tensor of {labels.dtype}: expected integer labels, of which it counts those that are not "
            "-100; of other losses return the number of samples or pixels as weight"
        )
    if shift:
        labels = labels[..., 1:]
    return (labels != IGNORED_LABEL).sum()


def read_result(returned: Any, *, on_device: bool = False) -> LossResult:
    """Read the return value of a loss_fn: a loss, ``(loss, weight)``, or a mapping with ``loss``.

    `on_device`: a weight that lies beside the loss stays there, so that the host need not wait for it.

    Raises:
        StepError: another value, not a scalar, or independent of all trainable parameters.
    """
    if isinstance(returned, torch.Tensor):
        return LossResult(_scalar_loss(returned), None)
    if isinstance(returned, tuple) and not hasattr(returned, "_fields"):
        if len(returned) != 2:
            raise StepError(
                f"loss_fn returned {len(returned)} values; return a loss, (loss, weight), or a dict with 'loss' and metrics"
            )
        loss = _scalar_loss(returned[0])
        return LossResult(loss, _weight(returned[1], loss, on_device))
    if isinstance(returned, Mapping):
        if returned.get("loss") is None:
            raise StepError(
                f"loss_fn returned a mapping without 'loss' (its keys: {', '.join(map(str, returned))}); "
                "for a Hugging Face model, give it labels"
            )
        weight = returned.get("weight")
        metrics = {}
        for name, value in returned.items():
            if name in ("loss", "weight"):
                continue
            own = type(returned) is dict
            # A model's output holds further tensors, with one value if a rank has one sample: only true scalars count there.
            number = _metric(value) if own or not isinstance(value, torch.Tensor) or value.dim() == 0 else None
            if number is not None:
                metrics[str(name)] = number
            elif own:
                raise StepError(
                    f"loss_fn's dict holds {name!r}, which is {_kind(value)}; beside 'loss' and 'weight' it may hold "
                    "scalars, which are averaged into step.metrics"
                )
        loss = _scalar_loss(returned["loss"])
        return LossResult(loss, None if weight is None else _weight(weight, loss, on_device), metrics)
    missing = " (is its return statement missing?)" if returned is None else ""
    raise StepError(
        f"loss_fn returned {_kind(returned)}; return a loss, (loss, weight), or a dict with 'loss'{missing}"
    )


def nominal_units(num_samples: int, weighted: bool, last_units: float | None) -> float:
    """Return the divisor used inside the backward, equal on all ranks before the step's true N is known.

    Without weights it is N itself, so that no correction is needed. With weights it is the power of two nearest to the last
    step's N: the correction is then the only rounding, and the result does not depend on what `nominal` was.
    """
    if not weighted:
        return float(num_samples)
    units = last_units if last_units else float(num_samples)
    return 2.0 ** round(math.log2(units))


def ignores_labels(batch: Any) -> bool:
    """Return whether some labels of a batch are -100, so that a mean over samples would be wrong."""
    if isinstance(batch, tuple):  # of several loaders
        return any(ignores_labels(part) for part in batch)
    if not isinstance(batch, Mapping):
        return False
    labels = batch.get("labels")
    return isinstance(labels, torch.Tensor) and not labels.is_floating_point() and bool((labels == IGNORED_LABEL).any())


def _scalar_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"the loss is {_kind(loss)}, not a tensor; don't call .item() on it inside loss_fn")
    if loss.numel() != 1:
        raise StepError(
            f"the loss has shape {tuple(loss.shape)}; return a scalar: the mean over the micro-batch's samples "
            "(reduction='mean'), or (loss, weight)"
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss does not depend on any trainable parameter; was it computed under torch.no_grad, detached, or are "
            "all parameters frozen?"
        )
    return loss.reshape(()) if loss.dim() else loss


def _weight(weight: Any, loss: torch.Tensor, on_device: bool) -> float | torch.Tensor:
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise StepError(
                f"the weight has shape {tuple(weight.shape)}; return one number: the units of the mean. (Of (loss, outputs) "
                "return the loss alone; of metrics a dict: {'loss': loss, 'accuracy': accuracy})"
            )
        if on_device and weight.device == loss.device and weight.dtype != torch.bool and not weight.is_complex():
            return weight.detach().reshape(()).double()
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise StepError(f"the weight is {_kind(weight)}; return one number: how many units the loss is a mean over")
    number = float(weight)
    if not 0 <= number < math.inf:
        raise StepError(f"the weight is {weight}; it must be finite and at least 0")
    return number


def _metric(value: Any) -> torch.Tensor | float | None:
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()) if value.numel() == 1 else None
    if isinstance(value, Real):
        return float(value)
    return None


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
