"""Labels that a loss ignores are found in the batch of one loader, and of each loader of a tuple."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from evenload.training.compute.label_watch import LabelWatch
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


def test_a_loss_that_counts_for_nothing_is_named_once() -> None:
    watch = LabelWatch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss, weight in ((0.0, 0.0), (torch.nan, 0.0), (0.5, 2.0), (0.5, None)):
            watch.check(None, torch.tensor(loss), weight)
    with pytest.warns(UserWarning, match=r"with the weight 0: these samples count for nothing.*batch_loss"):
        watch.check(None, torch.tensor(0.5), 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check(None, torch.tensor(0.5), 0.0)
