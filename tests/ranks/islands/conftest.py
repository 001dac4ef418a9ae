from __future__ import annotations

from typing import Any

import pytest
import torch

from evenload.testing import run_ranks


def everything(folder: str) -> dict[str, Any]:
    from tests.ranks.islands import test_references, test_state, test_times

    torch.set_num_threads(1)
    jobs = (
        test_references.train_all,
        test_state.moved,
        test_state.moved_delay,
        test_state.moved_errors,
        test_state.shown,
        test_state.every_step,
        test_state.plateau,
        test_state.met_inside,
        test_state.refused,
        test_state.short_last_batch,
        test_times.early,
    )
    return {job.__name__: job(f"{folder}/{job.__name__}") for job in jobs}


@pytest.fixture(scope="package")
def island_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of all trainings, of each rank: they share three processes."""
    return run_ranks(everything, 3, str(tmp_path_factory.mktemp("islands")), timeout_s=120.0)
