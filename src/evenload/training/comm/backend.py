"""Choose the backend of the gradients."""

from __future__ import annotations

from collections.abc import Sequence


def common_backend(rows: Sequence[tuple[bool, int]]) -> str:
    """Return the backend of the gradients from each rank's (wants NCCL, GPU): NCCL refuses two ranks on one GPU."""
    distinct = len({gpu for _, gpu in rows}) == len(rows)
    return "nccl" if distinct and all(wants for wants, _ in rows) else "gloo"
