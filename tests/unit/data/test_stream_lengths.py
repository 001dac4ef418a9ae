"""Check what ranks that read an iterable dataset agree on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evenload.errors import DataError
from evenload.training.data.stream import StreamBatch, check_same_stream


def test_a_rank_can_say_what_it_has_read_if_rank_0_is_lost_meanwhile() -> None:
    said: list[Sequence[int] | None] = []

    def agree(values: Sequence[int] | None) -> list[int]:
        said.append(values)
        return list(values or ())  # as after the loss of rank 0, whose place this rank takes

    batch = StreamBatch([1, 2, 3], 0)
    assert check_same_stream(agree, 1, batch, "step 4") is batch and said == [[3]]


def test_another_length_than_rank_0_s_is_an_error() -> None:
    with pytest.raises(DataError, match=r"step 4: rank 1 read 3 samples where rank 0 read 2"):
        check_same_stream(lambda values: [2], 1, StreamBatch([1, 2, 3], 0), "step 4")
