"""Gradients between GPUs in other formats: over NCCL where each rank has a GPU, over gloo where two share one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evenload.testing import run_ranks
from tests.ranks.wire.test_formats import FORMATS, _train

pytestmark = pytest.mark.gpu


def _device(rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}"


def _train_all(folder: str) -> dict[str, Any]:
    found = {name: _train(name, Path(folder, name)) for name in ("fp32", *FORMATS)}
    for one in found.values():
        one["weights"] = [weight.cpu() for weight in one["weights"]]
    return found


def test_ranks_on_gpus_stay_equal_and_converge(tmp_path: Path) -> None:
    backend = "nccl" if torch.cuda.device_count() >= 4 else "gloo"
    ranks = run_ranks(_train_all, 4, str(tmp_path), device=_device, backend=backend, timeout_s=120.0)
    for name in FORMATS:
        for other in ranks[1:]:
            for a, b in zip(ranks[0][name]["weights"], other[name]["weights"], strict=True):
                assert torch.equal(a, b), name
        assert ranks[0][name]["skipped"] == [12]
        exact, found = (sum(ranks[0][one]["losses"][-10:]) for one in ("fp32", name))
        assert found < 1.1 * exact + 0.05, name
