"""Measure squared norms of gradients, for `balance/noise.py`: of this rank's own part before its sum, and of the sum.

A `GradNorms` exists only if `batch_max` is set. A bucket's own norm must be taken before it leaves, since the sum is made in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from evenload.balance.noise import Norms

MEASURE_EVERY = 4
"""Steps from one measured to the next."""


class GradNorms:
    def __init__(self) -> None:
        self.on = False
        """True if this attempt is measured."""
        self._held: Callable[[], Iterable[torch.Tensor]] = tuple
        self._left: list[torch.Tensor] = []
        self._summed: list[torch.Tensor] = []
        self._first: tuple[float, torch.Tensor] | None = None

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

    def first_micro(self, units: float) -> None:
        """Note that the gradients hold the first of several micro-batches only, with weights that sum to `units`."""
        if self.on and units > 0:
            self._first = units, _total(map(_square, self._held()))

    def own(self) -> float:
        """Return the squared norm of this rank's part, in the units of its backwards; call it before the reduction ends."""
        return float(_total([*self._left, *map(_square, self._held())]))

    def norms(self, units: Sequence[float], own: Sequence[float], num_samples: int, per_unit: float) -> Norms | None:
        """Return the norms of all ranks' parts, or of a single rank's first micro-batch, as mean gradients; None for one part.

        Args:
            units: sum of the weights of each rank.
            own: result of `own` on each rank.
            num_samples: the global batch; weights are scaled to samples on average.
            per_unit: the factor from a rank's units to weight x gradient.
        """
        pairs = [(weight, square) for weight, square in zip(units, own, strict=True) if weight > 0]
        if len(units) == 1 and self._first is not None:
            pairs = [(self._first[0], float(self._first[1]))]
        elif len(pairs) < 2:
            return None
        to_samples = num_samples / sum(units)
        parts = tuple((weight * to_samples, square * (per_unit / weight) ** 2) for weight, square in pairs)
        return Norms(parts, num_samples, float(_total(self._summed)))


def _square(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Squares of half precision would overflow.
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values.detach(), dtype=wide)
    return norm.double().square()


def _total(squared_norms: Iterable[torch.Tensor]) -> torch.Tensor:
    # On the CPU: models may lie on several devices.
    total = torch.zeros((), dtype=torch.float64)
    for square in squared_norms:
        total = total + square.cpu()
    return total
