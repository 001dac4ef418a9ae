"""The folder of a launch; that of a launcher that was killed is removed by the next one: a lock ends with its process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evenload.errors import LaunchError

_PREFIX, _LOCK, _NEW_S = "evenload-run-", "lock", 60.0


def _open_own(path: Path) -> int:
    """Open a file in a folder of this user; another's may be anything, such as a pipe, which would be waited for."""
    if path.parent.lstat().st_uid != os.getuid():
        raise PermissionError(str(path))
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)


@contextmanager
def launch_folder() -> Iterator[Path]:
    """Yield a new folder, and remove it at the end; LaunchError where no folder for temporary files can be written."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    except OSError as error:
        raise LaunchError(f"{error}: files of workers go there; set TMPDIR to a folder that can be written") from error
    try:
        with (folder / _LOCK).open("w") as own:
            with suppress(OSError):  # a file system without locks: nothing is removed
                fcntl.flock(own, fcntl.LOCK_EX)
            for path in folder.parent.glob(f"{_PREFIX}*/{_LOCK}"):
                with suppress(OSError), os.fdopen(_open_own(path)) as other:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if time.time() - os.fstat(other.fileno()).st_mtime > _NEW_S:  # a new one may not be locked yet
                        shutil.rmtree(path.parent, ignore_errors=True)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
