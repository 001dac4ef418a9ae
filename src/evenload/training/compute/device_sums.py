"""Sums of a backward that a GPU knows: one vector of float64 on the device, summed over ranks behind the buckets.

Note [One transfer]
  Reading a number of a GPU makes the host wait for all that is queued before it, and the GPU then has nothing to do until the
  host has queued more. So nothing is read during a backward: loss, metrics, weights that lie on the device and the finite flag
  come to the host in one transfer, after the gradients of all ranks have been summed. The host reads it one backward later,
  when the GPU has more to do, or at once (docs/decisions/late-reading.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evenload.errors import PeerLostError, StepError
from evenload.training.compute.device_read import DeviceRead, scalars_on
from evenload.training.compute.micro_steps import LossSums

_UNITS, _LOSS, _INVALID, _ZERO, _LEFTOVERS, _RANKS, _METRICS = range(7)


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


class UnreadTotals:
    """Totals of the global batch on the device; the same on all ranks."""

    def __init__(
        self,
        vector: torch.Tensor,
        finite: torch.Tensor,
        names: list[str],
        dtype: torch.dtype,
        step: int,
        num_ranks: int,
    ) -> None:
        self._vector = vector
        self._num_ranks = num_ranks
        self._names = names
        self._step = step
        self.loss = (vector[_LOSS] / vector[_UNITS]).to(dtype)
        """Weighted mean over the global batch: a scalar on the device."""
        usable = finite & self.loss.isfinite() & (vector[_INVALID] == 0) & (vector[_LEFTOVERS] == 0)
        usable &= (vector[_UNITS] > 0) & (vector[_RANKS] == num_ranks)
        self.found_inf = (~usable).to(torch.float32)
        """1 if an optimizer must not use the gradients, else 0: a scalar on the device, as fused optimizers take it."""
        self._read = DeviceRead(torch.cat([vector, finite.to(vector).reshape(1)]))

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """Weighted means over the global batch: scalars on the device."""
        means = self._vector[_METRICS:] / self._vector[_UNITS]
        return dict(zip(self._names, means.unbind(), strict=True))

    @property
    def is_here(self) -> bool:
        """True if `read` does not wait."""
        return self._read.is_here

    def read(self) -> DeviceTotals:
        """Wait for the sums, and return them; all ranks raise alike.

        Raises:
            StepError: a weight is negative or not finite, or all weights are 0, or gradients were left over.
            PeerLostError: a rank was lost before the sum, or a sum before it, had ended here; others may have it.
        """
        values = self._read.read()
        units = values[_UNITS]
        if values[_RANKS] != self._num_ranks:
            raise PeerLostError(f"step {self._step}: a rank was lost before the gradients of all ranks were summed")
        if values[_LEFTOVERS]:
            raise StepError(
                f"step {self._step}: gradients were already present before the step's first backward. {LEFTOVERS}"
            )
        if values[_INVALID]:
            raise StepError(
                f"step {self._step}: loss_fn returned a weight that is negative or not finite; it is the number of units that "
                "the loss is a mean over"
            )
        if units <= 0:
            raise StepError(ALL_ZERO.format(step=self._step))
        metrics = {name: value / units for name, value in zip(self._names, values[_METRICS:-1], strict=True)}
        return DeviceTotals(units, values[_LOSS] / units, metrics, bool(values[-1]), bool(values[_ZERO]))


class DeviceSums:
    """The vector of one backward: this rank's part, and after the sum that of the global batch."""

    def __init__(self, sums: LossSums, device: torch.device, leftovers: torch.Tensor | None = None) -> None:
        """`leftovers`: not 0 where gradients were present that must not be; None where there were none."""
        self._names = sorted(sums.metrics)
        self._dtype = sums.dtype
        left = 0.0 if leftovers is None else leftovers != 0
        counts = (sums.units, sums.loss_sum, sums.num_invalid, sums.num_zero, left, 1.0)
        self.vector = scalars_on(device, [*counts, *(sums.metrics[name] for name in self._names)])

    @property
    def units(self) -> torch.Tensor:
        """N, after the sum."""
        return self.vector[_UNITS]

    def totals(self, finite: torch.Tensor, step: int, num_ranks: int) -> UnreadTotals:
        """Begin to send the sums to the host, after the sum over ranks; `finite` is the flag of the gradients."""
        flag = finite.to(self.vector.device, non_blocking=True)
        return UnreadTotals(self.vector, flag, self._names, self._dtype, step, num_ranks)


ALL_ZERO = "step {step}: all weights are 0, so the mean loss over the global batch is undefined; are all labels -100?"
LEFTOVERS = (
    "Call optimizer.step() and optimizer.zero_grad() in each loop body; to accumulate over several batches, use a larger "
    "batch_size in the DataLoader instead, without `if i % n` and `loss / n`"
)
