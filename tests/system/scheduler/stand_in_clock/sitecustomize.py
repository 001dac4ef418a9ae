"""Stands in for the machine's clocks and boot id in every Python that finds it on its path: daemons, runners, programs.

The file named by ``STAND_IN_CLOCK`` says what time it is (`tests.system.scheduler.machine` writes it). Times that a process
measures for itself, by CLOCK_MONOTONIC, stay true.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from evenload.job import processes

_FILE = Path(os.environ["STAND_IN_CLOCK"])
_strftime = time.strftime


def _state() -> dict[str, Any]:
    row: dict[str, Any] = json.loads(_FILE.read_bytes())
    row["true_s"] += row["rate"] * (time.monotonic() - row["at_s"])
    return row


def _boottime_s() -> float:
    row = _state()
    return float(row["true_s"] - row["booted_s"])


def _time() -> float:
    row = _state()
    return float(row["true_s"] + row["wall_s"])


def _boot_id() -> str:
    return str(_state()["boot"])


processes.boot_id, processes.boottime_s = _boot_id, _boottime_s
time.time = _time
time.strftime = lambda form, *at: _strftime(form, *(at or (time.localtime(_time()),)))
