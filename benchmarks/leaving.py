"""How ranks leave that torchrun started: the interpreter ends them, where a process that used gloo may die after its work.

Method: `torchrun --nproc-per-node 2` on a script that trains a few steps and says nothing about its end, so that Evenload's
clean-up is the interpreter's exit function; 20 times, one after the other.

Bar: 20 of 20 end with 0, without a word of a crash.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import rows

_SCRIPT = """
import torch, evenload
from torch.utils.data import DataLoader, TensorDataset
run = evenload.init(project_dir="run", log_every_s=1000)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
model, loader = run.prepare(model, DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=8))
optimizer = torch.optim.AdamW(model.parameters())
for step in loader:
    step.backward(lambda batch: model(batch[0]).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print(f"done {run.rank}")
"""


def measure(quick: bool) -> dict[str, Any]:
    """Runs torchrun again and again."""
    num_runs, well, crashed = (1 if quick else 20), 0, 0
    stories: list[str] = []
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
            Path(folder, "train.py").write_text(_SCRIPT)
            ended = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
            )
        crashed += "terminate called" in ended.stderr
        if ended.returncode == 0 and sorted(re.findall(r"done (\d)", ended.stdout)) == ["0", "1"]:
            well += 1
        else:
            stories.append(f"exit code {ended.returncode}\n{ended.stdout[-1000:]}\n{ended.stderr[-4000:]}")
    return {
        "num_runs": num_runs,
        "ended_well": well,
        "crashed": crashed,
        "stories": stories,
        "bars": {"all runs end with 0, no crash": well == num_runs and not crashed},
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    counts = [str(result[key]) for key in ("num_runs", "ended_well", "crashed")]
    return "\n".join([*result["stories"], rows(["runs", "ended well", "crashed"], [counts])])
