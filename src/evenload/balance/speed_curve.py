"""Predict a job's speed on numbers of devices that it has not run on. Pure.

What was measured stays; between two measured numbers the speed follows the power law through both. Beyond them it follows
the shape that the owner gave, or else ``k^0.9``; where the last two measured numbers scaled worse than that shape, they determine
how it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_EXPONENT = 0.9
"""As `policies.elastic` takes a job whose speed was never measured."""


def rates_from(
    measured: Mapping[int, float], most: int, given: Sequence[float] = (), trust: Mapping[int, float] | None = None
) -> tuple[float, ...]:
    """Return the work a second on 1, 2, … `most` devices, from what was measured on some numbers of devices.

    Of `given`, the owner's own curve, only the shape counts once something was measured. `trust` (1 where left out) is the
    part of a measurement's distance from the shape through the most trusted one that still counts: 0 for one too old.
    """
    known = sorted((num, rate) for num, rate in measured.items() if num > 0 and rate > 0)
    if not known:
        return tuple(given)
    # Logarithms of what was measured over the shape; between and beyond them lines in log k.
    corners = [(math.log(num), math.log(rate / _shape(num, given))) for num, rate in known]
    if trust:
        trusts = [trust.get(num, 1.0) for num, _ in known]
        newest = corners[trusts.index(max(trusts))][1]
        corners = [(x, newest + part * (y - newest)) for (x, y), part in zip(corners, trusts, strict=True)]
    return tuple(_shape(num, given) * math.exp(_at(math.log(num), corners)) for num in range(1, most + 1))


def _shape(num: int, given: Sequence[float]) -> float:
    if given and all(rate > 0 for rate in given):
        return given[min(num, len(given)) - 1]
    return math.pow(num, _EXPONENT)


def _at(x: float, corners: Sequence[tuple[float, float]]) -> float:
    if x <= corners[0][0] or len(corners) == 1:
        return corners[0][1]
    after = next((index for index, (place, _) in enumerate(corners) if place >= x), None)
    (x1, y1), (x2, y2) = corners[-2:] if after is None else corners[after - 1 : after + 1]
    slope = (y2 - y1) / (x2 - x1)
    if after is None:
        return y2 + min(0.0, slope) * (x - x2)
    return y1 + slope * (x - x1)
