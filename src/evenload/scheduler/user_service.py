"""A systemd unit of the user's own for a queue's daemon: started at boot, and again whenever it dies."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from evenload.errors import QueueError
from evenload.scheduler import paths

UNIT = "evenload-queue.service"

# No start limit: while the disk is full the daemon can't start, and systemd would give up after five attempts.
# A daemon that was stopped by `evenload queue stop` exits with 0, and stays so: a repair of the queue needs that.
_TEXT = """\
[Unit]
Description=Evenload's queue of jobs of {user}
StartLimitIntervalSec=0

[Service]
ExecStart={python} -P -m evenload.scheduler.daemon --queue {folder} --foreground
KillMode=process
Restart=on-failure
RestartSec=1
UMask=0077

[Install]
WantedBy=default.target
"""


def unit_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "systemd" / "user" / UNIT


def unit_text(folder: Path) -> str:
    python, queue = (_quoted(path) for path in (sys.executable, str(folder)))
    return _TEXT.format(user=Path.home().name, python=python, folder=queue)


def _quoted(text: str) -> str:
    """Return a word of a unit's command line: systemd replaces % and $, and reads backslashes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def is_offered(folder: Path) -> bool:
    """Return True where this user could have the unit for the queue, and hasn't."""
    return folder != paths.SYSTEM_FOLDER and shutil.which("systemctl") is not None and not unit_path().exists()


def install(folder: Path, stop: Callable[[], None], start: Callable[[], None]) -> Path:
    """Write the unit and have systemd start it now and at boot.

    `stop` ends a daemon that runs, once systemd is there; `start` starts it again where systemd then refuses to.

    Raises:
        QueueError: this machine, or this login, has no systemd; the message has a line for cron.
    """
    words = [sys.executable, "-P", "-m", "evenload.scheduler.daemon", "--queue", str(folder)]
    line = f"@reboot {shlex.join(words)}".replace("%", r"\%")  # which cron takes for the end of the command
    cron = f"with cron, add this line by crontab -e: {line}"
    if shutil.which("systemctl") is None:
        raise QueueError(f"this machine has no systemd; {cron}")
    path = unit_path()
    before = path.read_text() if path.exists() else None
    if before is not None and f"--queue {_quoted(str(folder))} " not in before:
        raise QueueError(
            f"{path} is the unit of another queue, and there is one for each user: systemctl --user disable --now {UNIT} and "
            f"remove that file first; {cron}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(unit_text(folder))
    try:
        _run("systemctl", "--user", "daemon-reload")
        stop()
        _run("systemctl", "--user", "enable", "--now", UNIT)
    except QueueError as error:
        if before is None:
            path.unlink()
        else:  # it starts the queue at boot, also where this login can't reach systemd
            path.write_text(before)
        start()
        raise QueueError(f"{error}; nothing was changed; {cron}") from None
    try:
        _run("loginctl", "enable-linger")
    except QueueError as error:
        raise QueueError(f"{path} is written and works while you are logged in, but {error}; {cron}") from None
    return path


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise QueueError(f"{' '.join(command)} failed: {error.strerror}") from error
    if done.returncode:
        raise QueueError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")
