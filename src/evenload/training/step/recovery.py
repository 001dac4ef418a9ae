"""`Recovery`: what the engine asks of elastic/ when a rank is lost inside a backward."""

from __future__ import annotations

from typing import Protocol

from evenload.errors import PeerLostError


class Recovery(Protocol):
    @property
    def newest_number(self) -> int:
        """Number of the newest membership that this rank knows and is prepared for, whether it is in force or not."""

    @property
    def knows_loss(self) -> bool:
        """True if a rank is known to be lost, and this one has not gone on without it yet."""

    def recover(self, error: PeerLostError) -> float | None:
        """Begin a generation of the remaining ranks, on all of them.

        Returns:
            The loss of the step if another rank has its gradients already: this rank has missed the step, and receives the state
            of a rank that has not, at the end of the loop body. None: no rank has them, so all compute the step again.

        Raises:
            PeerLostError: `error`, or a later one, where the run can't continue.
        """
