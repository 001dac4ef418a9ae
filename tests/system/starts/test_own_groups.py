"""A process group that is there before `evenload.init`: whose word counts, what is refused, what happens at the end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import EvenloadError, LaunchError
from evenload.hardware import free_port
from evenload.testing import run_ranks
from evenload.training.launch.environment import WORKER_VARIABLE, detect


@pytest.fixture
def ended_after() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_backend_that_sums_nothing_is_refused(tmp_path: Path, ended_after: None) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with pytest.raises(LaunchError, match=r"process group has the backend cpu:fake.*backend='gloo' or 'nccl'"):
        evenload.init(project_dir=tmp_path)
    assert dist.is_initialized()


def _own_group(rank: int, world_size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("own", store), rank=rank, world_size=world_size)


def _port() -> int:
    return int(detect().store.rpartition(":")[2])


def _against_the_launcher(folder: str) -> str:
    """Under our launcher: a group of one for each of two ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        evenload.init(project_dir=folder)
    except EvenloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_group_with_other_ranks_than_the_launcher_started(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(_against_the_launcher, 2, str(tmp_path))):
        assert told.startswith("LaunchError: the script's own process group") and "use only one of the two" in told
        assert f"makes this process rank 0 of 1, but evenload run started it as rank {rank} of 2" in told


def _against_variables(folder: str) -> tuple[int, int, int]:
    """One task of srun that started two processes of its own: the group counts, not the variables."""
    rank, port = detect().rank, _port()
    del os.environ[WORKER_VARIABLE]
    os.environ.update(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2", SLURM_LOCALID="0")
    _own_group(rank, 2, port)
    run = evenload.init(project_dir=folder)
    found = run.rank, run.world_size, int(run.reduce(10**run.rank))
    run.close()
    dist.destroy_process_group()
    return found


def test_the_groups_word_counts(tmp_path: Path) -> None:
    assert run_ranks(_against_variables, 2, str(tmp_path)) == [(0, 2, 11), (1, 2, 11)]


def _destroyed_before_the_end(folder: str, saves: bool) -> Any:
    rank, port = detect().rank, _port()
    del os.environ[WORKER_VARIABLE]
    _own_group(rank, 2, port)
    run = evenload.init(project_dir=folder)
    data = TensorDataset(torch.ones(8, 1))
    model, loader = run.prepare(nn.Linear(1, 1), DataLoader(data, batch_size=4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.resume(model=model, optimizer=optimizer)
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if saves:
            run.checkpoint(every="1h")
    dist.destroy_process_group()
    try:
        run.close()
    except EvenloadError as error:
        return f"{type(error).__name__}: {error}"
    return "closed"


@pytest.mark.parametrize("saves", [False, True])
def test_a_group_destroyed_before_the_run_is_closed(tmp_path: Path, saves: bool) -> None:
    """By habit at the end of a script: nothing to say, and rank 0 saves the last steps without the others."""
    assert run_ranks(_destroyed_before_the_end, 2, str(tmp_path), saves) == ["closed", "closed"]
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def _by_hand(folder: str, ports: list[int], as_slurm: bool) -> list[int]:
    """Two sessions of one process, each with what a person or srun would have set."""
    rank, sums = detect().rank, []
    del os.environ[WORKER_VARIABLE]
    for index, port in enumerate(ports):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if as_slurm:
            step = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "somewhere"}
            variables = {**step, "MASTER_PORT": str(port)}
        os.environ.update(variables)
        run = evenload.init(project_dir=f"{folder}/{index}")
        sums.append(int(run.reduce(10**rank)))
        run.close()
    return sums


@pytest.mark.parametrize("as_slurm", [False, True])
def test_a_process_may_join_twice(tmp_path: Path, as_slurm: bool) -> None:
    ports = [free_port("127.0.0.1")] * 2
    assert run_ranks(_by_hand, 2, str(tmp_path), ports, as_slurm) == [[11, 11]] * 2


def _port_taken(folder: str, port: int) -> str:
    del os.environ[WORKER_VARIABLE]
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        evenload.init(project_dir=folder)
    except LaunchError as error:
        return str(error)
    return ""


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (told,) = run_ranks(_port_taken, 1, str(tmp_path), port)
    assert told.startswith(f"rank 0 could not join the other 1 ranks at env://127.0.0.1:{port}: ")
    assert told.endswith("another program listens there: set MASTER_PORT to a free port on all ranks")
