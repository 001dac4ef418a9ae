"""Losses over the whole global batch: the weights of one process that has the batch whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.exact.test_splits import ALL, SOME, compare


@pytest.mark.every_strategy
def test_clip_on_every_split(strategy: str, tmp_path: Path) -> None:
    compare("Clip", ALL, strategy, tmp_path)


@pytest.mark.every_strategy
@pytest.mark.parametrize("name", ["SimClr", "CrossCorrelation"])
def test_on_some_splits(name: str, strategy: str, tmp_path: Path) -> None:
    compare(name, SOME, strategy, tmp_path)


def test_buffers_that_change_the_output_are_equal_in_both_passes(tmp_path: Path) -> None:
    compare("SpectralSimClr", SOME, "ddp", tmp_path)
