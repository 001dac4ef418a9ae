"""Reader of W&B's offline files, to find the newest step that is safely on disk.

A header of seven bytes precedes a LevelDB log: blocks of 32 KiB with fragments of records, each a protobuf message.
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES = 7
BLOCK_BYTES = 1 << 15
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def newest_step_in(paths: Iterable[Path]) -> int | None:
    """Return the newest step in all files; -1 if they hold none, None if no file is readable."""
    found = [newest for path in paths if (newest := _newest(path)) is not None]
    return max(found, default=None)


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's history, each with its ``_step``; stop where the file is cut short."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for record in records_in(path.read_bytes()):
        message = messages.Record.FromString(record)
        if message.WhichOneof("record_type") == "history":
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in message.history.item}


def records_in(log: bytes) -> Iterator[bytes]:
    parts: list[bytes] = []
    at = HEADER_BYTES
    while at + HEADER_BYTES <= len(log):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left  # too short for a fragment: the block ends in zeros
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        data = log[at + HEADER_BYTES : at + HEADER_BYTES + size]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(data) < size:
            return
        parts = [data] if kind in (FULL, FIRST) else [*parts, data]
        if kind in (FULL, LAST):
            yield b"".join(parts)
        at += HEADER_BYTES + size


def _newest(path: Path) -> int | None:
    try:
        return max((int(row["_step"]) for row in rows_in(path) if "_step" in row), default=-1)
    except Exception:
        return None  # another version of W&B may use another format
