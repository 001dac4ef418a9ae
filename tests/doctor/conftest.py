from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter in which nothing is installed: no torch, rich, typer, psutil or nvidia-ml-py."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with the source of evenload in sight."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), **extra}
