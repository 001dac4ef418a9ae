"""What every result carries: when, on what, with which versions, by which method."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HOME = Path(__file__).parent
RESULTS = HOME / "results"
_PACKAGES = ("evenload", "torch", "numpy", "accelerate", "lightning")


def write_result(name: str, method: str, result: Mapping[str, Any], *, quick: bool, folder: str | None = None) -> Path:
    """Writes a result beside its surroundings; a quick one never takes a real one's place."""
    target = Path(folder) if folder is not None else RESULTS
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{name}{'.quick' if quick else ''}.json"
    path.write_text(
        json.dumps(
            {
                "benchmark": name,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": commit(),
                "hardware": hardware(),
                "versions": {"python": platform.python_version(), **versions(_PACKAGES)},
                "quick": quick,
                "method": method.strip(),
                "result": result,
            },
            indent=1,
        )
        + "\n"
    )
    return path


def commit() -> str:
    """The commit of this tree, with ``+`` where it was changed since."""
    try:
        head = subprocess.run(
            ["git", "-C", str(HOME), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(HOME), "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def hardware() -> dict[str, Any]:
    """CPUs, memory, GPUs; and how busy the machine was already."""
    from evenload.hardware import gpus

    info = Path("/proc/cpuinfo")
    model = ""
    if info.exists():
        model = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), "")
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [gpu.name for gpu in gpus()],
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of the packages that are installed here."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def rows(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A plain table; the first column to the left, the others to the right."""
    cells = [list(map(str, line)) for line in (header, *lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
