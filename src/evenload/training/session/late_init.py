"""Name a rank that is long in `evenload.init` while the others wait for it: stalls are found only after it."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

from evenload.training.comm.pending import limited
from evenload.training.elastic.own_wait import waits_for_ranks

_LATE_S = 30.0


def name_if_late(rank: int) -> AbstractContextManager[None]:
    """Print where this rank is after 30 s in the body, unless it waits for others itself."""
    thread = threading.get_ident()

    def name(text: str) -> None:
        frame = sys._current_frames().get(thread)
        if frame is not None and not waits_for_ranks(frame):
            code = frame.f_code
            where = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
            print(f"evenload: rank {rank} {text}, at {where}; the other ranks wait", file=sys.stderr, flush=True)

    return limited(_LATE_S, name, f"has been in evenload.init for {_LATE_S:.0f} s")
