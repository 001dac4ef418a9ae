"""The example of a cut model: on two CPU places alone and on two ranks, it learns what it learns on one device."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from evenload.testing import run_ranks
from evenload.training.launch import worker
from tests.paths import ROOT

EXAMPLE = ROOT / "examples" / "model_on_two_devices.py"
SMALL = ("--epochs", "2", "--steps", "3", "--width", "16", "--depth", "3", "--devices", "cpu,cpu")


def _run(folder: str) -> str:
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        worker.run_script([str(EXAMPLE), *SMALL])
    return printed.getvalue()


def test_it_learns_the_same_alone_and_on_two_ranks(tmp_path: Path) -> None:
    told = []
    for num_ranks, settings in ((1, {}), (2, {"balance": [40, 24]})):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        printed = run_ranks(_run, num_ranks, str(folder), devices=("cpu", "cpu"), settings=settings, timeout_s=100)
        assert all(len(re.findall(r"Reader on cpu: \d of 6 layers, .* expected", text)) == 2 for text in printed)
        told.append(float(re.findall(r"epoch 1: validation loss ([\d.]+),", printed[0])[-1]))
    assert told[0] == pytest.approx(told[1], abs=1e-5)
