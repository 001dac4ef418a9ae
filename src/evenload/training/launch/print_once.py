"""Let one rank print an error that several raise, where torchrun started them: they count it in the store of torchrun's agent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from datetime import timedelta

_TIMEOUT = timedelta(seconds=5)


def is_printed_elsewhere(text: str, variables: Mapping[str, str] | None = None) -> bool | None:
    """Return whether another rank has printed this text, and count it as printed; None if the ranks have no such store."""
    found = os.environ if variables is None else variables
    if found.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None  # rank 0 may serve the store, which ends with it
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    key = hashlib.sha256(text.encode()).hexdigest()
    try:
        store = TCPStore(
            found["MASTER_ADDR"],
            int(found["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=_TIMEOUT,
        )
        return store.add(f"evenload/error/{found.get('TORCHELASTIC_RESTART_COUNT', '0')}/{key}", 1) > 1
    except (KeyError, ValueError, RuntimeError):
        return None
