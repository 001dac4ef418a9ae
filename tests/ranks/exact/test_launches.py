"""However the processes came to be, the weights are the same: torchrun's variables, a group of the user's.

`python train.py` is in tests/system/starts/test_python.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from evenload.hardware import free_port
from evenload.testing import run_ranks
from evenload.training.launch.environment import WORKER_VARIABLE, detect
from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import Setting, train
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS, Recorder


def launch_in_every_way(folder: str, ports: tuple[int, int], strategy: str) -> list[Recorder]:
    """As three ranks: under torchrun's variables, in a process group that is there already, and twice so."""
    torch.set_num_threads(1)
    rank = detect().rank
    del os.environ[WORKER_VARIABLE]
    setting = Setting((24, 6, 2), 8, strategy=strategy)
    variables = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(variables, MASTER_PORT=str(ports[0]))
    assert detect().origin == "torchrun"
    records = [train(TASKS["Normed"](), setting, f"{folder}/torchrun")]
    assert not dist.is_initialized()
    for name in (*variables, "MASTER_PORT"):
        del os.environ[name]
    store = dist.TCPStore("127.0.0.1", ports[1], 3, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    for index in range(2):
        records.append(train(TASKS["Normed"](), setting, f"{folder}/group{index}"))
        value = torch.tensor([rank])
        dist.all_reduce(value)  # the user's group is there after it
        assert int(value) == 3
    dist.destroy_process_group()
    return records


def test_torchrun_variables_and_an_existing_group(strategy: str, tmp_path: Path) -> None:
    ranks = run_ranks(launch_in_every_way, 3, str(tmp_path), (free_port("127.0.0.1"), free_port("127.0.0.1")), strategy)
    expected = Reference(TASKS["Normed"](), ranks[0][0].num_micro).train()
    for index, how in enumerate(("torchrun's variables", "an existing group", "the same group again")):
        check(f"Normed by {how}", [records[index] for records in ranks], expected)
