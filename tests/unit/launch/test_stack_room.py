"""Frames of a script lie in one piece of memory: no call of a step maps a new one."""

from __future__ import annotations

import resource
import sys

import pytest

from evenload.training.launch import worker
from evenload.training.launch.stack_room import with_room

NUM_CALLS = 200
DEPTHS = range(200)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")


def _leaf(a: int, b: int, c: int) -> int:
    """Its frame is larger than one of `_faults_at`, so that at some depth only it has no place."""
    d = e = f = g = h = i = j = k = m = n = o = p = a
    return b + c + d + e + f + g + h + i + j + k + m + n + o + p


def _faults_at(depth: int) -> int:
    """Return the page faults of many calls that are nested so deep."""
    if depth:
        return _faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(NUM_CALLS):
        _leaf(1, 2, 3)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _most_faults() -> int:
    for depth in DEPTHS:
        _faults_at(depth)  # the memory of a piece that stays is touched once
    return max(map(_faults_at, DEPTHS))


@with_room
def _most_faults_with_room() -> int:
    return _most_faults()


def test_no_depth_of_nested_calls_maps_memory_at_each_call() -> None:
    assert _most_faults_with_room() < NUM_CALLS // 10
    if sys.version_info < (3, 12):
        assert _most_faults() >= NUM_CALLS  # what it is for


def test_a_rank_runs_its_script_with_room() -> None:
    assert worker.main.__code__.co_stacksize > 10_000
