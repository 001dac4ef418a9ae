"""Sums that ended before all ranks' parts were in them: the flag for the optimizer, the error, and what ends queued sums."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenload.errors import PeerLostError
from evenload.training.comm.backend import end_queued
from evenload.training.compute.device_sums import DeviceSums
from evenload.training.compute.micro_steps import LossSums


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_an_optimizer_skips_what_lacks_a_ranks_part(parts: int) -> None:
    own = DeviceSums(LossSums(units=4.0, loss_sum=2.0, metrics={"accuracy": 1.0}), torch.device("cpu"))
    own.vector.mul_(parts)
    unread = own.totals(torch.tensor(True), 7, num_ranks=3)
    assert float(unread.found_inf) == float(parts < 3)
    if parts < 3:
        with pytest.raises(
            PeerLostError, match="step 7: a rank was lost before the gradients of all ranks were summed"
        ):
            unread.read()
    else:
        totals = unread.read()
        assert (totals.units, totals.loss, totals.metrics) == (12.0, 0.5, {"accuracy": 0.25})


class _Backend:
    """In place of NCCL's, which no CPU has: its end waits for that of the others on the same GPU."""

    def __init__(self, name: str, all_end: threading.Barrier) -> None:
        self._name, self._all_end, self.has_ended = name, all_end, False

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self._all_end.wait(5.0)
        self.has_ended = True


def test_sums_queued_on_gpus_end_together_and_others_stay() -> None:
    all_end = threading.Barrier(2)
    backends = [_Backend(name, all_end) for name in ("nccl", "gloo", "nccl")]
    groups: list[Any] = [SimpleNamespace(_get_backend=lambda _, own=own: own) for own in backends]

    def has_none(_: torch.device) -> Any:
        raise RuntimeError("No backend type associated with device type cuda")

    end_queued([*groups, SimpleNamespace(_get_backend=has_none)])  # type: ignore[list-item]
    assert [backend.has_ended for backend in backends] == [True, False, True]
