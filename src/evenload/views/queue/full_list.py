"""All jobs of a queue as text or JSON, formatted by SQLite: a hundred thousand lines take a fraction of a second.

Formatting rows in Python would take several times as long. Control characters in names and reasons are replaced: `_CONTROL`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from evenload.scheduler.core.states import JobState
from evenload.scheduler.store.reader import Reader
from evenload.views.queue.text import STATES

_CONTROL_BYTES = bytes((*range(10), *range(11, 32), 127))
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_NAMES = " ".join(f"WHEN '{state}' THEN '{name}'" for state, name in STATES.items())
_STATE = f"CASE state {_NAMES} ELSE state END"
_PROGRESS = (
    "CASE WHEN total > 0 THEN printf('%g/%g %.0f %%', done, total, min(100.0, 100.0 * done / total)) "
    "WHEN done > 0 THEN printf('%g', done) ELSE '' END"
)
_REQUESTED = "CASE WHEN min_devices = max_devices THEN min_devices ELSE min_devices || ':' || max_devices END"
_TIME = re.compile(r"@(\w+)")
"""A column that holds a time of the queue's clock, which is shown by the wall clock."""
_WHEN = "strftime('%Y-%m-%d %H:%M', @submitted_s, 'unixepoch', 'localtime')"
_WHY = "replace(reason, char(10), ' ')"
_COLUMNS = (
    ("job", "id"),
    ("name", "name"),
    ("user", "user"),
    ("state", _STATE),
    ("priority", "CASE priority WHEN 0 THEN '' ELSE priority END"),
    ("devices", _REQUESTED),
    ("attempts", "CASE attempt WHEN 0 THEN '' ELSE attempt END"),
    ("submitted", _WHEN),
    ("progress", _PROGRESS),
    ("why", _WHY),
)
_MIN_JOBS_TO_SPLIT, _MAX_PARTS = 10_000, 4
"""With fewer jobs, a second process would cost as much time as it saves."""
_FREE = ("id", "name", "user")
_JSON = (
    """printf('{"id":%s,"number":%d,"user":%s,"name":%s,"state":"%s","priority":%d,"min_devices":%d,"max_devices":%d,"""
    """"devices":%s,"submitted_s":%!.17g,"since_s":%!.17g,"attempt":%d,"done":%!.17g,"total":%s,"rate_per_s":%!.17g,"""
    """"reported_s":%!.17g,"reason":%s}', json_quote(id), number, json_quote(user), json_quote(name), state, priority, """
    """min_devices, max_devices, devices, @submitted_s, @since_s, attempt, done, ifnull(total, 'null'), rate_per_s, """
    """@reported_s, json_quote(reason))"""
)


def all_lines(folder: Path, states: Sequence[JobState] = (), user: str | None = None) -> Iterator[str]:
    """Yield a header and a line for each job in the order of submission, as blocks of whole lines."""
    with Reader(folder) as reader:
        lengths = reader.text(
            f"json_array({', '.join(f'max(length({name}))' for name in _FREE)})", states=states, user=user
        )
        parts, ahead_s = _parts(reader), reader.clock().ahead_s
    free = dict(zip(_FREE, json.loads(lengths), strict=True))
    widths = [max(len(head), free.get(form) or 0) if form in free else len(head) for head, form in _COLUMNS]
    widths[3], widths[5], widths[7], widths[8] = 9, 11, 16, 20
    yield "  ".join(f"{head:{width}}" for (head, _), width in zip(_COLUMNS, widths, strict=True)).rstrip() + "\n"
    marks = "  ".join(f"%!-{width}s" for width in widths[:-1]) + "  %s"  # "!": widths are of letters, not of bytes
    expression = f"rtrim(printf('{marks}', {', '.join(form for _, form in _COLUMNS)}))"
    for text in _texts(folder, _by_wall_clock(expression, ahead_s), "\n", parts, states, user):
        yield _printable(text) + "\n"


def _printable(text: str) -> str:
    # A search costs more than this check that there is nothing to replace.
    if text.isascii() and len(text.encode().translate(None, _CONTROL_BYTES)) == len(text):
        return text
    return _CONTROL.sub("?", text)


def all_json(folder: Path, states: Sequence[JobState] = (), user: str | None = None) -> Iterator[str]:
    """Yield one object with a line for each job, like `view.json_of`."""
    with Reader(folder) as reader:
        counts = {str(state): num for state, num in reader.counts(user).items()}
        parts, expression = _parts(reader), _by_wall_clock(_JSON, reader.clock().ahead_s)
    head = {"queue": str(folder), "time_s": time.time(), "from_daemon": False, "counts": counts}
    yield json.dumps(head, ensure_ascii=False)[:-1] + ', "jobs": [\n'
    for index, text in enumerate(_texts(folder, expression, ",\n", parts, states, user)):
        yield (",\n" if index else "") + text
    yield "\n]}\n"


def _by_wall_clock(expression: str, ahead_s: float) -> str:
    return _TIME.sub(rf"(\1 + {ahead_s!r})" if ahead_s else r"\1", expression)


def _parts(reader: Reader) -> list[tuple[int, int]]:
    """Split the range of job numbers into a part per core if there are many jobs."""
    first, last = reader.span()
    num = 1 if last - first < _MIN_JOBS_TO_SPLIT else min(_MAX_PARTS, len(os.sched_getaffinity(0)))
    bounds = [first + (last + 1 - first) * index // num for index in range(num + 1)]
    return [(low, high - 1) for low, high in pairwise(bounds)]


def _texts(
    folder: Path,
    expression: str,
    separator: str,
    parts: list[tuple[int, int]],
    states: Sequence[JobState],
    user: str | None,
) -> Iterator[str]:
    """Yield the text of each part that is not empty; all but the first come from processes: threads contend in SQLite."""

    def make(part: tuple[int, int]) -> str:
        with Reader(folder) as reader:
            return reader.joined(expression, separator, states=states, user=user, first=part[0], last=part[1])

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_ForkedText(partial(make, part))) for part in parts[1:]]
        if text := make(parts[0]):
            yield text
        for part, child in zip(parts[1:], children, strict=True):
            made = child.text()
            if text := make(part) if made is None else made:
                yield text


class _ForkedText:
    """A text that a forked process makes."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._pipe, there = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(there)
            return
        code = 1
        # On any error the parent makes the text itself and raises what is wrong.
        with contextlib.suppress(BaseException):
            os.close(self._pipe)
            with os.fdopen(there, "w", encoding="utf-8") as file:
                file.write(make())
            code = 0
        os._exit(code)

    def text(self) -> str | None:
        with os.fdopen(self._pipe, encoding="utf-8", closefd=False) as file:
            text = file.read()
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return text if status == 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._pipe)
        if self._pid:  # its text is not needed any more; it ends as soon as it writes
            os.waitpid(self._pid, 0)
