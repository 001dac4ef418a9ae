"""What every result carries: when, on what, with which versions, by which method."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

HOME = Path(__file__).parent
RESULTS = HOME / "results"
_PACKAGES = ("evenload", "torch", "numpy", "accelerate", "lightning")


def write_result(
    name: str,
    method: str,
    result: Mapping[str, Any],
    *,
    quick: bool,
    folder: str | None = None,
    others_cpu: float | None = None,
) -> Path:
    """Writes a result beside its surroundings; a quick one goes to the system's folder for such things."""
    target = Path(folder) if folder is not None else Path(tempfile.gettempdir()) if quick else RESULTS
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{name}{'.quick' if quick else ''}.json"
    path.write_text(
        json.dumps(
            {
                "benchmark": name,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": commit(),
                "hardware": hardware(),
                "cpu_of_other_programs": others_cpu,
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


def kept(folder: str, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns one part of a result, from a folder if an earlier call has put it there; without a folder it is measured."""
    path = Path(folder, f"{name}.json")
    if folder and path.exists():
        return dict(json.loads(path.read_text()))
    found = measure()
    print(f"{name}: {found}", flush=True)
    if folder:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return found


_PR_SET_CHILD_SUBREAPER = 36
_root = os.getpid()


def keep_orphans(main: Callable[[], int]) -> int:
    """Runs `main` in a child of this process, which inherits and collects all whose parent ends first (on Linux).

    Else their CPU time would go to process 1, and count as that of other programs.
    """
    if not sys.platform.startswith("linux"):
        return main()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        return main()
    while True:
        try:
            ended, status = os.wait()
        except KeyboardInterrupt:  # the child got it too
            continue
        if ended == child:
            return os.waitstatus_to_exitcode(status)


class Neighbours:
    """What other programs took of this machine meanwhile: it disturbs what is measured."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def share(self) -> float | None:
        """CPU time of all other programs since, as a part of one core's; None where the system doesn't tell."""
        busy_s = _busy_s()
        if busy_s is None or self._busy_s is None:
            return None
        others_s = (busy_s - self._busy_s) - (_own_s() - self._own_s)
        return round(max(0.0, others_s) / (time.monotonic() - self._began_s), 3)


def _busy_s() -> float | None:
    """CPU seconds of everything since the machine started."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU seconds of this program and of all below it, living (the server that forks the ranks) or ended."""
    own = psutil.Process(_root)
    total_s = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total_s += sum(process.cpu_times()[:4])  # user, system, and both of the children that have ended
    return total_s


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
    """CPUs, memory, GPUs."""
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
