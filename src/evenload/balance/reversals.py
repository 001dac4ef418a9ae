"""Shorten moves that take back recent ones. No clock, no I/O.

A move that takes back half or more of a recent one is a reversal. One may be a rank that recovered; from the second on the cost
is no line (a quota's periods, cores that two ranks share), and each halves how far a move goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evenload.balance.split import Caps, Split, num_micro, scale_shares

_WITHIN = 64
"""Steps after which a move is no longer recent. So many quiet steps also make up for one reversal."""
_MOST_HALVINGS = 4


class Reversals:
    def __init__(self) -> None:
        self._last_move: tuple[int, ...] = ()
        self._num_since = 0
        self._count = 0

    def add_step(self) -> None:
        self._num_since += 1
        if self._num_since % _WITHIN == 0:
            self._count = max(0, self._count - 1)

    def num_with(self, old: Sequence[int], new: Sequence[int]) -> int:
        """Return the number of reversals after a move from `old` to `new`."""
        along = sum((to - here) * b for to, here, b in zip(new, old, self._last_move, strict=False))
        is_reversal = self._num_since <= _WITHIN and along < -0.5 * sum(b * b for b in self._last_move)
        return self._count + is_reversal

    def accept(self, count: int) -> None:
        """Count the reversals as they are with the move that is made now."""
        self._count = count

    def moved(self, old: Sequence[int], new: Sequence[int], *, counts: bool) -> None:
        """Note a move; one that does not count (it wasn't measured) can't be taken back."""
        self._last_move = tuple(to - here for to, here in zip(new, old, strict=True)) if counts else ()
        self._num_since = 0


def num_parts(num_reversals: int) -> int:
    """Return the number of equal parts of a move of which one is made."""
    return 1 << min(max(0, num_reversals - 1), _MOST_HALVINGS)


def part_of_the_way(old: Sequence[int], split: Split, parts: int, caps: Caps) -> Split:
    """Return one of so many equal parts of a move; all of it where a rank leaves or returns, or memory has no room."""
    if any(bool(new) != bool(here) for new, here in zip(split.shares, old, strict=True)):
        return split
    near = [here * (parts - 1) + new for new, here in zip(split.shares, old, strict=True)]
    shares = scale_shares(near, sum(old))
    return split if num_micro(shares, caps) > split.num_micro else replace(split, shares=shares)
