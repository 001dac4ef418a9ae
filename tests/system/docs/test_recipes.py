"""The recipes of docs/recipes.md run as they stand, each on two ranks with uneven shares."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evenload
from evenload.testing import run_ranks
from tests.paths import DOCS
from tests.system.cli.queue_box import Box

PAGE = DOCS / "recipes.md"
SWEEP = "sweep.py"
TRAIN = """\
import argparse, evenload
from pathlib import Path
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
run = evenload.init()
data = torch.utils.data.TensorDataset(torch.randn(16, 2))
model, loader = run.prepare(torch.nn.Linear(2, 1), torch.utils.data.DataLoader(data, batch_size=8))
optimizer = torch.optim.SGD(model.parameters(), lr)
for step in loader:
    step.backward(lambda batch: model(batch[0]).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    run.log({"val_loss": abs(lr - 1e-2)})
"""


def recipes() -> dict[str, str]:
    """The page's Python blocks by the name in their first line."""
    return dict(re.findall(r"```python\n# ([^\n]+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))


def run_recipes(folder: str) -> dict[str, dict[str, Any]]:
    """Run each recipe after the other in one process; return the last losses and numbers of each."""
    blocks = recipes()
    beginning, after_training = blocks.pop("beginning"), blocks.pop("after training")
    found = {}
    for name, body in blocks.items():
        if name == SWEEP:
            continue
        own_folder = Path(folder) / name  # a rank may still read the last recipe's
        own_folder.mkdir(exist_ok=True)
        os.chdir(own_folder)
        here: dict[str, Any] = {"__name__": "recipe"}
        exec(compile(beginning + body, name, "exec"), here)
        weights = torch.cat([p.detach().flatten() for p in here["model"].parameters()])
        found[name] = {
            "weights": weights.tolist(),
            "val_loss": here["validate"](here.get("average", here["model"])),
            "epoch": here["epoch"],
        }
        here["run"].close()
        if name == "the best model":
            exec(compile(after_training, "after training", "exec"), here)
            found[name]["best"] = sorted(here["best"])
    return found


@pytest.mark.slow
def test_recipes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("alone", "two")]
    for folder in folders:
        folder.mkdir()
    (alone,) = run_ranks(run_recipes, 1, str(folders[0]), timeout_s=60)
    first, second = run_ranks(run_recipes, 2, str(folders[1]), timeout_s=60, settings={"balance": (70, 30)})
    assert first == second
    assert set(alone) == {"early stopping", "the best model", "an average", "distillation", "a GAN", "rollouts"}
    for name in alone.keys() - {"a GAN"}:  # its noise is that of each rank
        assert first[name]["val_loss"] == pytest.approx(alone[name]["val_loss"], rel=1e-3), name
        assert first[name]["weights"] == pytest.approx(alone[name]["weights"], rel=1e-2, abs=1e-4), name
    assert alone["early stopping"]["epoch"] < 99
    assert alone["the best model"]["val_loss"] < 0.4
    assert alone["the best model"]["best"] == ["model", "optimizer", "values"]
    assert list(torch.load(folders[1] / "an average" / "average.pt", weights_only=True)) == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]


@pytest.mark.slow
def test_the_sweep_finds_the_best_rate(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    script = recipes()[SWEEP]
    (tmp_path / "sweep.py").write_text(script.replace("n_trials=20, n_jobs=4", "n_trials=2, n_jobs=2"))
    (tmp_path / "train.py").write_text(TRAIN)
    state = tmp_path / "state"
    (state / "evenload").mkdir(parents=True)
    box = Box(state / "evenload")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(state)}
    command = [sys.executable, "sweep.py"]
    try:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        box.close()
    assert done.returncode == 0 and "{'lr': " in done.stdout, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "runs" / "sweep").iterdir()) == ["0", "1"]


def test_every_name_of_the_recipes_exists() -> None:
    used = set(re.findall(r"\brun\.([a-z_]+)", PAGE.read_text())) - {"device"}
    assert used and all(hasattr(evenload.Run, name) for name in used)
