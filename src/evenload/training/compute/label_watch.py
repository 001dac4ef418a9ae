"""Warn once if labels are ignored but loss_fn returns no weight."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from evenload.training.compute.weighting import ignores_labels


class LabelWatch:
    """Checks the first micro-batches only."""

    def __init__(self) -> None:
        self._left = 3
        self._lock = threading.Lock()

    def check(self, data: Any) -> None:
        """Check the data of a micro-batch whose loss came without weight."""
        if not self._left:
            return
        with self._lock:  # replicas check concurrently
            if not self._left:
                return
            self._left -= 1
            if not ignores_labels(data):
                return
            self._left = 0
        warnings.warn(
            "the batch's labels contain -100, but loss_fn returned no weight, so its mean over tokens is not the global "
            "batch's. Return (loss, evenload.count_tokens(batch['labels'])) instead",
            stacklevel=2,
        )
