"""Two machines, one of which is asked to stop: both save at the same step and end with the same code."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from evenload.training.checkpoint import files
from tests.system.launch.test_preemption import TRAIN
from tests.system.rendezvous.typed import on_both


def _steps(folder: Path, rank: int) -> list[int]:
    path = folder / f"box{rank + 1}" / f"steps-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.slow
def test_a_request_on_one_machine_stops_both(boxes: Any, tmp_path: Path) -> None:
    typed = on_both(boxes, tmp_path, TRAIN, initialised=False, script=("train.py", "0.05", "resumes"))
    deadline = time.monotonic() + 60
    while len(_steps(tmp_path, 1)) < 3:
        assert all(one.process.poll() is None for one in typed), [one.text for one in typed]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    typed[1].process.send_signal(signal.SIGINT)
    (first, first_text), (second, second_text) = [one.end() for one in typed]
    assert (first, second) == (75, 75), first_text + second_text
    done = _steps(tmp_path, 0)
    assert _steps(tmp_path, 1) == done
    newest = files.newest(tmp_path / "box1" / "run")
    assert newest is not None and files.step_of(newest) == len(done)
    assert f"stopped at step {len(done)}, saved in" in first_text
    assert "(requested on another rank); start the same command again on all machines" in first_text
    assert "SIGINT: saving and stopping after this step" in second_text
    assert "all ranks saved and stopped; start the same command again on all machines" in second_text
