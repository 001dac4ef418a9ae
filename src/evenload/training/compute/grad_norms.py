"""Squared norms of gradients in measured steps: of this rank's own part before it is summed, and of the sum.

What they are for: `balance/noise.py`. Only where `batch_max` is set is there a `GradNorms` at all. A bucket's own norm must be
taken in the moment before it leaves, since the sum is made in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from evenload.balance.noise import Norms

MEASURE_EVERY = 4
"""Steps from one measured to the next."""


class GradNorms:
    """Collects the norms of one attempt."""

    def __init__(self) -> None:
        self.on = False
        """Whether this attempt is measured."""
        self._held: Callable[[], Iterable[torch.Tensor]] = tuple
        self._left: list[torch.Tensor] = []
        self._summed: list[torch.Tensor] = []
        self._first: tuple[float, torch.Tensor] | None = None

    def follow(self, held: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Learns where gradients lie that have not left yet."""
        self._held = held

    def begin(self, on: bool) -> None:
        """An attempt begins."""
        self.on = on
        self._left, self._summed, self._first = [], [], None

    def leaves(self, flat: torch.Tensor) -> None:
        """A bucket is about to be summed over the ranks."""
        if self.on:
            self._left.append(_square(flat))

    def summed(self, flat: torch.Tensor) -> None:
        """A bucket holds the final gradient."""
        if self.on:
            self._summed.append(_square(flat))

    def first_micro(self, units: float) -> None:
        """The first of several micro-batches, of weight `units` in sum, is in the gradients, and nothing else."""
        if self.on and units > 0:
            self._first = units, _total(map(_square, self._held()))

    def own(self) -> float:
        """This rank's part, in the units of its backwards; to be asked for before the reduction ends."""
        return float(_total([*self._left, *map(_square, self._held())]))

    def norms(self, units: Sequence[float], own: Sequence[float], num_samples: int, per_unit: float) -> Norms | None:
        """All ranks' parts, or where there is one the first micro-batch, as mean gradients.

        Args:
            units: weights of each rank, in sum.
            own: what `own` gave on each.
            num_samples: the global batch; a weight counts as so many samples as it is on average.
            per_unit: the factor from a rank's units to weight x gradient.

        Returns:
            None where only one part computed anything.
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


def _total(squares: Iterable[torch.Tensor]) -> torch.Tensor:
    """On the CPU: models may lie on several devices."""
    total = torch.zeros((), dtype=torch.float64)
    for square in squares:
        total = total + square.cpu()
    return total
