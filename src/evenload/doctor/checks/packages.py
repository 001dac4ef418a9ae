"""Are the packages here that we need, new enough?"""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata

from evenload.doctor.finding import Finding, Options

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
"""Lowest versions, as pyproject.toml has them (a test compares)."""


def packages(options: Options) -> Finding:
    """Reads the installed versions, without importing anything."""
    del options
    found: dict[str, str | None] = {}
    for name in REQUIRED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return judge(platform.python_version(), found)


def judge(python: str, found: Mapping[str, str | None]) -> Finding:
    """What a set of versions means; None stands for a package that is missing."""
    name = "packages"
    if release(python) < release(PYTHON):
        return Finding(name, "fail", f"Python {python}", f"Python {PYTHON} or newer", "uv venv --python 3.12")
    wrong = {
        package: lowest
        for package, lowest in REQUIRED.items()
        if (version := found.get(package)) is None or release(version) < release(lowest)
    }
    if not wrong:
        return Finding(name, "ok", f"Python {python}, " + ", ".join(f"{key} {found[key]}" for key in REQUIRED))
    wanted = [f"{package}>={lowest}" for package, lowest in wrong.items()]
    return Finding(
        name,
        "fail",
        ", ".join(f"{package} {found[package]}" if found.get(package) else f"no {package}" for package in wrong),
        ", ".join(wanted),
        pip_install(*wanted),
    )


def pip_install(*arguments: str) -> str:
    """The command that installs into this very Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version that count: ``2.13.0+cpu`` and ``2.13.0`` give (2, 13); trailing zeros don't count."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
