"""Spec of an attempt for its runner: the program as it was submitted, on the devices of the attempt."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Mapping
from pathlib import Path

from evenload.errors import QueueError
from evenload.scheduler.daemon.devices import LocalDevice, variables_for
from evenload.scheduler.paths import log_path
from evenload.scheduler.program import JobProgram
from evenload.scheduler.runner.files import AttemptSpec
from evenload.scheduler.store.ledger import AttemptRecord

_PATH = "/usr/local/bin:/usr/bin:/bin"


def attempt_spec(
    folder: Path,
    attempt: AttemptRecord,
    program: JobProgram,
    found: Mapping[str, LocalDevice],
    log_bytes: int,
    *,
    shares: bool,
) -> AttemptSpec:
    """Return the spec; raise a `QueueError` where a device or the owner isn't on this machine any more."""
    if missing := [device for device in attempt.devices if device not in found]:
        raise QueueError(f"device {missing[0]} isn't in this machine any more")
    variables, cores = variables_for(found[device] for device in attempt.devices)
    is_other = program.uid != os.geteuid()
    try:
        entry: pwd.struct_passwd | None = pwd.getpwuid(program.uid)
    except KeyError:
        entry = None
        if is_other:
            raise QueueError(f"user {program.uid} isn't in this machine's list of users any more") from None
    number = attempt.fence.attempt
    labels = ", ".join(found[device].label for device in attempt.devices)
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    return AttemptSpec(
        queue=str(folder),
        job=attempt.fence.job,
        attempt=number,
        fence=attempt.fence.number,
        command=program.command,
        folder=program.snapshot or program.folder,
        environment={**_own_variables(entry), **program.environment, **variables},
        uid=program.uid,
        gid=os.getegid() if entry is None else entry.pw_gid,
        user=entry.pw_name if is_other and entry is not None else "",
        grace_s=program.grace_s,
        log=str(log_path(folder, attempt.fence.job)),
        log_bytes=log_bytes,
        cores=cores,
        note=f"attempt {number} on {labels}, {at}" if number > 1 else "",
        pty=program.pty,
        image=program.image,
        mounts=tuple(filter(None, (program.folder, program.snapshot))) if program.image else (),
        measures=shares and not any(found[device].is_gpu for device in attempt.devices),
    )


def _own_variables(entry: pwd.struct_passwd | None) -> dict[str, str]:
    """Return the variables that every program gets; none of the daemon's own."""
    variables = {"PATH": _PATH, "LANG": "C.UTF-8"}
    if entry is None:
        return variables
    return {
        **variables,
        "HOME": entry.pw_dir,
        "USER": entry.pw_name,
        "LOGNAME": entry.pw_name,
        "SHELL": entry.pw_shell or "/bin/sh",
    }
