"""The script of docs/from-pytorch.md, plain and with Evenload on two ranks with uneven shares, has the same results."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch

from evenload.testing import run_ranks
from tests.paths import DOCS

PAGE = DOCS / "from-pytorch.md"
SAME_ORDER = "sampler=torch.utils.data.RandomSampler(data[:500], generator=torch.Generator().manual_seed(0))"


def run_script(script: str, folder: str) -> tuple[str, list[float]]:
    """Return the output of a script, and the weights that it leaves."""
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        here = {"__name__": "__main__"}
        exec(compile(script, "train.py", "exec"), here)
    weights = torch.cat([parameter.detach().flatten() for parameter in here["model"].parameters()])
    if "run" in here:
        here["run"].close()
    return printed.getvalue(), weights.tolist()


@pytest.mark.slow
def test_both_scripts_give_the_same(tmp_path: Path) -> None:
    plain, ported = re.findall(r"```python\n(# (?:plain.py|evenload)\n.*?)```", PAGE.read_text(), flags=re.DOTALL)
    kept = plain.partition("loader = DataLoader")[0]
    scripts = [
        re.sub(r"^(model.*Tagger\(\))", r"torch.manual_seed(0); \1", script, flags=re.MULTILINE).replace(
            "shuffle=True", SAME_ORDER
        )
        for script in (plain, kept + ported)
    ]
    for name in ("plain", "ported"):
        (tmp_path / name).mkdir()
    ((expected, weights),) = run_ranks(run_script, 1, scripts[0], str(tmp_path / "plain"))
    results = run_ranks(run_script, 2, scripts[1], str(tmp_path / "ported"), settings={"balance": (23, 9)})
    lines = re.findall(r"^epoch .*", expected, flags=re.MULTILINE)
    assert len(lines) == 3 and lines == re.findall(r"^epoch .*", results[0][0], flags=re.MULTILINE)
    assert "epoch" not in results[1][0]
    for _, other in results:
        assert other == pytest.approx(weights, rel=1e-9, abs=1e-12)
    saved = [torch.load(tmp_path / name / "tagger.pt", weights_only=True).keys() for name in ("plain", "ported")]
    assert saved[0] == saved[1]
