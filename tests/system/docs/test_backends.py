"""The pages on Slurm, Ray and Kubernetes: their job files are read, and what they say would be sent is what would be sent."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from evenload.cli.main import main
from evenload.scheduler.backends.ray.backend import OPTIONS as RAY_OPTIONS
from evenload.scheduler.backends.slurm.script import OPTIONS as SLURM_OPTIONS
from tests.paths import ROOT
from tests.system.cli.queue_box import inside

DOCS = ROOT / "docs"


@pytest.fixture(autouse=True)
def evenload_in_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell where the environment is activated: `submit` looks for the job's command."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def dry_run(backend: str, text: str, folder: Path) -> str:
    """The page's command on the page's job file."""
    (folder / "job.toml").write_text(text)
    with inside(folder), contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(["submit", "--backend", backend, "--dry-run", "job.toml"])
    return out.getvalue()


def test_the_page_on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr("sys.executable", "/home/ann/venv/bin/python")
    (file,), (script,) = blocks("slurm.md", "toml"), blocks("slurm.md", "sh")
    printed = dry_run("slurm", file, tmp_path)
    carried = [line for line in printed.splitlines(keepends=True) if line.startswith("export ")]
    for line in carried:  # variables of this shell, which differ from one to the other
        printed = printed.replace(line, "")
    assert printed.replace(str(tmp_path), "/home/ann/work") == script.replace("\\\n    ", "")
    told = (DOCS / "slurm.md").read_text()
    assert all(f"`{name}`" in told for name in SLURM_OPTIONS)


def test_the_page_on_kubernetes(tmp_path: Path) -> None:
    (file,) = blocks("kubernetes.md", "toml")
    printed = dry_run("kubernetes", file, tmp_path)
    assert 'kueue.x-k8s.io/queue-name: "lab"' in printed and 'mountPath: "/work/runs"' in printed
    assert '"--nodes=2"' in printed and "nvidia.com/gpu: 4" in printed


def test_the_page_on_ray(tmp_path: Path) -> None:
    printed = dry_run("ray", 'command = "evenload run train.py"\ndevices = 2\n', tmp_path)
    assert json.loads(printed)["command"] == ["evenload", "run", "train.py"]
    told = (DOCS / "ray.md").read_text()
    assert all(f"[ray] {name}" in told for name in RAY_OPTIONS)
