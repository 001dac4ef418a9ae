"""A night of a queue alone, in faked time: a small part of ``python -m benchmarks week``."""

from __future__ import annotations

import os

import pytest

from tests.system.scheduler.week import run

SATURDAY = (2026, 10, 24, 18)


@pytest.mark.timeout(400)
def test_nothing_is_lost_and_every_bill_is_right() -> None:
    """Time stands still between two events, so a bill has no part of a second too much."""
    found = run(12, seed=1, rate=0.0, first=SATURDAY)
    assert found.jobs > 5 and found.kills >= 1 and found.reboots == 1
    assert found.full_disks == 2 or os.geteuid() != 0
    assert (found.lost, found.run_twice, found.at_once) == ([], [], [])
    assert max(map(abs, found.bills_off_s)) < 0.01
    assert found.reservations == [] and found.num_windows > 0
    assert found.oldest_backup_s <= 2 * 3600.0
    assert (found.record, found.left_behind) == ([], [])
