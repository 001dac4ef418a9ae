"""Decide which ranks leave the steps where the user set the shares. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from evenload.balance.decision import Decision, Observation
from evenload.balance.split import Caps
from evenload.balance.values import Cost


class FixedShares:
    """Shares that never move; a rank whose share is 0 computes nothing as long as it may leave the steps."""

    costs: tuple[Cost, ...] | None = None
    """As of `Balancer`: nothing is measured here."""
    foresees = False
    rest_s = 0.0

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self.may_leave: Sequence[bool] = (False,) * len(shares)
        """May be set at any time; rank 0 stays."""
        self.quantum = 1
        self._out: tuple[int, ...] = ()

    def observe(self, seen: Observation) -> Decision | None:
        """Return a decision where ranks without samples may leave now, or have to come back."""
        out = tuple(rank for rank, share in enumerate(self.shares) if rank and not share and self.may_leave[rank])
        if out == self._out:
            return None
        changed = sorted({*out} ^ {*self._out})
        leaves, self._out = len(out) > len(self._out), out
        names = f"{'ranks' if len(changed) > 1 else 'rank'} {', '.join(map(str, changed))}"
        what = "left out" if leaves else "back in the steps"
        about = changed[0] if len(changed) == 1 else None
        kind = "left_out" if leaves else "returned"
        return Decision(self.shares, 1, kind, about, None, f"{names} {what} with a share of 0", 0.0, 0.0)

    def set_caps(self, caps: Caps) -> Decision | None:
        """As of `Balancer`: limits of memory change the number of micro-batches, and no share."""
        return None

    def take_note(self) -> str | None:
        """As of `Balancer`: nothing to say."""
        return None
