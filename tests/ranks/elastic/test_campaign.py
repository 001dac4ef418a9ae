"""Random faults in a run, or in two (`make long`), as in `python -m benchmarks faults`, which has 300 of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.faults import Process, disturb, notices

from evenload.records.values import RunEvent
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


def test_a_kill_is_timed_by_the_notice_of_its_own_loss() -> None:
    """After a start of all ranks a worker has the name of one before; a kill before it was taken for noticed 11 s late."""

    def event(kind: str, time_s: float, worker: str = "") -> RunEvent:
        return RunEvent(kind, "", time_s + 0.05, 1, {"worker": worker, "time_s": time_s} if worker else {})

    kills = [
        {"time_s": time_s, "worker": f"worker-{worker}"}
        for time_s, worker in ((1, 0), (10, 2), (21, 2), (21.02, 3), (40, 1))
    ]
    lost = [(1.1, "worker-0"), (21.2, "worker-3"), (21.1, "worker-2"), (33, "worker-1"), (50, "worker-1")]
    events = [event("restarted", 10.3), *(event("lost", *one) for one in lost)]
    assert notices(kills, events, [45.0, 60.0]) == [(1, 1.1), (21, 21.1), (21.02, 21.2)]
