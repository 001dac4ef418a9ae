"""`python train.py`, without a launcher: the weights of the plain loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.paths import ROOT
from tests.ranks.exact.measure import check
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS

SCRIPT = """
import sys, torch
from tests.ranks.exact.ranks import Setting, train
from tests.ranks.exact.tasks import TASKS
torch.set_num_threads(1)
record = train(TASKS["Clipped"](), Setting(micro_batch=11), sys.argv[1])
torch.save(record, sys.argv[2])
"""


def test_the_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "record.pt"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, str(script), str(tmp_path / "run"), str(saved)]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = torch.load(saved, weights_only=False)
    assert set(record.num_micro) == {3}
    check("Clipped by python train.py", [record], Reference(TASKS["Clipped"](), record.num_micro).train())
