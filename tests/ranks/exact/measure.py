"""The measure of exactness: relative differences in the 2-norm, over all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.ranks.exact.tasks import Recorder

BOUND = 1e-12
TABLE: list[tuple[str, Difference]] = []
"""What was measured in this session; printed at its end."""


@dataclass(frozen=True)
class Difference:
    """Of a training to the reference."""

    params: float
    grads: float
    """The largest of all backwards."""
    buffers: float
    losses: float
    metrics: float

    @property
    def worst(self) -> float:
        return max(self.params, self.grads, self.buffers, self.losses, self.metrics)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||; inf where one of them is not finite."""
    if a.shape != b.shape or not bool(a.isfinite().all()) or not bool(b.isfinite().all()):
        return float("inf")
    norm = float(b.norm())
    return float((a - b).norm()) / norm if norm else float((a - b).norm())


def difference(got: Recorder, expected: Recorder) -> Difference:
    """Compares two trainings."""
    assert len(got.grads) == len(expected.grads)
    assert [sorted(m) for m in got.metrics] == [sorted(m) for m in expected.metrics]
    losses = torch.tensor(got.losses, dtype=torch.float64), torch.tensor(expected.losses, dtype=torch.float64)
    finite = losses[1].isfinite()
    assert bool((losses[0].isfinite() == finite).all())
    return Difference(
        params=relative(got.params, expected.params),
        grads=max(relative(a, b) for a, b in zip(got.grads, expected.grads, strict=True)),
        buffers=relative(got.buffers, expected.buffers),
        losses=relative(losses[0][finite], losses[1][finite]),
        metrics=max(
            [
                float(abs(a[name] - value) / max(1.0, abs(value)))  # tensors, where totals were summed on a device
                for a, b in zip(got.metrics, expected.metrics, strict=True)
                for name, value in b.items()
            ],
            default=0.0,
        ),
    )


def check(
    name: str, ranks: Sequence[Recorder], expected: Recorder, bound: float = BOUND, *, listed: bool = True
) -> Difference:
    """Fails where a training differs from the reference, or the ranks from one another; `listed`: kept for the table."""
    found = difference(ranks[0], expected)
    if listed:
        TABLE.append((name, found))
    assert found.worst <= bound, f"{name}: {found}"
    assert ranks[0].present == expected.present, f"{name}: .grad is None elsewhere than in one process"
    for rank, record in enumerate(ranks[1:], 1):
        assert torch.equal(record.params, ranks[0].params), f"{name}: rank {rank} has other parameters than rank 0"
        assert torch.equal(record.buffers, ranks[0].buffers), f"{name}: rank {rank} has other buffers than rank 0"
        assert record.losses == ranks[0].losses or any(x != x for x in record.losses)
        assert record.metrics == ranks[0].metrics
        assert record.present == ranks[0].present
    return found
