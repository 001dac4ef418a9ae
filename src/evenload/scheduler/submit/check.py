"""Check a job where it is submitted: its folder, command, variables and notifications, before anything is queued."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenload.errors import ConfigError
from evenload.scheduler import working_tree
from evenload.scheduler.backends.interface import check_inherited, resolved
from evenload.scheduler.container import find_runtime
from evenload.scheduler.job_file import JobFile
from evenload.scheduler.notify import find_sendmail

SHELL_VARIABLES = (
    "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ",
)  # fmt: skip
"""Variables that every job inherits from the submitting shell: those set by activating an environment."""


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A job that was checked where it is submitted."""

    job: JobFile
    """As requested; its folder is absolute."""
    environment: Mapping[str, str]
    """Variables taken from the shell."""
    takes_snapshot: bool
    snapshot_reason: str
    """Reason for this decision."""

    def resolved(self) -> JobFile:
        """Return the job with the shell's variables in its environment; those set in the job take precedence."""
        job = replace(self.job, inherit=tuple(self.environment))
        return resolved(job, job.folder, self.environment)


def check_job(job: JobFile, here: Path, variables: Mapping[str, str]) -> CheckedJob:
    """Check everything that can be checked without the scheduler, for a job of the folder `here` of a shell.

    Raises:
        ConfigError: the folder, command, script or a variable does not exist, or a notification could not be sent.
    """
    folder = here / Path(job.folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"folder = {job.folder!r}: folder {folder} does not exist")
    check_inherited(job, variables)
    is_in_container = job.backend == "kubernetes"  # whose image has its own variables and programs
    names = job.inherit if is_in_container else (*SHELL_VARIABLES, *job.inherit)
    environment = {name: variables[name] for name in names if name in variables}
    path = job.environment.get("PATH", environment.get("PATH", os.defpath))
    if job.image:
        find_runtime(path)
    elif not is_in_container:
        for index in job.indices():
            _check_command(job.command_of(index), folder, path)
    if job.backend == "local":
        _check_notify(job.notify, folder, path)
    takes_snapshot, reason = _snapshot_decision(job, folder)
    if job.links is not None and not takes_snapshot:
        raise ConfigError(f"links = {', '.join(job.links)} has no effect: no snapshot is taken ({reason})")
    return CheckedJob(replace(job, folder=str(folder)), environment, takes_snapshot, reason)


def _check_command(command: Sequence[str], folder: Path, path: str) -> None:
    """Check that the program exists, and the script that Python is to run."""
    program = command[0]
    found = shutil.which(program, path=path) if "/" not in program else shutil.which(str(folder / program))
    if found is None:
        where = f"at {folder / program}" if "/" in program else "in the PATH of this shell"
        hint = "is it executable?" if "/" in program and (folder / program).exists() else "is its environment active?"
        if " " in program:
            hint = f"write its words one by one: -- {shlex.join(program.split())}"
        elif program.endswith(".py"):
            hint = f"a script needs a command that runs it: evenload submit -- evenload run {shlex.join(command)}"
        raise ConfigError(f"command {program!r} not found {where}; {hint}")
    script = _script_of(command)
    if script is not None and not (folder / script).is_file():
        raise ConfigError(f"{shlex.join(command[:8])}: file {folder / script} does not exist")


def _script_of(command: Sequence[str]) -> str | None:
    """The script of `python [options] SCRIPT`; None for any other command."""
    if not Path(command[0]).name.startswith("python"):
        return None
    for word in command[1:]:
        if word in ("-u", "-B", "-O", "-E", "-s", "-P", "-I"):
            continue
        return word if not word.startswith("-") else None
    return None


def _check_notify(notify: Sequence[str], folder: Path, path: str) -> None:
    for text in notify:
        kind, _, rest = text.partition(":")
        if kind == "command":
            words = shlex.split(rest)
            program = str(folder / words[0]) if "/" in words[0] else words[0]
            if shutil.which(program, path=path) is None:
                raise ConfigError(f"notify = {text!r}: program {words[0]!r} not found in the PATH of this shell")
        elif kind == "mail" and find_sendmail(os.environ.get("PATH", os.defpath)) is None:
            raise ConfigError(f"notify = {text!r}: this machine has no sendmail; use a webhook or a command")


def _snapshot_decision(job: JobFile, folder: Path) -> tuple[bool, str]:
    """(Take a snapshot?, the reason.)"""
    if job.backend == "kubernetes":
        if job.snapshot:
            raise ConfigError("snapshot = true: a pod has the files of its image, not of this machine; remove it")
        return False, "a pod has the files of its image"
    if job.snapshot is not None:
        return job.snapshot, "as requested"
    if working_tree.git_top(folder) is not None:
        return True, f"{folder} is under git"
    return False, f"{folder} is not under git"
