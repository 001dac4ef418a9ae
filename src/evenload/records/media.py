"""Images, texts, histograms and tables of `run.log`: files in the run folder, which loggers read.

What a value is follows from its kind: text is a string; an image is a picture of Pillow, a figure of matplotlib, or an array or
tensor with three dimensions, of which the first or the last has 1, 3 or 4 channels; a histogram is what `numpy.histogram`
returns, counts and edges; a table is a list of dicts.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from evenload.atomic_file import write_atomically
from evenload.errors import StepError

FOLDER = "media"
IMAGE, TEXT, HISTOGRAM, TABLE = ".png", ".txt", ".histogram.json", ".table.json"
"""Ends of the files' names, by which they are known."""
_CHANNELS = {1: 0, 3: 2, 4: 6}
"""Colour type of a PNG by the number of channels; https://www.w3.org/TR/png/#11IHDR."""


class Histogram(NamedTuple):
    counts: list[float]
    edges: list[float]
    """One more than counts."""


def kind_of(value: Any) -> str | None:
    """Return `IMAGE`, `TEXT`, `HISTOGRAM` or `TABLE`; None for a number, and for what can't be logged."""
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return TABLE if value and all(isinstance(row, Mapping) for row in value) else None
    if isinstance(value, tuple):
        sizes: list[Any] = [getattr(part, "shape", ()) for part in value]
        is_pair = len(value) == 2 and all(len(size) == 1 for size in sizes)
        return HISTOGRAM if is_pair and sizes[1][0] == sizes[0][0] + 1 else None
    if hasattr(value, "savefig") or (hasattr(value, "convert") and hasattr(value, "getbands")):
        return IMAGE
    shape = getattr(value, "shape", None)
    is_image = isinstance(shape, tuple) and len(shape) == 3 and {shape[0], shape[2]} & _CHANNELS.keys()
    return IMAGE if is_image else None


def write_media(folder: Path, name: str, step: int, value: Any) -> str:
    """Write a value of `kind_of` into a run folder; return the file's path in it.

    Raises:
        StepError: a name without letters, or values that can't be shown.
    """
    kind = kind_of(value)
    parts = [re.sub(r"[^\w.@\- ]", "_", part) for part in name.split("/")]
    if kind is None or any(not part.strip(". ") for part in parts):
        raise StepError(f"run.log: {name!r} can't be the name of a file; use letters, digits, '-', '_' and '/'")
    path = Path(FOLDER, *parts, f"step-{step}{kind}")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    if kind == IMAGE:
        write_atomically(folder / path, _to_png(name, value))
    elif kind == TEXT:
        write_atomically(folder / path, value)
    elif kind == HISTOGRAM:
        counts, edges = (_to_array(part).tolist() for part in value)
        write_atomically(folder / path, json.dumps({"counts": counts, "edges": edges}))
    else:
        columns = list(dict.fromkeys(str(column) for row in value for column in row))
        rows = [[_plain(dict(row).get(column)) for column in columns] for row in value]
        write_atomically(folder / path, json.dumps({"columns": columns, "rows": rows}, ensure_ascii=False))
    return path.as_posix()


def read_histogram(path: Path) -> Histogram:
    return Histogram(**json.loads(path.read_text()))


def read_table(path: Path) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the rows of a table."""
    found = json.loads(path.read_text())
    return found["columns"], found["rows"]


def size_of_png(data: bytes) -> tuple[int, int, int]:
    """Return width, height and channels; 3 for a PNG with a palette."""
    width, height, _, colour = struct.unpack(">IIBB", data[16:26])
    return width, height, {0: 1, 4: 2, 6: 4}.get(colour, 3)


def _to_png(name: str, value: Any) -> bytes:
    if hasattr(value, "savefig") or hasattr(value, "getbands"):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png") if hasattr(value, "savefig") else value.save(buffer, format="png")
        return buffer.getvalue()
    pixels = _to_array(value)
    # Where both ends could be the channels, tensors have them first and arrays last.
    if pixels.shape[0] in _CHANNELS and (pixels.shape[2] not in _CHANNELS or hasattr(value, "detach")):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype.kind == "f":
        if not 0 <= pixels.min() <= pixels.max() <= 1:
            raise StepError(
                f"run.log: {name!r} is an image with values from {pixels.min():.3g} to {pixels.max():.3g}; floats are from 0 to "
                "1, integers from 0 to 255: scale it first"
            )
        pixels = (pixels * 255).round()
    pixels = pixels.astype("uint8")
    height, width, num_channels = pixels.shape
    rows = b"".join(b"\0" + pixels[index].tobytes() for index in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[num_channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _to_array(value: Any) -> Any:
    import numpy as np

    tensor = value.detach().cpu() if hasattr(value, "detach") else value
    if getattr(tensor, "is_floating_point", lambda: False)():
        tensor = tensor.float()  # numpy has no bfloat16
    return np.asarray(tensor)


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    value = item() if callable(item) and getattr(value, "ndim", None) == 0 else value
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
