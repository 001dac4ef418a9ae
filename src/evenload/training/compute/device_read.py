"""`DeviceRead`: numbers of a device on their way to the host, which waits for them only where it reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DeviceRead:
    """Copies `values`, a vector, behind all that is queued on their device; later changes of them don't count."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            # Pageable memory would make the copy wait.
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._host = values.detach().clone()

    @property
    def is_here(self) -> bool:
        """True if `read` does not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[float]:
        """Wait for what was queued before the copy, and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


def scalars_on(device: torch.device, values: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """Return scalars as one vector of float64 on a device, without waiting for any."""
    return torch.stack([_scalar(value, device) for value in values])


def _scalar(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).to(device, torch.float64, non_blocking=True)
    # A fill needs no copy from the host, for which torch would wait.
    return torch.full((), value, dtype=torch.float64, device=device)
