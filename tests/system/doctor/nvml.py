"""A stand-in for NVML: GPUs that no single machine has, each told as what the driver would answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GIB = 2**30
_FIRST_PART = 100
"""Handles of the parts of the first GPU begin here, those of the second at twice this number."""


class StandInNvml:
    """Answers as `pynvml` does, from a list of GPUs along the PCI bus.

    ``"refused"`` of a GPU is the error that its handle raises; ``"parts"`` are the names of its MIG parts.
    A GPU is a table: ``"Name"`` is the answer of nvmlDeviceGetName, ``"Temperature"`` that of nvmlDeviceGetTemperature,
    and so on; a table as an answer is looked up by the first argument. What isn't there is not supported.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, cards: list[dict[str, Any]], cuda: int = 12080) -> None:
        self.cards, self.cuda = cards, cuda

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if "refused" in self.cards[index]:
            raise self.NVMLError(self.cards[index]["refused"])
        return index

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if "parts" not in self.cards[handle]:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:
        if index >= len(self.cards[handle]["parts"]):
            raise self.NVMLError("Not Found")
        return _FIRST_PART * (handle + 1) + index

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: int) -> int:
        return handle // _FIRST_PART - 1

    def _card(self, handle: int) -> dict[str, Any]:
        if handle < _FIRST_PART:
            return self.cards[handle]
        card = self.cards[self.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)]
        return {**card, "Name": card["parts"][handle % _FIRST_PART]}

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        parts = [
            _FIRST_PART * (h + 1) + i for h, card in enumerate(self.cards) for i in range(len(card.get("parts", ())))
        ]
        for handle in parts:
            if uuid == self.nvmlDeviceGetUUID(handle):
                return handle
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"{'GPU' if handle < _FIRST_PART else 'MIG'}-{handle}{handle}-aa"

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:0{handle + 1}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise self.NVMLError("Not Supported")
        card = self._card(handle)
        return SimpleNamespace(total=card.get("total", 24 * GIB), used=card.get("used", 0))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=GIB) for pid in self._card(handle).get("pids", ())]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if (percent := self._card(handle).get("percent")) is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=percent, memory=0)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.10"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        major, minor = self._card(handle).get("capability", (8, 6))
        return major, minor

    def nvmlDeviceGetName(self, handle: int) -> str:
        return str(self._card(handle).get("Name", "RTX 3090"))

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvmlDeviceGet"):
            raise AttributeError(function)

        def answer(handle: int, *arguments: Any) -> Any:
            found = self._card(handle).get(function.removeprefix("nvmlDeviceGet"))
            if isinstance(found, dict):
                found = found.get(str(arguments[0]))
            if found is None:
                raise self.NVMLError("Not Supported")
            return found

        return answer
