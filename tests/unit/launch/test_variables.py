"""Who a process is, by the variables that it finds: torchrun's, srun's, set by hand, contradicting one another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenload.errors import LaunchError
from evenload.training.comm.backend import InnerRanks, inner_ranks
from evenload.training.launch.environment import WorkerSpec, detect
from evenload.training.launch.process import worker_variables
from evenload.training.launch.slurm import expand_hosts, read_task

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_NODELIST": "gpu[01-32]",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "EVENLOAD_", "MASTER_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,login", ["node1", "login"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10,12],login", ["node08", "node09", "node10", "node12", "login"]),
        ("rack[1-2]n[3,5-6]-ib", [f"rack{r}n{n}-ib" for r in (1, 2) for n in (3, 5, 6)]),
        ("gpu-a-7.cluster.example", ["gpu-a-7.cluster.example"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == tuple(hosts)


@pytest.mark.parametrize("text", ["", "a,,b", "node[1-", "node[1]]", "node[3-1]", "node[a-b]", "node[]", "a b"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a list of hosts in Slurm's form"):
        expand_hosts(text)


def test_a_task_of_a_step(bare: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        bare.setenv(name, value)
    spec = detect()
    assert (spec.rank, spec.world_size, spec.local_rank) == (5, 6, 1)
    assert (spec.node_rank, spec.num_nodes, spec.origin) == (2, 3, "slurm")
    assert spec.store == f"tcp://gpu07:{15000 + (1234567 + 2 * 7919) % 10000}"
    assert spec.workers == tuple(f"worker-{rank}" for rank in range(6))


@pytest.mark.parametrize(
    ("changes", "store"),
    [
        ({"MASTER_ADDR": "10.0.0.7"}, "tcp://10.0.0.7:15405"),
        ({"MASTER_PORT": "29501"}, "tcp://gpu07:29501"),
        ({"SLURM_STEP_RESV_PORTS": "12345-12346"}, "tcp://gpu07:12345"),
        ({"SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_NUM_NODES": "1"}, "tcp://127.0.0.1:15405"),
        ({"SLURM_STEP_NODELIST": None}, "tcp://gpu01:15405"),
        ({"SLURM_STEP_ID": None}, "tcp://gpu07:19567"),
        # Who exports what torch wants, and says the same.
        ({"WORLD_SIZE": "6", "RANK": "5"}, "tcp://gpu07:15405"),
    ],
)
def test_where_tasks_meet(bare: pytest.MonkeyPatch, changes: dict[str, str | None], store: str) -> None:
    for name, value in {**STEP, **changes}.items():
        if value is not None:
            bare.setenv(name, value)
    assert detect().store == store


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # salloc
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # a batch script
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in a job of six tasks
        {"SLURM_PROCID": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_who_is_alone(bare: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        bare.setenv(name, value)
    assert detect() == WorkerSpec()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"SLURM_PROCID": "6"}, "SLURM_PROCID=6 with SLURM_STEP_NUM_TASKS=6: the rank must be from 0 to 5"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x': expected a number, as srun sets it"),
        ({"SLURM_NTASKS": None, "SLURM_STEP_NUM_TASKS": None}, "neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS"),
        ({"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None}, "set MASTER_ADDR to the host of rank 0"),
        ({"SLURM_STEP_NODELIST": "gpu[1-"}, r"'gpu\[1-' is not a list of hosts"),
        ({"SLURM_JOB_ID": None}, "set MASTER_PORT to a free port of rank 0's host"),
        ({"MASTER_PORT": "free"}, "MASTER_PORT='free': expected a number"),
        ({"WORLD_SIZE": "12"}, "WORLD_SIZE=12 is set, but the number of tasks of srun is 6; unset WORLD_SIZE"),
        ({"RANK": "0"}, "RANK=0 is set, but SLURM_PROCID of srun is 5; unset RANK"),
    ],
)
def test_tasks_that_do_not_know_enough(bare: pytest.MonkeyPatch, changes: dict[str, str | None], told: str) -> None:
    variables = {name: value for name, value in {**STEP, **changes}.items() if value is not None}
    with pytest.raises(LaunchError, match=told):
        read_task(variables)


def test_two_steps_of_a_job_meet_at_different_ports() -> None:
    first, second = (read_task({**STEP, "SLURM_STEP_ID": step}) for step in "01")
    assert first is not None and second is not None and first.port != second.port


def test_torchruns_variables_come_before_sruns(bare: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in {**STEP, **torchrun}.items():
        bare.setenv(name, value)
    spec = detect()
    assert (spec.origin, spec.rank, spec.world_size, spec.store) == ("torchrun", 1, 2, "env://h:1")
    assert spec.local_rank == 1  # nobody set LOCAL_RANK: Slurm's


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "1"}, "RANK=1 is set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "MASTER_PORT=1 are set, but RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "a", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "must be integers"),
    ],
)
def test_variables_by_hand_that_lack_something(bare: pytest.MonkeyPatch, variables: dict[str, str], told: str) -> None:
    for name, value in variables.items():
        bare.setenv(name, value)
    with pytest.raises(LaunchError, match=told):
        detect()


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ([("nccl", 11), ("nccl", 12)], (0, 1)),
        ([("nccl", 11), ("nccl", 11)], ()),
        ([("nccl", 11), ("nccl", 12), ("nccl", 11), ("nccl", 13)], (1, 3)),
        ([("nccl", 11), ("", 0), ("nccl", 12), ("", 0)], (0, 2)),
        ([("", 0), ("", 0)], ()),
    ],
)
def test_ranks_with_a_gpu_of_their_own_sum_over_nccl(rows: list[tuple[str, int]], ranks: tuple[int, ...]) -> None:
    inner = inner_ranks(rows)
    assert inner == InnerRanks(ranks, "nccl" if ranks else "gloo")
    assert inner.backend_of(range(len(rows))) == ("nccl" if len(ranks) == len(rows) else "gloo")
    assert inner.backend_of(ranks) == inner.backend


def test_sets_of_words_have_one_order_in_all_workers() -> None:
    spec = WorkerSpec(rank=0, world_size=1, device="cpu")
    assert worker_variables(spec, Path("w.json"), {})["PYTHONHASHSEED"] == "0"
    assert worker_variables(spec, Path("w.json"), {"PYTHONHASHSEED": "7"})["PYTHONHASHSEED"] == "7"
