"""Labels that a loss ignores are found in the batch of one loader, and of each loader of a tuple."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenload.training.compute.weighting import ignores_labels

KEPT = {"labels": torch.tensor([[1, 2], [3, 4]])}
IGNORED = {"labels": torch.tensor([[1, -100], [3, 4]])}
FLOATS = {"labels": torch.tensor([-100.0])}


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IGNORED, True),
        (KEPT, False),
        (FLOATS, False),
        ((KEPT, IGNORED), True),
        ((KEPT, FLOATS), False),
        ((torch.tensor([-100]), torch.tensor([1])), False),
        ([IGNORED], False),
        (None, False),
    ],
)
def test_ignored_labels(batch: Any, expected: bool) -> None:
    assert ignores_labels(batch) is expected
