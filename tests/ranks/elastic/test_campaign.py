"""Random faults in a run, or in two (`make long`), as in `python -m benchmarks faults`, which has 300 of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.faults import Process, disturb

from tests.warm import Command

NUM_FAULTS = 16


def _start(arguments: Sequence[str], folder: Path) -> Process:
    return Command(arguments, folder, {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(("seed", "num_ranks"), [(17, 4), pytest.param(57, 4, marks=pytest.mark.long)])
def test_random_faults_lose_nothing_and_use_nothing_twice(tmp_path: Path, seed: int, num_ranks: int) -> None:
    outcome = disturb(tmp_path, seed, NUM_FAULTS, num_ranks, _start, ends=False)
    printed = (tmp_path / "printed").read_text()
    assert not outcome.problems, (outcome, printed[-8000:])
    # Some may not come to their points: a read in a loader that was ahead, a gather after the last epoch.
    assert len(outcome.happened) >= NUM_FAULTS - 3, (outcome, printed[-8000:])
    assert outcome.difference <= 1e-9
