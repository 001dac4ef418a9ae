"""`evenload run --strategy dp`: one process that owns the named devices, by the real command line."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from evenload.balance.values import ComputeDevice
from evenload.errors import ConfigError
from evenload.training.launch.devices import HostDevices, describe_workers, parse_devices, plan_workers
from evenload.training.launch.environment import WorkerSpec, read_spec, write_spec
from evenload.training.launch.replicas import as_one_worker, num_parts, plan_replicas, replica_devices
from tests import warm
from tests.system.launch.scripts import Started, assert_gone, run

TRAIN = """
import os, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenload

run = evenload.init(project_dir="run", seed=0{settings})
g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(160, 8, generator=g, dtype=torch.float64), torch.randint(0, 3, (160,), generator=g))
torch.manual_seed(run.rank)
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
model, loader = run.prepare(model, DataLoader(data, batch_size=16, shuffle=True, num_workers={workers}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.resume(model=model, optimizer=optimizer)

def loss_fn(batch):
    return F.cross_entropy(model(batch[0]), batch[1])

for epoch in range(loader.epoch, {epochs}):
    for step in loader:
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        if os.path.exists("pids") is False:
            open("pids", "w").write(str(os.getpid()))
    run.checkpoint()
correct = sum(len(y) for x, y in run.batches(DataLoader(data, batch_size=7)))
torch.save([p.detach() for p in model.parameters()], "weights.%d.pt" % run.rank)
sys.stdout.write(f"DONE {{run.rank}} {{run.world_size}} {{loader.planner.world_size}} {{correct}} {{os.getpid()}}\\n")
"""


def _script(settings: str = "", epochs: int = 3, workers: int = 0) -> str:
    return TRAIN.format(settings=settings, epochs=epochs, workers=workers)


def _done(stdout: str) -> list[list[int]]:
    return [[int(n) for n in found] for found in re.findall(r"DONE (\d+) (\d+) (\d+) (\d+) (\d+)", stdout)]


def _host(num_gpus: int = 0, num_cores: int = 8) -> HostDevices:
    gpus = tuple(ComputeDevice(f"GPU model {index}", "cuda", index, 2**34) for index in range(num_gpus))
    return HostDevices(gpus, ComputeDevice("CPU", "cpu", -1, 2**35, num_cores), tuple(range(num_cores)))


def test_one_process_gives_the_weights_of_two(tmp_path: Path) -> None:
    import torch

    weights = {}
    for name, options, processes in (("dp", ("--strategy", "dp"), 1), ("ddp", (), 2)):
        folder = tmp_path / name
        folder.mkdir()
        options = ("-d", "cpu:2", "--balance", "11,5", *options)
        code, stdout, stderr = run(folder, _script(workers=1), *options, initialised=False)
        assert code == 0, stderr
        done = _done(stdout)
        assert len(done) == processes and all(row[2] == 2 for row in done)
        assert sum(row[3] for row in done) == 160, "evaluation sees every sample once"
        weights[name] = torch.cat([p.flatten() for p in torch.load(folder / "weights.0.pt")])
        steps = (folder / "run" / "steps.jsonl").read_text().splitlines()
        assert json.loads(steps[-1])["shares"] == [11, 5] and len(json.loads(steps[-1])["ranks"]["compute_s"]) == 2
    assert float((weights["dp"] - weights["ddp"]).norm() / weights["ddp"].norm()) <= 1e-12


def test_throttled_replicas_share_by_their_speeds(tmp_path: Path) -> None:
    body = (
        _script(epochs=8)
        .replace("nn.Linear(8, 16, bias=False)", "nn.Linear(8, 16, bias=False)")
        .replace("return F.cross", "work = torch.randn(len(batch[0]) * 2000, 96) @ torch.randn(96, 96); return F.cross")
    )
    code, stdout, stderr = run(
        tmp_path, body, "-d", "cpu:2", "--strategy", "dp", "--throttle", "1,0.25", initialised=False
    )
    assert code == 0, stderr
    assert "rank 1: cpu" in stdout and "throttled to 0.25 of its speed" in stdout
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines() if '"shares"' in line
    ]
    assert steps[-1]["shares"][0] > steps[-1]["shares"][1]


@pytest.mark.parametrize(
    ("options", "settings", "told", "code"),
    [
        (
            ("-d", "cpu:2"),
            ", strategy='dp'",
            "init(strategy='dp'): dp is one process that owns all its devices, but evenload",
            1,
        ),
        (("-d", "cpu:2", "--strategy", "dp", "--balance", "8,4,4"), "", "--balance 8,4,4: 3 shares for 2 ranks", 2),
        (("-d", "cpu:2", "--strategy", "dp", "--throttle", "1,1,1"), "", "3 speeds for 2 ranks", 2),
        (
            ("--nproc-per-node", "2", "--strategy", "dp"),
            "",
            "asks for several processes, but --strategy dp uses one process",
            2,
        ),
        (("-d", "cpu:2", "--strategy", "dp", "--port", "29599"), "", "--port 29599 has no effect", 2),
        (("-d", "cpu+cpu", "--strategy", "dp"), "", "cpu+cpu is one rank with several; name them apart: -d cpu,cpu", 2),
        (
            ("--nodes", "2", "--host", "localhost", "-d", "cpu:2", "--strategy", "dp"),
            "",
            "one process on one machine",
            2,
        ),
    ],
)
def test_what_contradicts_is_refused(
    tmp_path: Path, options: tuple[str, ...], settings: str, told: str, code: int
) -> None:
    found, stdout, stderr = run(tmp_path, _script(settings, epochs=1), *options, initialised=False)
    assert found == code and told in stderr + stdout and "DONE" not in stdout


def test_verify_compares_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_script(epochs=1))
    ended = warm.run(["-m", "evenload.cli.main", "verify", "--strategy", "dp", "train.py"], tmp_path, 60)
    assert ended.returncode == 2 and "verify the script with strategy='ddp'" in ended.stderr


def test_a_signal_saves_and_ends_all_replicas(tmp_path: Path) -> None:
    body = _script(epochs=10_000)
    with Started(tmp_path, body, "-d", "cpu:2", "--strategy", "dp", initialised=False) as started:
        deadline = time.monotonic() + 40
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            assert time.monotonic() < deadline and started.process.poll() is None
            time.sleep(0.02)
        pid = int((tmp_path / "pids").read_text())
        started.process.send_signal(signal.SIGINT)
        code, _, stderr = started.end()
    assert code == 75 and "SIGINT: saving and stopping after this step" in stderr
    assert_gone([pid])


def test_one_worker_that_owns_all_devices(tmp_path: Path) -> None:
    host = _host(num_gpus=2, num_cores=8)
    ranks = plan_workers(parse_devices("0,1,cpu:2", host), host, {"strategy": "dp"})
    (worker,) = as_one_worker(ranks, {"strategy": "dp"})
    assert (worker.world_size, worker.rank, worker.device, worker.cores) == (1, 0, "cuda:0", ())
    assert [place["device"] for place in worker.replicas] == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert [place["cores"] for place in worker.replicas] == [[], [], [4, 5], [6, 7]]
    assert worker.num_threads == 4 and num_parts([worker]) == 4 and num_parts(ranks) == 4
    write_spec(worker, tmp_path / "worker.json")
    read = read_spec(tmp_path / "worker.json")
    assert [place.cores for place in replica_devices(read, "--strategy dp")] == [(), (), (4, 5), (6, 7)]
    assert describe_workers([worker])[0] == "one process, 4 replicas (strategy dp)"
    assert describe_workers([worker])[3] == "rank 2: cpu    CPU (cores 4-5)  2 threads"
    assert as_one_worker(ranks, {"strategy": "ddp"}) == ranks


def test_a_gpu_named_twice_is_refused() -> None:
    host = _host(num_gpus=1)
    ranks = plan_workers(parse_devices("0,0", host), host, {"strategy": "dp"})
    with pytest.raises(ConfigError, match="cuda:0 is named twice"):
        as_one_worker(ranks, {"strategy": "dp"})
    with pytest.raises(ConfigError, match="cuda:0 is named twice"):
        plan_replicas(["cuda:0", "cpu", "cuda:0"], host)


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ("evenload", "evenload run started 2 ranks"),
        ("torchrun", "torchrun started 2 ranks"),
        ("group", "there are 2 ranks; start one"),
    ],
)
def test_beside_other_ranks_it_is_refused(origin: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replica_devices(WorkerSpec(world_size=2, origin=origin), "init(strategy='dp')")
