"""Parent process of the doctor: start the checks as children and kill those that exceed their limits.

Uses only the standard library, because other packages may be missing.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from evenload.doctor.checklist import FULL, GROUPS, Check
from evenload.doctor.finding import Finding, Options, read_finding

_POLL_S = 0.02
_REPORT_S = 5.0
"""Between two lines about a check that is still running."""
_MARGIN_S = 1.0
"""A check ends by itself this long before it would be killed, with a finding of its own."""
FULL_DEADLINE_S = 60.0
"""For each measurement of ``--full``."""


@dataclass
class _ChildProcess:
    checks: tuple[Check, ...]
    process: subprocess.Popen[bytes]
    folder: Path
    num_done: int = 0
    """Checks with a finding."""
    since_s: float = field(default_factory=time.monotonic)
    """Beginning of the present check."""

    @property
    def check(self) -> Check:
        """The present check, or the last."""
        return self.checks[min(self.num_done, len(self.checks) - 1)]

    def follow(self) -> bool:
        """Count the findings so far; return whether the process still runs."""
        if self.process.poll() is not None:
            return False
        num_done = (self.folder / "findings").read_bytes().count(b"\n")
        if num_done > self.num_done:
            self.num_done, self.since_s = num_done, time.monotonic()
        return True


def run_checks(
    options: Options | None = None,
    *,
    deadline_s: float | None = None,
    groups: Sequence[tuple[Check, ...]] = GROUPS,
    report: Callable[[str], None] | None = None,
) -> tuple[Finding, ...]:
    """Run one child process per group, all in parallel; return one finding per check, in their order.

    A child is killed when a check takes longer than its limit, or with `deadline_s` when all of its checks together do. So no
    process is left. `report` receives a line now and then while a check takes long.
    """
    options = options or Options()
    found: list[Finding] = []
    with ExitStack() as stack:
        try:
            parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenload-doctor-")))
        except OSError:  # reported by the check of the temporary folder
            parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".evenload-doctor-", dir=Path.home())))
        options = replace(
            options,
            limit_s=options.limit_s if deadline_s is None else max(1.0, deadline_s - _MARGIN_S),
            temporary=options.temporary or os.environ.get("TMPDIR") or str(parent.parent),
        )
        children = []
        for index, checks in enumerate(groups):
            folder = parent / str(index)
            folder.mkdir()
            children.append(_start(checks, options, folder, shares_limit=deadline_s is not None))
            stack.callback(_kill, children[-1].process)
        _wait(children, deadline_s, report)
        for child in children:
            found += _collect(child, child.check.limit_s if deadline_s is None else deadline_s)
    return tuple(found)


def _wait(children: Sequence[_ChildProcess], deadline_s: float | None, report: Callable[[str], None] | None) -> None:
    """Return when every child has ended or exceeded its limit."""
    began_s = reported_s = time.monotonic()
    running = list(children)
    while running := [child for child in running if child.follow()]:
        now_s = time.monotonic()
        if report is not None and now_s - reported_s >= _REPORT_S:
            reported_s = now_s
            slow = max(running, key=lambda child: now_s - child.since_s)
            limit = "" if deadline_s is not None else f" of at most {slow.check.limit_s:g} s"
            report(f"still checking {slow.check.name}: {now_s - slow.since_s:.0f} s{limit}")
        if deadline_s is None:
            running = [child for child in running if now_s - child.since_s < child.check.limit_s]
        elif now_s - began_s >= deadline_s:
            return
        time.sleep(_POLL_S)


def run_measurements(
    options: Options | None = None,
    *,
    deadline_s: float = FULL_DEADLINE_S,
    groups: Sequence[tuple[Check, ...]] = FULL,
) -> tuple[Finding, ...]:
    """Run the measurements of ``--full`` one after the other, each within ``deadline_s``."""
    return tuple(finding for group in groups for finding in run_checks(options, deadline_s=deadline_s, groups=(group,)))


def _start(checks: tuple[Check, ...], options: Options, folder: Path, *, shares_limit: bool) -> _ChildProcess:
    """Start a child in a new process group, so that all its descendants can be killed; its output goes to ``folder``."""
    source = str(Path(__file__).resolve().parents[2])
    if source in sysconfig.get_paths().values():
        source = ""  # installed: PYTHONPATH would put site-packages before the standard library
    search = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    limits_s = [] if shares_limit else [max(1.0, check.limit_s - _MARGIN_S) for check in checks]
    argument = json.dumps(
        {"checks": [check.function for check in checks], "options": asdict(options), "limits_s": limits_s}
    )
    with (folder / "findings").open("wb") as findings, (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "evenload.doctor.child", argument],  # -P: ignore a torch.py in this folder
            env={**os.environ, "PYTHONPATH": search, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=findings,
            stderr=errors,
            start_new_session=True,
        )
    return _ChildProcess(checks, process, folder)


def _collect(child: _ChildProcess, deadline_s: float) -> list[Finding]:
    code = child.process.poll()
    text = (child.folder / "findings").read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
    found = [_read(check, json.loads(line)) for check, line in zip(child.checks, lines, strict=False)]
    if len(found) == len(child.checks):
        return found
    check, *rest = child.checks[len(found) :]
    status, text = check.on_timeout, f"no result within {deadline_s:g} s; the process was killed"
    if code is not None:
        status = "fail"
        text = f"the check exited with code {code} and no result: {_last_line(child.folder / 'errors')}"
    found.append(Finding(check.name, status, text, check.expected, _manual_command(check)))
    return found + [Finding(other.name, "skip", f"not run, see {check.name}") for other in rest]


def _read(check: Check, row: dict[str, Any]) -> Finding:
    if "raised" in row:
        return Finding(check.name, "fail", f"the check raised {row['raised']}", check.expected, _manual_command(check))
    return replace(read_finding(row), name=check.name)


def _manual_command(check: Check) -> str:
    argument = json.dumps({"checks": [check.function]})
    return f"{sys.executable} -m evenload.doctor.child '{argument}'   # runs only this check and shows its errors"


def _last_line(errors: Path) -> str:
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process blocked inside a driver cannot be killed
        process.wait(0.5)
