"""From a job file to what is sent to the queue: everything is checked here, before anything is queued."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import snapshots, working_tree
from evenload.scheduler.core import events
from evenload.scheduler.core.layout import layout_of
from evenload.scheduler.core.refusal import refusal
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device
from evenload.scheduler.job_file import JobFile, to_program, to_spec

CARRIED = (
    "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ",
)  # fmt: skip
"""Variables that a job gets from the submitting shell without being asked: what activating an environment sets."""


@dataclass(frozen=True, slots=True)
class Order:
    """A job that was checked where it is submitted: nothing in it depends on the shell any more."""

    job: JobFile
    """Its folder is absolute."""
    environment: Mapping[str, str]
    """What it gets from the shell."""
    takes_snapshot: bool
    why: str
    """Why there is a snapshot, or none; for people."""


def check(job: JobFile, here: Path, variables: Mapping[str, str]) -> Order:
    """Checks what can be known where the job is submitted.

    Args:
        job: what is asked for.
        here: where it is submitted.
        variables: of the submitting shell.

    Raises:
        ConfigError: its folder, command, script or a variable isn't there, or nobody could be notified.
    """
    folder = Path(job.folder).expanduser() if job.folder else here
    if not folder.is_absolute():
        folder = here / folder
    if not folder.is_dir():
        raise ConfigError(f"folder = {job.folder!r}: there is no folder {folder}")
    if missing := [name for name in job.inherit if name not in variables]:
        raise ConfigError(
            f"{missing[0]} is to be taken from this shell, but it isn't set here: export it, or give NAME=VALUE"
        )
    is_elsewhere = job.backend == "kubernetes"  # in an image, which has variables and programs of its own
    carried = job.inherit if is_elsewhere else (*CARRIED, *job.inherit)
    environment = {name: variables[name] for name in carried if name in variables}
    path = job.environment.get("PATH", environment.get("PATH", os.defpath))
    if not is_elsewhere:
        for index in job.indices():
            _check_command(job.command_of(index), folder, path)
    if job.backend == "local":
        _check_tellers(job.notify, folder, path)
    takes, why = _wants_snapshot(job, folder)
    if job.links is not None and not takes:
        raise ConfigError(f"links = {', '.join(job.links)} has no effect: there is no snapshot ({why})")
    return Order(replace(job, folder=str(folder)), environment, takes, why)


def check_devices(job: JobFile, user: str, status: Mapping[str, Any]) -> None:
    """Refuses a job for which the queue never has the devices.

    Args:
        job: what is asked for.
        user: who asks.
        status: the daemon's answer to ``status``.

    Raises:
        ConfigError: with what there is.
    """
    devices = [
        Device(row["id"], host="here", kind=row["kind"], memory_bytes=row["memory_bytes"]) for row in status["devices"]
    ]
    spec = replace(to_spec(job, user), after=())
    reason = refusal(spec, {}, {}, {}, layout_of(devices))
    if reason is None:
        return
    kinds: dict[tuple[str, int], int] = {}
    for device in devices:
        key = device.kind, device.memory_bytes
        kinds[key] = kinds.get(key, 0) + 1
    told = ", ".join(
        f"{num} × {kind}" + (f" ({memory / 1e9:.1f} GB)" if memory else "") for (kind, memory), num in kinds.items()
    )
    raise ConfigError(f"the job could never start: {reason}. There are: {told or 'no devices'}")


def store_of(queue: Path) -> Path:
    """Where snapshots of this user's jobs in a queue are: in the queue's folder where it is theirs."""
    try:
        if queue.stat().st_uid == os.geteuid():
            return queue / "snapshots"
    except OSError:
        pass
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "evenload" / "snapshots"


def take_snapshot(order: Order, store: Path) -> snapshots.Snapshot | None:
    """The copy of the working tree, where one is wanted.

    Raises:
        ConfigError: it is too large, or can't be taken.
    """
    if not order.takes_snapshot:
        return None
    return snapshots.take(Path(order.job.folder), store, links=order.job.links)


def rows(order: Order, snapshot: str = "") -> list[dict[str, Any]]:
    """The jobs as ``submit`` takes them, one for each element of the array."""
    job = order.job
    return [{"spec": _spec_row(job, index), "program": _program_row(order, snapshot, index)} for index in job.indices()]


def _spec_row(job: JobFile, index: int | None) -> dict[str, Any]:
    """A spec without what only the daemon knows: the owner, the array's name."""
    row: dict[str, Any] = events.as_row(events.Submitted(0.0, "", to_spec(job, "?", index=index)))["spec"]
    del row["user"]
    row.pop("preemptible", None)
    if job.saves is not None:
        row["preemptible"] = job.saves or job.requeue
    if job.array_limit is not None:
        row["array_limit"] = job.array_limit
    return row


def _program_row(order: Order, snapshot: str, index: int | None) -> dict[str, Any]:
    program = to_program(
        order.job, -1, order.job.folder, inherited=order.environment, snapshot=snapshot, index=index
    ).to_row()
    del program["uid"]
    return program


def _check_command(command: Sequence[str], folder: Path, path: str) -> None:
    """Whether the program is there, and the script that Python is to run."""
    program = command[0]
    found = shutil.which(program, path=path) if "/" not in program else shutil.which(str(folder / program))
    if found is None:
        place = folder / program if "/" in program else "the PATH of this shell"
        cure = "is it executable?" if "/" in program and (folder / program).exists() else "is its environment active?"
        if " " in program:
            cure = f"write its words one by one: -- {shlex.join(program.split())}"
        raise ConfigError(f"the command {program!r} is not in {place}; {cure}")
    script = _script_of(command)
    if script is not None and not (folder / script).is_file():
        raise ConfigError(f"{shlex.join(command[:8])}: there is no file {folder / script}")


def _script_of(command: Sequence[str]) -> str | None:
    """The script of ``python [options] SCRIPT``; None for anything else."""
    if not Path(command[0]).name.startswith("python"):
        return None
    for word in command[1:]:
        if word in ("-u", "-B", "-O", "-E", "-s", "-P", "-I"):
            continue
        return word if not word.startswith("-") else None
    return None


def _check_tellers(notify: Sequence[str], folder: Path, path: str) -> None:
    for text in notify:
        teller, _, rest = text.partition(":")
        if teller == "command":
            words = shlex.split(rest)
            place = str(folder / words[0]) if "/" in words[0] else words[0]
            if shutil.which(place, path=path) is None:
                raise ConfigError(f"notify = {text!r}: there is no program {words[0]!r} in the PATH of this shell")
        elif teller == "mail" and find_sendmail() is None:
            raise ConfigError(f"notify = {text!r}: this machine has no sendmail; use a webhook or a command")


def find_sendmail() -> str | None:
    """The program that sends mail, where it usually is."""
    from evenload.scheduler.notify import SENDMAIL_PLACES

    return shutil.which("sendmail", path=f"{os.environ.get('PATH', os.defpath)}:{SENDMAIL_PLACES}")


def _wants_snapshot(job: JobFile, folder: Path) -> tuple[bool, str]:
    if job.backend == "kubernetes":
        if job.snapshot:
            raise ConfigError("snapshot = true: a pod sees the files of its image, not of this machine; leave it out")
        return False, "a pod has the files of its image"
    if job.snapshot is not None:
        return job.snapshot, "as asked"
    if working_tree.git_top(folder) is not None:
        return True, f"{folder} is under git"
    return False, f"{folder} is not under git"


def is_over(state: str) -> bool:
    """Whether a job in this state has ended."""
    return JobState(state) in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def exit_code_of(row: Mapping[str, Any]) -> int:
    """What a command that waits for a job ends with: the program's own exit code where the reason tells it."""
    if row["state"] == JobState.SUCCEEDED:
        return 0
    _, found, code = str(row.get("reason", "")).partition("exit code ")
    digits = code.split(" ")[0].rstrip(".,;:)")
    return int(digits) if found and digits.isdecimal() and 0 < int(digits) < 256 else 1


def matching(text: str, jobs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The ids that a person means by a name: the newest job of that name, or all elements of the newest such array.

    Args:
        text: the name.
        jobs: the newest first.

    Raises:
        QueueError: there is none.
    """
    elements: dict[str, str] = {}
    for row in jobs:
        name, user = str(row["name"]), row["user"]
        if name == text and not elements:
            return [str(row["id"])]
        if name.startswith(f"{text}[") and name.endswith("]"):
            if f"{name} {user}" in elements:
                break  # an older array of the same name
            elements[f"{name} {user}"] = str(row["id"])
    if not elements:
        raise QueueError(f"there is no job {text!r} here: give its number, or its name; evenload ps --all lists all")
    return list(elements.values())[::-1]
