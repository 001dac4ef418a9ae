"""The example itself: on one rank and on two, under our launcher, torchrun and plain python, it learns the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.warm import run

EXAMPLE = ROOT / "examples" / "train_gpt.py"
TINY = ("--steps", "4", "--batch-size", "10", "--width", "32", "--depth", "1", "--context", "16", "--sample-bytes", "5")


def validation_loss(folder: Path, *command: str) -> float:
    """Runs the example in a folder of its own."""
    done = run([*command, str(EXAMPLE), *TINY, "--project-dir", str(folder)], folder.parent, 100)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"validation loss ([\d.]+) nats a byte, over ([\d,]+) bytes", done.stdout)
    assert found[1] == "3,840"
    return float(found[0])


@pytest.mark.slow
def test_the_validation_loss_does_not_depend_on_the_devices(tmp_path: Path) -> None:
    alone = validation_loss(tmp_path / "alone")
    ours = ("-m", "evenload.cli.main", "run", "-d", "cpu:2", "--throttle", "1,0.5", "--balance", "7,3")
    two = validation_loss(tmp_path / "two", *ours)
    torchrun = validation_loss(tmp_path / "torchrun", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert two == pytest.approx(alone, abs=1e-5)
    assert torchrun == pytest.approx(alone, abs=1e-5)
    assert alone < 5.7  # ln 256 = 5.55 and falling: the weights and the data are what they should be
