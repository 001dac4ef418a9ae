"""Check of the required packages and their versions."""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata

from evenload.doctor.finding import Finding, Options, fail, ok

PYTHON = "3.11"
REQUIRED: Mapping[str, str] = {
    "torch": "2.11",
    "numpy": "1.26",
    "rich": "13.7",
    "typer": "0.15",
    "psutil": "5.9",
    "nvidia-ml-py": "12.535",
    "tomli-w": "1.0",
    "cloudpickle": "3.0",
}
"""Minimum versions, as in pyproject.toml (a test compares them)."""
NO_TORCH = "torch is not installed (see packages)"


def packages(options: Options) -> Finding:
    found: dict[str, str | None] = {}
    for name in REQUIRED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return evaluate_packages(platform.python_version(), found)


def evaluate_packages(python: str, found: Mapping[str, str | None]) -> Finding:
    if release(python) < release(PYTHON):
        return fail(f"Python {python}", f"Python {PYTHON} or newer", "uv venv --python 3.12")
    wrong = {
        package: minimum
        for package, minimum in REQUIRED.items()
        if (version := found.get(package)) is None or release(version) < release(minimum)
    }
    if not wrong:
        return ok(f"Python {python}, " + ", ".join(f"{key} {found[key]}" for key in REQUIRED))
    wanted = [f"{package}>={minimum}" for package, minimum in wrong.items()]
    installed = [f"{package} {found[package]}" if found.get(package) else f"no {package}" for package in wrong]
    return fail(", ".join(installed), ", ".join(wanted), pip_install(*wanted))


def torch_problem() -> str | None:
    """Return why torch cannot be used, for checks that are then skipped; None if it can be imported."""
    if importlib.util.find_spec("torch") is None:
        return NO_TORCH
    try:
        import torch  # noqa: F401
    except Exception:
        return "torch cannot be imported (see wheel and driver)"
    return None


def pip_install(*arguments: str) -> str:
    """Return the command that installs packages into this Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros: ``2.13.0+cpu`` and ``2.13`` give (2, 13)."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
