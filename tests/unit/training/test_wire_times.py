"""Check the predicted processor time of a wire format."""

from __future__ import annotations

import torch

from evenload.balance.wire_bytes import FORMATS, GradientSize
from evenload.training.parallel.wire.formats import codec_seconds


def test_every_format_that_is_not_exact_has_a_cost() -> None:
    size = GradientSize(2 * 256 * 256, 4, ((256, 256), (256, 256)))
    found = codec_seconds(torch.device("cpu"), size)
    assert set(found) == set(FORMATS) - {"fp32"} and all(seconds > 0 for seconds in found.values())
    # Nothing of small matrices is compressed.
    assert codec_seconds(torch.device("cpu"), GradientSize(16, 4, ((4, 4),)))["powersgd"] == 0
