"""Measure squared norms of gradients, for `balance/noise.py`: of this rank's own part before its sum, and of the sum.

A `GradNorms` exists only if `batch_max` is set. A bucket's own norm must be taken before it leaves, since the sum is made in
place. On GPUs the norms stay there, and the host reads them after the next backward, with the totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from evenload.balance.noise import Norms
from evenload.training.compute.device_read import DeviceRead, scalars_on
from evenload.training.compute.model_parameters import sum_scalars

MEASURE_EVERY = 4
"""Steps from one measured to the next."""


class GradNorms:
    def __init__(self) -> None:
        self.on = False
        """True if this attempt is measured."""
        self._held: Callable[[], Iterable[torch.Tensor]] = tuple
        self._left: list[torch.Tensor] = []
        self._summed: list[torch.Tensor] = []
        self._first: tuple[torch.Tensor | float, torch.Tensor] | None = None

    def follow(self, held: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Set the source of gradients that have not left yet."""
        self._held = held

    def begin(self, on: bool) -> None:
        self.on = on
        self._left, self._summed, self._first = [], [], None

    def leaves(self, flat: torch.Tensor) -> None:
        if self.on:
            self._left.append(_square(flat))

    def summed(self, flat: torch.Tensor) -> None:
        if self.on:
            self._summed.append(_square(flat))

    def first_micro(self, units: torch.Tensor | float) -> None:
        """Note that the gradients hold the first of several micro-batches only, with weights that sum to `units`."""
        if self.on:
            self._first = units, _total(map(_square, self._held()))

    def own(self) -> torch.Tensor:
        """Return the squared norm of this rank's part, in the units of its backwards; call it before the reduction ends."""
        return _total([*self._left, *map(_square, self._held())])

    def row(self, place: int, num_ranks: int, units: torch.Tensor | float, device: torch.device) -> torch.Tensor:
        """Return `units` and `own` of this rank, zeros for the others, shape ``(2, num_ranks)``: the sum over ranks has all."""
        row = torch.zeros(2, num_ranks, dtype=torch.float64, device=device)
        row[:, place] = scalars_on(device, [units, self.own()])
        return row

    def unread(self, rows: torch.Tensor, num_samples: int, per_unit: float) -> UnreadNorms:
        """Begin to send the norms to the host, after the reduction; `rows` is the sum of `row`, the rest as for `norms`."""
        first = (0.0, 0.0) if self._first is None else self._first
        rest = scalars_on(rows.device, [*first, _total(self._summed)])
        return UnreadNorms(DeviceRead(torch.cat([rows.flatten(), rest])), num_samples, per_unit)

    def norms(self, units: Sequence[float], own: Sequence[float], num_samples: int, per_unit: float) -> Norms | None:
        """Return the norms of all ranks' parts, or of a single rank's first micro-batch, as mean gradients; None for one part.

        Args:
            units: sum of the weights of each rank.
            own: result of `own` on each rank.
            num_samples: the global batch; weights are scaled to samples on average.
            per_unit: the factor from a rank's units to weight x gradient.
        """
        first = (0.0, 0.0) if self._first is None else (float(self._first[0]), float(self._first[1]))
        return _norms(units, own, first, float(_total(self._summed)), num_samples, per_unit)


class UnreadNorms:
    """Norms of a step on their way from the device."""

    def __init__(self, values: DeviceRead, num_samples: int, per_unit: float) -> None:
        self._values = values
        self._num_samples = num_samples
        self._per_unit = per_unit

    def read(self) -> Norms | None:
        """Wait for the norms; see `GradNorms.norms`."""
        *ranks, units, square, summed = self._values.read()
        count = len(ranks) // 2
        return _norms(ranks[:count], ranks[count:], (units, square), summed, self._num_samples, self._per_unit)


def _norms(
    units: Sequence[float],
    own: Sequence[float],
    first: tuple[float, float],
    summed: float,
    num_samples: int,
    per_unit: float,
) -> Norms | None:
    pairs = [(weight, square) for weight, square in zip(units, own, strict=True) if weight > 0]
    if len(units) == 1 and first[0] > 0:
        pairs = [first]
    elif len(pairs) < 2:
        return None
    to_samples = num_samples / sum(units)
    parts = tuple((weight * to_samples, square * (per_unit / weight) ** 2) for weight, square in pairs)
    return Norms(parts, num_samples, summed)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Squares of half precision would overflow.
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values.detach(), dtype=wide)
    return norm.double().square()


def _total(squared_norms: Iterable[torch.Tensor]) -> torch.Tensor:
    # Models may lie on several devices.
    found = list(squared_norms)
    return sum_scalars(found) if found else torch.zeros((), dtype=torch.float64)
