"""Choose the format of gradients for ``wire="auto"``: the fastest of those whose loss disappears in the gradient's own noise.

A gradient is a mean over a sample of the data, so it has a variance tr(S)/B around the true one (McCandlish et al. 2018). What
a format loses adds to it. Below `_ADDED_VARIANCE` of it, a step moves the weights as with a batch that is smaller by that share;
error feedback returns the rest in later steps.

Note [The variance]
  Ranks sum n_r of N samples. With q = Σ n_r² / N²,  Σ_r |g_r|² - q |g|²  has the expectation (1 - q) N s² in units of a sample's
  variance s², and that of |g| itself has N s². So  noise² = (Σ_r |g_r|² - q |g|²) / (1 - q).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenload.balance.exchange_times import Option

_ADDED_VARIANCE = 0.01
_LEAST_GAIN = 1.02
"""A format that is not exact must make a step this much shorter."""


@dataclass(frozen=True)
class ObservedGradients:
    """Sums over some steps, in one unit."""

    own_square: float
    """Σ_r |g_r|² over the ranks' own gradients."""
    noise_square: float
    """Of the summed gradient; see `noise_square`."""
    lost_square: Mapping[str, float]
    """By format, Σ_r |g_r - Q(g_r)|²."""


def noise_square(shares: Sequence[int], own_square: float, square: float) -> float:
    """Return the variance of the sum of gradients; 0 if one rank computed all. See Note [The variance]."""
    q = sum(n * n for n in shares) / max(1, sum(shares)) ** 2
    return max(0.0, (own_square - q * square) / (1 - q)) if q < 1 else 0.0


def choose_wire(observed: ObservedGradients, options: Mapping[str, Option]) -> tuple[str, str]:
    """Return a format and the reason. `options`: by format, ``fp32`` among them."""
    exact = options["fp32"]
    added = {
        name: lost / observed.noise_square if observed.noise_square > 0 else float("inf")
        for name, lost in observed.lost_square.items()
    }
    allowed = [name for name in added if added[name] <= _ADDED_VARIANCE and name in options]
    best = min(allowed, key=lambda name: options[name].step_s, default="fp32")
    times = ", ".join(f"{name} {option.step_s:.3g} s" for name, option in options.items())
    if not allowed:
        least = min(added.values(), default=float("inf"))
        why = "the gradient's noise is not known" if least == float("inf") else f"each adds {least:.1%} of it or more"
        return "fp32", f"no smaller format stays below {_ADDED_VARIANCE:.0%} of the gradient's own variance ({why})"
    if best == "fp32" or exact.step_s < _LEAST_GAIN * options[best].step_s:
        return "fp32", f"a smaller format would not shorten a step by {_LEAST_GAIN - 1:.0%}: {times}"
    return best, (
        f"it adds {added[best]:.2%} to the gradient's own variance (at most {_ADDED_VARIANCE:.0%} is taken), and shortens a step "
        f"{exact.step_s / options[best].step_s:.2f}×: {times}"
    )
