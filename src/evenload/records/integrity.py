"""Checksums of a checkpoint's files, kept in its `info.json`; written and compared without torch.

`info.json` lists each file with its size and CRC-32, and ends with a CRC-32 of itself. A CRC-32 finds all damage within 32 bits
and misses one of 4 billion others; why it was chosen: docs/decisions/asynchronous-checkpoints.md.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenload.atomic_file import write_atomically

INFO_FILE = "info.json"
"""In a checkpoint's folder: schema, step, epoch, time, checksums, and the metric by which the best is chosen."""
SCHEMA = 2
"""Of checkpoints. Schema 1 had no checksums."""
_CHUNK_BYTES = 4 << 20


def write_info(checkpoint: Path, info: Mapping[str, Any]) -> None:
    """Write `info.json`, with a checksum of itself."""
    write_atomically(checkpoint / INFO_FILE, _sealed(info))


def read_info(checkpoint: Path) -> dict[str, Any]:
    """Return what `write_info` wrote; empty for a checkpoint without it, or with a damaged one."""
    try:
        row = json.loads((checkpoint / INFO_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def read_schema(checkpoint: Path) -> int | None:
    """Return the schema in an intact `info.json`; None if it is damaged or missing, or of schema 1, which did not write it."""
    try:
        content = (checkpoint / INFO_FILE).read_bytes()
        info = json.loads(content)
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return None
    intact = isinstance(info, dict) and content == _sealed(info).encode()
    return int(info["schema"]) if intact and "schema" in info else None


def seal(folder: Path, info: Mapping[str, Any]) -> int:
    """Force all files of a folder to the disk, write `info.json` with their checksums, and return their bytes.

    Raises:
        OSError: a file can't be written or read.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {str(path.relative_to(folder)): [_sum(path, sync=True)] for path in paths}
    write_info(folder, {"schema": SCHEMA, **info, "files": sums})
    for path in (folder / INFO_FILE, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)
    return sum(size for ((size, _),) in sums.values())


def allow(checkpoint: Path, name: str, content: bytes) -> None:
    """Let a file have this content beside its present one, before it is replaced: a crash between leaves a valid checkpoint."""
    info = read_info(checkpoint)
    if "files" not in info:
        return
    own = [len(content), zlib.crc32(content)]
    info["files"][name] = [own, *(sums for sums in info["files"][name] if sums != own)][:2]
    write_info(checkpoint, info)
    sync(checkpoint / INFO_FILE)
    sync(checkpoint)


def find_damage(checkpoint: Path, *, contents: bool = True) -> str:
    """Return the first difference between a checkpoint's files and their checksums; empty if there is none, or no checksums.

    Args:
        checkpoint: its folder.
        contents: read the files; False compares their sizes alone.

    Raises:
        OSError: a file that is there can't be read.
    """
    if not checkpoint.is_dir():
        checkpoint.lstat()  # an error if it was removed meanwhile
        return "it is no folder"
    try:
        content = (checkpoint / INFO_FILE).read_bytes()
        info = json.loads(content)
    except FileNotFoundError:
        return ""
    except (IsADirectoryError, ValueError):
        return f"{INFO_FILE} is damaged"
    if not isinstance(info, dict) or (info.keys() & {"schema", "files", "crc32"} and content != _sealed(info).encode()):
        return f"{INFO_FILE} is damaged"
    for name, allowed in info.get("files", {}).items():
        path = checkpoint / name
        try:
            num_bytes = path.stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if all(num_bytes != size for size, _ in allowed):
            return f"{name} has {num_bytes} bytes instead of {allowed[0][0]}"
        if path.is_dir() or (contents and list(_sum(path)) not in allowed):
            return f"{name} does not match its checksum"
    return ""


def sync(path: Path) -> None:
    """Force a file or a folder to the disk; a folder, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _sealed(info: Mapping[str, Any]) -> str:
    row = {key: value for key, value in info.items() if key != "crc32"}
    return json.dumps({**row, "crc32": zlib.crc32(json.dumps(row).encode())})


def _sum(path: Path, *, sync: bool = False) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        if sync:
            os.fsync(file.fileno())
    return size, checksum
