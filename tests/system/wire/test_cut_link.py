"""A link that is cut while islands synchronise: the run goes on, or ends with the machine at fault named; nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import cut_link

from evenload.testing import hosts


@pytest.mark.slow
def test_a_cut_during_a_synchronisation_loses_nothing(tmp_path: Path) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    whole = cut_link.train(tmp_path / "whole")
    assert whole["codes"] == [0, 0], whole["screens"]
    found = cut_link.cut(tmp_path / "cut", 1, 2.0, whole["weights"])
    assert found["is_named"] and not found["is_lost"], found


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_twenty_cuts_of_ten_seconds(tmp_path: Path) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    expected = cut_link.train(tmp_path / "whole")["weights"]
    found = [cut_link.cut(tmp_path / str(seed), seed, cut_link.CUT_S, expected) for seed in range(cut_link.NUM_CUTS)]
    assert all(one["is_named"] and not one["is_lost"] for one in found), found
