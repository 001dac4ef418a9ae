"""Let one rank print what several have to say: an error that all raise under torchrun, or a warning."""

from __future__ import annotations

import hashlib
import os
import sys
import types
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from evenload.training.launch.environment import WORKER_VARIABLE
from evenload.training.launch.failure import is_users_file

_TIMEOUT = timedelta(seconds=5)


def is_printed_elsewhere(text: str, variables: Mapping[str, str] | None = None) -> bool | None:
    """Return whether another rank has printed this text, and count it as printed; None if the ranks have no place to count.

    Under our launcher the ranks of a machine count in its folder, under torchrun all of them in the store of its agent.
    """
    found = os.environ if variables is None else variables
    key = hashlib.sha256(text.encode()).hexdigest()
    try:
        if WORKER_VARIABLE in found:
            try:
                (Path(found[WORKER_VARIABLE]).parent / f"printed-{key}").touch(exist_ok=False)
            except FileExistsError:
                return True
            return False
        if found.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None  # rank 0 may serve the store, which ends with it
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(
            found["MASTER_ADDR"],
            int(found["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=_TIMEOUT,
        )
        return store.add(f"evenload/error/{found.get('TORCHELASTIC_RESTART_COUNT', '0')}/{key}", 1) > 1
    except (KeyError, ValueError, RuntimeError, OSError):
        return None


def warn_once(message: str) -> None:
    """Warn on one rank, at the line of the user's code that led here."""
    if is_printed_elsewhere(message):
        return
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:  # in a thread of Evenload's
        warnings.warn(message, stacklevel=2)
    else:
        warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno)
