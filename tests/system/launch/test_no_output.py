"""Output that nobody takes ends no run: closed streams, a pipe whose reader is gone, an encoding that lacks letters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenload.records.reader import read_events

SCRIPT = """
import torch, evenload
run = evenload.init(project_dir="run", log_every_s=1e-3)
model, loader = run.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.ones(64, 1), 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.resume(model=model, optimizer=optimizer)
for step in loader:
    step.backward(lambda x: model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    run._context.recorder.event("note", "2 \\N{RIGHTWARDS ARROW} 3")
"""
RUN = f"{sys.executable} -m evenload.cli.main run -d cpu train.py"
PLAIN = f"{sys.executable} train.py"


@pytest.mark.parametrize("start", [RUN, PLAIN], ids=["evenload run", "python"])
@pytest.mark.parametrize("way", ["exec {} <&- >&- 2>&-", "({}; echo $? > code) | true", "exec {} > log 2>&1"])
def test_the_run_ends_well(tmp_path: Path, start: str, way: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(way.format(start), shell=True, cwd=tmp_path, env=variables, timeout=80, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
    code = tmp_path / "code"
    # Python itself ends with 120 where the rest of its output finds no reader.
    assert not code.exists() or code.read_text() in ("0\n", "120\n")
    events = read_events(tmp_path / "run")
    assert events[-1].kind == "close" and sum(event.kind == "checkpoint" for event in events) == 1
