"""The unit tier starts no processes: a test that does fails, and belongs into tests/ranks or tests/system."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
_started: list[str] = []


def _record(event: str, args: tuple[Any, ...]) -> None:
    if event in _STARTS:
        _started.append(f"{event} {args[:2]}"[:200])


sys.addaudithook(_record)


@pytest.fixture(autouse=True)
def starts_no_process() -> Iterator[None]:
    _started.clear()
    yield
    if _started:
        pytest.fail(f"a unit test starts a process: {_started[0]}", pytrace=False)
