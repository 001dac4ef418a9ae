"""torch's RPC inside a run: it starts on the run's store, ends with the run, and a rank that fails is named."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

import evenload
from evenload.errors import LaunchError, PeerLostError, RankFailedError
from evenload.testing import run_ranks
from evenload.training.comm.rpc import start_rpc
from evenload.training.launch.failure import is_consequence
from evenload.training.parallel.asynchronous.worker import PartWorker


def _start(run: Any, **other: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method="evenload://")
    numbers = {"rank": run.rank, "world_size": run.world_size, **other}
    rpc.init_rpc(f"rank{run.rank}", rpc_backend_options=options, **numbers)


def _double(value: torch.Tensor) -> torch.Tensor:
    if bool(value.isnan().any()):
        raise ValueError("a value is missing")
    return 2 * value


def _calls(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(2):  # a second run of the same process starts it anew
        run = evenload.init(project_dir=folder)
        try:
            _start(run, rank=5)
        except LaunchError as error:
            found["wrong rank"] = str(error)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _start(run)
        found["warned"] = [str(warning.message) for warning in warned]
        found["alone"] = run._session._why_not_restored()
        other = f"rank{1 - run.rank}"
        found["value"] = rpc.rpc_sync(other, _double, (torch.full((3,), float(run.rank)),)).tolist()
        try:
            rpc.rpc_sync(other, _double, (torch.tensor([float("nan")]),))
        except ValueError as error:
            found["error"] = str(error)
        run.close()
        found["ended"] = not rpc._is_current_rpc_agent_set()  # type: ignore[attr-defined]
    return found


def test_it_starts_on_the_runs_store_and_ends_with_the_run(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(_calls, 2, str(tmp_path))):
        assert found["value"] == [2.0 * rank] * 3 and found["ended"]
        assert f"this is rank {rank} of 2 of the run; pass rank=run.rank" in found["wrong rank"]
        assert f"name=rank{1 - rank}" in found["error"] and "a value is missing" in found["error"]
        # Otherwise a rank that is started again would have an RPC of its own, and the table of a rank twice.
        assert "takes no rank anew" in found["alone"]
        assert not [text for text in found["warned"] if "You are using a Backend" in text]  # torch's, in each init_rpc


def _dies(folder: str) -> None:
    run = evenload.init(project_dir=folder)
    _start(run)
    if run.rank == 1:
        os._exit(7)
    try:
        while True:
            rpc.rpc_sync("rank1", _double, (torch.ones(1),))
    except RuntimeError as error:
        assert is_consequence(error), error
        raise


def test_a_rank_that_dies_is_the_cause(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: the process ended with exit code 7"):
        run_ranks(_dies, 2, str(tmp_path))


def _alone(folder: str) -> float:
    run = evenload.init(project_dir=folder)
    _start(run)
    value = float(rpc.rpc_sync("rank0", _double, (torch.ones(1),)))
    run.close()
    return value


def test_one_rank_can_call_itself(tmp_path: Path) -> None:
    assert run_ranks(_alone, 1, str(tmp_path)) == [2.0]


class _WithoutInfiniBand(rpc.TensorPipeRpcBackendOptions):
    """As a torch that was built without it."""

    def __init__(self, **options: Any) -> None:
        if "ibv" in (options["_transports"] or ()):
            raise RuntimeError("Unknown transport: ibv")
        super().__init__(**options)


def _threads_of_async(folder: str, has_infiniband: bool) -> list[str]:
    run = evenload.init(project_dir=folder)
    if not has_infiniband:
        rpc.TensorPipeRpcBackendOptions = _WithoutInfiniBand  # type: ignore[misc]
    start_rpc(run.rank, run.world_size, 20.0)
    names = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            names.append(path.joinpath("comm").read_text().strip())
    run.barrier()
    run.close()
    return names


@pytest.mark.parametrize("has_infiniband", [True, False])
def test_async_looks_for_no_messages_in_shared_memory(tmp_path: Path, has_infiniband: bool) -> None:
    """The thread that does takes a whole core from the rank beside it, also while nothing is sent."""
    for names in run_ranks(_threads_of_async, 2, str(tmp_path), has_infiniband):
        assert "TP_UV_loop" in names and "TP_SHM_reactor" not in names, names


def _ask_for_a_part(folder: str) -> str:
    """Ask a server of strategy async whose run has ended already."""
    run = evenload.init(project_dir=folder)
    _start(run)
    found = ""
    if run.rank == 1:
        try:
            PartWorker(1, 20.0).take(reads_ahead=False)
        except PeerLostError as error:
            found = str(error)
    run.close()
    return found


def test_a_server_that_has_ended_is_an_error_to_the_worker_that_asks(tmp_path: Path) -> None:
    assert run_ranks(_ask_for_a_part, 2, str(tmp_path)) == ["", "the server's run has ended"]
