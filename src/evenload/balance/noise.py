"""Gradient noise scale, estimated from the squared norms that a step has anyway.

Note [The estimate]
  McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1. Let G be the true gradient and tr(S)
  the trace of one sample's covariance. The mean gradient g_r of b_r samples has E|g_r|^2 = |G|^2 + tr(S) / b_r, and the
  step's own g, the mean over B samples, E|g|^2 = |G|^2 + tr(S) / B. The paper has parts of one size b:

      tr(S) ~ (|g_b|^2 - |g|^2) / (1/b - 1/B)          |G|^2 ~ (B |g|^2 - b |g_b|^2) / (B - b)

  Ranks of different speed have parts of different size. Weigh them by c_r = b_r / sum(b), which sum to 1:

      E sum_r c_r |g_r|^2 = |G|^2 + tr(S) * h          h = sum_r c_r / b_r = R / sum(b)      for R parts

  so tr(S) ~ (sum_r c_r |g_r|^2 - |g|^2) / (h - 1/B) is unbiased for any sizes, and |G|^2 ~ |g|^2 - tr(S) / B is too. With
  equal parts this is the paper's. Where the parts make up the whole, sum_r c_r |g_r|^2 - |g|^2 = sum_r c_r |g_r - g|^2: the
  pooled variance between the parts, never below 0, and of all such weights the ones of least variance for normal noise.
  A single part (the first of several micro-batches) is served by the same two lines, with R = 1.

  Both are averaged over steps before one is divided by the other: the mean of ratios would be biased, and |G|^2 of one step
  is often below 0. |G|^2 is the small difference of large numbers where gradients are noisy: its standard error is kept, and
  what is decided follows the noise scale that is surely there (|G|^2 one standard error higher), not a ratio that explodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WINDOW = 64
"""The averages are plain means of the first so many measured steps, and forget at this rate afterwards."""
LEAST_MEASURED = 8
"""No estimate is given from fewer measured steps."""
MOST_BATCHES = 1000.0
"""A noise scale beyond so many of the batches it was measured with can't be distinguished from an infinite one."""


@dataclass(frozen=True)
class Norms:
    """Squared norms of the mean gradients of one step."""

    parts: tuple[tuple[float, float], ...]
    """For each part of the batch its samples and the squared norm of its own mean gradient."""
    num_samples: int
    """The whole batch."""
    square: float
    """The squared norm of its mean gradient."""


@dataclass(frozen=True)
class Moments:
    """Estimates from one step: each may be far off, and `square` below 0."""

    trace: float
    """Of one sample's covariance, tr(S)."""
    square: float
    """Of the true gradient, |G|^2."""


def moments(norms: Norms) -> Moments | None:
    """Return the two unbiased estimates of the note above; None if the parts carry no information or a norm is not finite."""
    parts = [(num, square) for num, square in norms.parts if num > 0]
    total = sum(num for num, _ in parts)
    if not parts or not all(math.isfinite(square) for _, square in (*parts, (0.0, norms.square))):
        return None
    apart = len(parts) / total - 1 / norms.num_samples
    if apart <= 1e-9 / norms.num_samples:  # the only part is the whole
        return None
    trace = (sum(num * square for num, square in parts) / total - norms.square) / apart
    return Moments(trace, norms.square - trace / norms.num_samples)


class NoiseScale:
    """Running averages of both estimates, and their ratio."""

    def __init__(self) -> None:
        self.num_measured = 0
        self._trace = 0.0
        self._square = 0.0
        self._square_of_square = 0.0
        self._num_samples = 1

    def add(self, norms: Norms) -> None:
        """Add a measured step."""
        estimate = moments(norms)
        if estimate is None:
            return
        self.num_measured += 1
        weight = 1 / min(self.num_measured, WINDOW)
        self._trace += weight * (estimate.trace - self._trace)
        self._square += weight * (estimate.square - self._square)
        self._square_of_square += weight * (estimate.square**2 - self._square_of_square)
        self._num_samples = norms.num_samples

    @property
    def samples(self) -> float | None:
        """tr(S) / |G|^2: the number of samples with as much noise as gradient. None before enough was measured."""
        if self.num_measured < LEAST_MEASURED:
            return None
        return self._ratio(self._square)

    @property
    def at_least(self) -> float | None:
        """The same with |G|^2 one standard error higher: a lower bound. None like `samples`."""
        if self.num_measured < LEAST_MEASURED:
            return None
        variance = max(self._square_of_square - self._square**2, 0.0)
        # Beyond the window the average has the weight of twice as many equal terms, less one.
        count = min(self.num_measured, 2 * WINDOW - 1)
        return self._ratio(max(self._square, 0.0) + math.sqrt(variance / (count - 1)))

    def _ratio(self, square: float) -> float:
        trace, most = max(self._trace, 0.0), MOST_BATCHES * self._num_samples
        return most if trace > 0 and trace >= most * square else trace / max(square, 1e-300)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "num_measured": self.num_measured,
            "trace": self._trace,
            "square": self._square,
            "square_of_square": self._square_of_square,
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.num_measured = int(state["num_measured"])
        self._trace, self._square = float(state["trace"]), float(state["square"])
        self._square_of_square = float(state["square_of_square"])
        self._num_samples = int(state["num_samples"])
