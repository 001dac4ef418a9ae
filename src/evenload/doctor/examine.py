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
from typing import Any

from evenload.doctor.checklist import FULL as FULL
from evenload.doctor.checklist import GROUPS as GROUPS
from evenload.doctor.checklist import Check as Check
from evenload.doctor.finding import Finding, Options, Status, read_finding

DEADLINE_S = 9.0
"""For all checks together; the promise to the user is 10 s, interpreter included."""
FULL_DEADLINE_S = 60.0
"""For each of the measurements of ``--full``."""


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
    options = options or Options()
    found: list[Finding] = []
    with ExitStack() as stack:
        try:
            parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenload-doctor-")))
        except OSError:  # no folder for temporary files can be written, which the check of that name tells
            parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".evenload-doctor-", dir=Path.home())))
        options = replace(
            options,
            limit_s=max(1.0, deadline_s - 1.0),
            temporary=options.temporary or os.environ.get("TMPDIR") or str(parent.parent),
        )
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


def measure(
    options: Options | None = None,
    *,
    deadline_s: float = FULL_DEADLINE_S,
    groups: Sequence[tuple[Check, ...]] = FULL,
) -> tuple[Finding, ...]:
    """Runs what measures, one child after the other, each within ``deadline_s``."""
    return tuple(finding for group in groups for finding in examine(options, deadline_s=deadline_s, groups=(group,)))


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
    found = [_read(check, json.loads(line)) for check, line in zip(child.checks, lines, strict=False)]
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


def _read(check: Check, row: dict[str, Any]) -> Finding:
    if "raised" in row:
        return Finding(check.name, "fail", f"the check raised {row['raised']}", check.expected, _by_hand(check))
    return replace(read_finding(row), name=check.name)


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
