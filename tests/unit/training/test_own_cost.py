"""Count the Python calls of a step on one device: they are its own cost, in a unit that load does not change."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.records import values
from evenload.training.comm import clock
from evenload.training.step import step as step_module
from evenload.training.step import step_recorder, straight

SOURCE = str(Path(evenload.__file__).parent)
MOST_CALLS = {"usual": 211, "straight": 105}
"""Of Python functions in a step, with its record; `benchmarks small_steps` measures the seconds."""
AT_TIMES = ("bottleneck.py", "summary.py", "console.py", "device_state.py")
"""Files whose calls, and what they call, depend on how long the steps take."""
NUM_STEPS = 20


@pytest.mark.parametrize("way", MOST_CALLS)
def test_a_step_on_one_device_makes_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(straight, "_LASTS_S", 1e9)
    if way == "usual":
        monkeypatch.setattr(step_module, "begin_line", lambda *_: None)
    monkeypatch.setattr(step_recorder, "_WRITE_EVERY_S", 0.0)  # each step by itself, however long the steps take
    run = evenload.init(project_dir=tmp_path / "run", seed=0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(400, 8), torch.randn(400, 1))
    model, loader = run.prepare(model, DataLoader(data, batch_size=4, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: object) -> None:
        file, caller = frame.f_code.co_filename, frame.f_back
        is_at_times = file.endswith(AT_TIMES) or (caller is not None and caller.f_code.co_filename.endswith(AT_TIMES))
        if event == "call" and file.startswith(SOURCE) and not is_at_times:
            calls[f"{Path(file).name} {frame.f_code.co_name}"] += 1

    try:
        for step in loader:
            if step.index == NUM_STEPS:
                sys.setprofile(count)  # without the first steps, in which everything is looked at
            step.backward(lambda batch: (model(batch[0]) - batch[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step.index == 2 * NUM_STEPS - 1:
                break
    finally:
        sys.setprofile(None)
        run.close()
    assert calls.total() / NUM_STEPS <= MOST_CALLS[way], calls.most_common(60)


def test_segments_of_clock_and_records_are_the_same() -> None:
    assert tuple(f"{name}_s" for name in clock.SEGMENTS) == values.SEGMENTS
