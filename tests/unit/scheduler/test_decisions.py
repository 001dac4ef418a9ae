"""Decisions on random queues are those of before, see `decisions`."""

from __future__ import annotations

import json

import pytest

from tests.unit.scheduler.decisions import QUEUES, STORED, hash_of


@pytest.mark.parametrize("name", QUEUES)
def test_decisions_are_as_stored(name: str) -> None:
    known = json.loads(STORED.read_text())
    assert hash_of(QUEUES[name]) == known[name], (
        "decisions have changed: where that is intended, python -m tests.unit.scheduler.decisions --store --traces DIR"
    )
