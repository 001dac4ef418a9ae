"""The layout of shared memory, and the start of a process by which it is told from another with the same id."""

from __future__ import annotations

import os
import platform

import pytest

from evenload.training.comm import shared_memory
from evenload.training.comm.shared_memory import ChannelLayout, SegmentMember, SpinTime, start_ticks, why_unavailable


def test_rows_of_different_ranks_are_on_different_cache_lines() -> None:
    layout = ChannelLayout(num_writers=3, row_bytes=480)
    assert layout.slot_bytes == 64 + 512
    assert layout.num_bytes == 3 * 64 + 2 * 3 * layout.slot_bytes
    assert ChannelLayout(0, 0).num_bytes == 0


def test_a_later_process_with_the_same_id_is_another() -> None:
    own = SegmentMember(0, os.getpid(), start_ticks(os.getpid()))
    assert own.alive
    assert not SegmentMember(0, own.pid, own.start_ticks - 1).alive
    assert start_ticks(2**22 + 1) == -1


def test_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "not linux on aarch64" in why_unavailable()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(shared_memory, "start_ticks", lambda pid: -1)
    assert "/proc can't be read" in why_unavailable()


def test_a_rank_spins_for_long_only_where_waits_are_short() -> None:
    spin = SpinTime()
    assert spin.nanoseconds == 20_000
    spin.add_wait(150_000)
    assert spin.nanoseconds == 200_000
    for _ in range(4):
        spin.add_wait(10_000_000)
    assert spin.nanoseconds == 20_000
