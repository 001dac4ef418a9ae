"""Put on PYTHONPATH, this is the NVML of a machine whose GPUs the file STAND_IN_GPUS_FILE tells, as it is at each question."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.system.doctor.nvml import StandInNvml


class FromFile(StandInNvml):
    """Another program writes the file, and replaces it as a whole. When each GPU was looked at stands in one beside it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        super().__init__([])

    @property
    def cards(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._path.read_text())
        return found

    @cards.setter
    def cards(self, value: list[dict[str, Any]]) -> None: ...

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        now_s = time.time()
        card = self.cards[handle]
        with self._path.with_name("looks").open("a") as file:
            file.write(f"{now_s} {handle}\n")
        each, sizes = card.get("each", 2**30), card.get("sizes", {})
        return [SimpleNamespace(pid=pid, usedGpuMemory=sizes.get(str(pid), each)) for pid in card.get("pids", ())]


sys.modules[__name__] = FromFile(os.environ["STAND_IN_GPUS_FILE"])  # type: ignore[assignment]
