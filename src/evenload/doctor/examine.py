"""The doctor's parent: starts the checks as children, all at once, and ends what is not done in time.

Standard library alone: the machine it runs on may lack everything else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from evenload.doctor.finding import Finding, Options, Status

DEADLINE_S = 9.0
"""For all checks together; the promise to the user is 10 s, interpreter included."""


@dataclass(frozen=True)
class Check:
    """One check: where its function is, and what it means when it never answers."""

    name: str
    function: str
    """``module:function`` below ``evenload.doctor.checks``."""
    expected: str
    if_stuck: Status


GROUPS: tuple[tuple[Check, ...], ...] = (
    (Check("packages", "packages:packages", "the packages answer", "fail"),),
    # One child for all that imports torch: the import is the dearest second here.
    (
        Check("wheel and driver", "wheel:wheel", "torch can be imported", "fail"),
        Check("CUDA libraries", "wheel:libraries", "torch can load its CUDA libraries", "fail"),
        Check("all-reduce", "allreduce:allreduce", "an all-reduce ends in time", "fail"),
    ),
    (Check("GPU memory", "gpus:memory_held", "the driver answers", "fail"),),
    (Check("/dev/shm", "machine:shared_memory", "the file system answers", "fail"),),
    (Check("open files", "machine:open_files", "the system answers", "warn"),),
    (Check("CPU cores", "machine:cores", "the system answers", "warn"),),
    (Check("host name", "network:host_name", "the name server answers within a second", "warn"),),
    (Check("port", "network:port", "the system answers", "warn"),),
)
"""Each group is one child process, its checks run one after the other; in the order they are reported."""


@dataclass(frozen=True)
class _Child:
    checks: tuple[Check, ...]
    process: subprocess.Popen[bytes]
    folder: Path


def examine(
    options: Options | None = None,
    *,
    deadline_s: float = DEADLINE_S,
    groups: Sequence[tuple[Check, ...]] = GROUPS,
) -> tuple[Finding, ...]:
    """Runs the checks, all children side by side.

    Args:
        options: what the user asked.
        deadline_s: when it has passed, children still at work are killed, and each check they owe becomes a finding.
        groups: the checks; tests bring their own.

    Returns:
        One finding a check, in the order of ``groups``. No process is left.
    """
    end = time.monotonic() + deadline_s
    options = replace(options or Options(), limit_s=max(1.0, deadline_s - 1.0))
    found: list[Finding] = []
    with ExitStack() as stack:
        parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenload-doctor-")))
        children = []
        for index, checks in enumerate(groups):
            folder = parent / str(index)
            folder.mkdir()
            children.append(_start(checks, options, folder))
            stack.callback(_end, children[-1].process)
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, end - time.monotonic()))
            found += _collect(child, deadline_s)
    return tuple(found)


def _start(checks: tuple[Check, ...], options: Options, folder: Path) -> _Child:
    """Starts a child, in a process group of its own so that all it starts can be ended with it.

    What it says, and its temporary files, go into ``folder``.
    """
    home = str(Path(__file__).resolve().parents[2])
    is_installed = (
        home in sysconfig.get_paths().values()
    )  # PYTHONPATH would put site-packages before the standard library
    search = os.pathsep.join(filter(None, ("" if is_installed else home, os.environ.get("PYTHONPATH"))))
    argument = json.dumps({"checks": [check.function for check in checks], "options": asdict(options)})
    with (folder / "findings").open("wb") as findings, (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "evenload.doctor.child", argument],  # -P: a file torch.py here is no torch
            env={**os.environ, "PYTHONPATH": search, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=findings,
            stderr=errors,
            start_new_session=True,
        )
    return _Child(checks, process, folder)


def _collect(child: _Child, deadline_s: float) -> list[Finding]:
    """What a child has said so far; for each check it still owes, why it is silent."""
    code = child.process.poll()
    text = (child.folder / "findings").read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be cut short
    found = [
        Finding(**{**json.loads(line), "name": check.name}) for check, line in zip(child.checks, lines, strict=False)
    ]
    silent = child.checks[len(found) :]
    if not silent:
        return found
    status: Status = silent[0].if_stuck
    story = f"no answer within {deadline_s:g} s; its process was ended"
    if code is not None:
        status = "fail"
        story = f"the check ended with code {code} and no answer: {_last_line(child.folder / 'errors')}"
    found.append(Finding(silent[0].name, status, story, silent[0].expected, _by_hand(silent[0])))
    return found + [Finding(check.name, "skip", f"never reached, see {silent[0].name}") for check in silent[1:]]


def _by_hand(check: Check) -> str:
    argument = json.dumps({"checks": [check.function]})
    return f"{sys.executable} -m evenload.doctor.child '{argument}'   # runs this check alone, its errors in sight"


def _last_line(errors: Path) -> str:
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a child and whatever it started, and reaps it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process stuck inside a driver can't even be killed
        process.wait(0.5)
