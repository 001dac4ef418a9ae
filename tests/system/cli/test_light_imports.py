"""Parts that must load neither torch nor other heavy packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.scheduler.test_cli_simulate import JOBS


def test_records_import_no_torch_nor_other_heavy_things() -> None:
    code = (
        "import sys, evenload.records.recorder, evenload.records.reader; "
        "print(sorted({'torch', 'numpy', 'tensorboard', 'rich', 'google'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_simulating_never_loads_torch(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.csv"
    jobs.write_text(JOBS)
    code = (
        "import sys; from evenload.cli.main import main\n"
        f"try: main(['simulate', {str(jobs)!r}, '-c', '1x4'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
