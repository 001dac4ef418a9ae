"""Strategy ``local``: ddp inside each island; islands step apart and synchronise rarely (outer.py, islands/)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from evenload.balance.exchange_times import BucketSizes
from evenload.training.comm.broadcast import broadcast
from evenload.training.comm.groups import Groups
from evenload.training.parallel.ddp import ReplicaStrategy


class IslandStrategy(ReplicaStrategy):
    """Sums gradients over the ranks of this rank's island: `groups` are the island's."""

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        """Take the models; `groups` are those of all ranks, which begin with the same weights."""
        for model in models:
            broadcast((*model.parameters(), *model.buffers()), groups)
        super().attach(models, self._groups)
        if self._link is not None:
            self._link.measure(self._context.device)

    def _bucket_sizes(self) -> BucketSizes | None:
        return None  # the link that was measured is between machines, which an island does not span
