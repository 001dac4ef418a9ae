"""Sums of a backward that a GPU knows: one vector of float64 on the device, summed over ranks behind the buckets.

Note [One transfer]
  Reading a number of a GPU makes the host wait for all that is queued before it, and the GPU then has nothing to do until the
  host has queued more. So nothing is read during a backward: loss, metrics, weights that lie on the device and the finite flag
  come to the host in one transfer, after the gradients of all ranks have been summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenload.errors import StepError
from evenload.training.compute.micro_steps import LossSums

_UNITS, _LOSS, _INVALID, _ZERO, _METRICS = range(5)


@dataclass(frozen=True)
class DeviceTotals:
    """Totals of the global batch that the host has read; the same on all ranks."""

    units: float
    loss: float
    """Weighted mean over the global batch."""
    metrics: dict[str, float]
    finite: bool
    has_zero: bool
    """A micro-batch with a weight of 0 was in a backward."""


class DeviceSums:
    """The vector of one backward: this rank's part, and after the sum that of the global batch."""

    def __init__(self, sums: LossSums, device: torch.device) -> None:
        self._names = sorted(sums.metrics)
        counts = (sums.units, sums.loss_sum, sums.num_invalid, sums.num_zero)
        parts = [*counts, *(sums.metrics[name] for name in self._names)]
        self.vector = torch.stack([_scalar(part, device) for part in parts])

    @property
    def units(self) -> torch.Tensor:
        """N, after the sum."""
        return self.vector[_UNITS]

    def read(self, finite: torch.Tensor, step: int) -> DeviceTotals:
        """Wait for the device, and return the sums over all ranks; all ranks raise alike.

        Raises:
            StepError: a weight is negative or not finite, or all weights are 0.
        """
        values: Sequence[float] = torch.cat([self.vector, finite.to(self.vector).reshape(1)]).tolist()
        units = values[_UNITS]
        if values[_INVALID]:
            raise StepError(
                f"step {step}: loss_fn returned a weight that is negative or not finite; it is the number of units that the "
                "loss is a mean over"
            )
        if units <= 0:
            raise StepError(ALL_ZERO.format(step=step))
        metrics = {name: value / units for name, value in zip(self._names, values[_METRICS:-1], strict=True)}
        return DeviceTotals(units, values[_LOSS] / units, metrics, bool(values[-1]), bool(values[_ZERO]))


ALL_ZERO = "step {step}: all weights are 0, so the mean loss over the global batch is undefined; are all labels -100?"


def _scalar(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).to(device, torch.float64, non_blocking=True)
    # A fill needs no copy from the host, for which torch would wait.
    return torch.full((), value, dtype=torch.float64, device=device)
