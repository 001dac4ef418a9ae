"""Every command of README and of the docs is run by a test: here, or in the file that the table names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.unit.project.test_reference import undocumented
from tests.warm import run

PAGES = (ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
OWN_TEST = {
    "ways-to-start.md": "tests/system/starts/test_ways.py",
    "several-machines.md": "tests/system/docs/test_several_machines.py",
    "queue.md": "tests/system/docs/test_queue.py",
    "job-file.md": "tests/system/docs/test_queue.py",
    "simulator.md": "tests/system/docs/test_simulator.py",
}
"""Pages whose every command is run as it stands by a test of their own."""
ELSEWHERE = {
    "pip install -e .": "Makefile",
    "evenload demo": "tests/system/cli/test_demo.py",
    "evenload run -d cpu:2 --throttle 1,0.5 examples/train_gpt.py": "tests/system/examples/test_train_gpt.py",
    "evenload verify -d cpu:2 train.py": "tests/system/verify/test_cli.py",
    "evenload run -d cpu:2 --batch-max 512 train.py": "tests/ranks/adaptive_batch/test_command.py",
    "evenload show runs/train": "tests/unit/views/test_summary.py",
    "evenload run -d 0,1,cpu --strategy dp train.py": "tests/ranks/gpu/test_dp.py",
    "evenload submit --backend slurm --dry-run job.toml": "tests/system/docs/test_backends.py",
    "evenload submit --backend slurm job.toml": "tests/system/scheduler/backends/test_one_file.py",
    "evenload submit --backend ray --dry-run job.toml": "tests/system/docs/test_backends.py",
    "evenload submit --backend ray job.toml": "tests/system/scheduler/backends/test_one_file.py",
    "evenload submit --backend kubernetes --dry-run job.toml": "tests/system/docs/test_backends.py",
    "pip install 'evenload[ray]'": "pyproject.toml",
    "evenload submit --name first -- python train.py": "tests/system/docs/test_queue.py",
    "evenload ps": "tests/system/docs/test_queue.py",
    "evenload show runs/train --web": "tests/system/views/test_run_page.py",
    "evenload show runs/first --html": "tests/system/views/test_run_page.py",
    "evenload show runs/first --html report.html": "tests/system/views/test_run_page.py",
    "evenload show runs/first --web": "tests/system/views/test_run_page.py",
    "evenload show runs/first --trace trace.json": "tests/unit/views/test_trace.py",
    "evenload show runs/first --trace trace.json --steps 400:450": "tests/unit/views/test_trace.py",
    "evenload change runs/gpt -d 0,1,cpu": "tests/system/launch/test_elastic.py",
    "evenload run -d cpu:2 --strategy async train.py": "tests/system/launch/test_async.py",
    "evenload run -d 0,1,2 --strategy async --staleness 8 train.py": "tests/ranks/exact/test_async.py",
    "evenload simulate --cluster own --cluster own+1 --policy default --policy fifo": "tests/system/docs/test_simulator.py",
}
START = ROOT / "docs" / "start.md"
HERE = (
    "evenload doctor",
    "python train.py",
    "evenload run -d cpu:2 --fresh train.py",
    "evenload show runs/first",
    "evenload verify -d cpu:2 --fresh train.py",
    "evenload run -d cpu:2 --throttle 1,0.5 --fresh train.py",
    "evenload run --dry-run train.py",
    "evenload run train.py",
    "evenload run --num-workers auto train.py",
    "evenload run -d cpu:2 --strategy dp train.py",
)
"""In this order, in one folder, with the script of docs/start.md; the last three find that the run is finished."""
AS_TYPED = 2
"""So many of them start interpreters; the others are forked from a server that has torch loaded (tests/warm.py)."""


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_every_command_has_a_test() -> None:
    untested = {
        f"{page.relative_to(ROOT)}: {command}"
        for page in PAGES
        if page.name not in OWN_TEST
        for command in commands_of(page)
        if command not in ELSEWHERE and command not in HERE and not command.startswith(("make ", "cd "))
        if not (page.parent.name == "examples" and " examples/" in command)  # tests/system/examples runs every one
    }
    assert not untested
    assert all((ROOT / place).is_file() for place in (*OWN_TEST.values(), *ELSEWHERE.values()))
    told = {command for page in PAGES for command in commands_of(page)}
    assert not set(HERE) - told, "commands that no page names any more"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_run(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", START.read_text(), flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    accuracies = {}
    for index, command in enumerate(HERE):
        if index < AS_TYPED:
            done = subprocess.run(
                command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
            )
        else:
            program, *words = command.split()
            assert program == "evenload"
            done = run(["-m", "evenload.cli.main", *words], tmp_path, 120, **environment)
        told = done.stdout + done.stderr
        assert done.returncode in ((0, 2) if command == "evenload doctor" else (0,)), f"{command}\n{told}"
        if found := re.findall(r"epoch 4: accuracy ([\d.]+)", done.stdout):
            accuracies[command] = float(found[-1])
        if command.startswith("evenload verify"):
            assert "equal: the split gives the gradients of one process" in done.stdout
        if command in HERE[-3:]:
            assert "finished" in told, f"{command}\n{told}"
    assert undocumented(tmp_path / "runs" / "first") == set(), "docs/run-folder.md"
    assert len(accuracies) == 3, accuracies
    assert max(accuracies.values()) - min(accuracies.values()) < 0.02 and min(accuracies.values()) > 0.85, accuracies
