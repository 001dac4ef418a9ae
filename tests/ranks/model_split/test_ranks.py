"""Cut models under a launch: which devices a rank has, what is told where they do nothing, and buckets over unlike cuts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.balance.values import ComputeDevice
from evenload.errors import ConfigError
from evenload.testing import run_ranks
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.launch.devices import HostDevices, describe_workers, parse_devices, plan_workers
from evenload.training.parallel.model_split.buckets import BucketSegments
from evenload.training.parallel.model_split.transfers import split_of
from evenload.training.parallel.reducer import BucketReducer
from tests.paths import ROOT
from tests.ranks.wrong_uses.jobs import evenload_run


def _host(num_gpus: int = 4) -> HostDevices:
    gpus = tuple(
        ComputeDevice("GPU model A" if index < 2 else f"GPU model {index}", "cuda", index, 2**34)
        for index in range(num_gpus)
    )
    return HostDevices(gpus, ComputeDevice("CPU", "cpu", -1, 2**35, 4), (0, 1, 2, 3), None)


@pytest.mark.parametrize(
    ("text", "devices", "names"),
    [
        ("0+1,2+3", [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")], ["2 × GPU model A", "GPU model 2 + GPU model 3"]),
        ("0+cpu", [("cuda:0", "cpu")], ["GPU model A + CPU"]),
        ("cuda:1 + 3", [("cuda:1", "cuda:3")], ["GPU model A + GPU model 3"]),
        ("cpu+cpu,cpu+cpu", [("cpu", "cpu")] * 2, ["2 × CPU (cores 0-1)", "2 × CPU (cores 2-3)"]),
        ("2,0+1", [(), ("cuda:0", "cuda:1")], ["GPU model 2", "2 × GPU model A"]),
    ],
)
def test_a_rank_may_have_several_devices(text: str, devices: list[tuple[str, ...]], names: list[str]) -> None:
    host = _host()
    workers = plan_workers(parse_devices(text, host), host)
    assert [worker.devices for worker in workers] == devices
    assert list(workers[0].device_names) == names
    assert all(worker.device == own[0] for worker, own in zip(workers, devices, strict=True) if own)
    assert {worker.backend for worker in workers} == {"gloo"}
    if devices[0]:
        assert describe_workers(workers)[0].startswith(f"rank 0: {'+'.join(devices[0])}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0+", "'' is not a device"),
        ("+", "'' is not a device"),
        ("0+9", "no GPU 9 here"),
        ("cpu:2+0", r"is one rank with several devices, each of which must be named; write cpu\+cpu in place of cpu:2"),
        ("auto+cpu", "'auto' is not a device"),
    ],
)
def test_groups_that_make_no_sense(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"-d .*{told}"):
        parse_devices(text, _host())


# -- in a launch ------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, evenload
from tests.ranks.model_split.test_ranks import loader_of, model_of, train
run = evenload.init(project_dir="run")
model = evenload.place(model_of())
model, loader = run.prepare(model, loader_of())
train(run, model, loader)
"""


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loader_of() -> DataLoader[Any]:
    x = torch.arange(64.0).reshape(16, 4) / 64
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def train(run: evenload.Run, model: nn.Module, loader: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in loader:
        loss = step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    print("rank", run.rank, f"loss {float(loss):.6f}", flush=True)


def plain_loss() -> float:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader_of():
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def test_the_command_line_gives_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = evenload_run(tmp_path, SCRIPT, "-d", "cpu+cpu,cpu+cpu", "--balance", "5,3")
    assert done.code == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "Sequential on cpu: " in line]
    assert len(lines) == 4
    assert all(" of 3 layers, " in line and "of the time" in line for line in lines)
    assert sum("rank 1: Sequential" in line for line in lines) == 2
    assert "rank 0: cpu+cpu 2 × CPU" in done.stdout
    losses = re.findall(r"loss (\d\.\d{6})", done.stdout)
    assert len(losses) >= 2
    assert all(float(loss) == pytest.approx(plain_loss(), abs=2e-6) for loss in losses)


def test_devices_that_nothing_uses_are_told_at_the_end_of_a_script(tmp_path: Path) -> None:
    bare = evenload_run(tmp_path, "print('no training at all')", "-d", "cpu+cpu")
    assert bare.code != 0
    assert "gives each rank 2 devices, but no model is split over them" in bare.stderr
    assert "-d cpu,cpu" in bare.stderr


def _without_place(folder: str) -> str:
    run = evenload.init(project_dir=folder)
    model, loader = run.prepare(model_of(), loader_of())
    try:
        train(run, model, loader)
    except ConfigError as error:
        return str(error)
    finally:
        run.close()
    return "trained"


def test_devices_that_nothing_uses_are_told_at_the_first_step(tmp_path: Path) -> None:
    (told,) = run_ranks(_without_place, 1, str(tmp_path), devices=("cpu", "cpu"))
    assert "gives each rank 2 devices, but no model is split over them" in told


def _place(devices: Any) -> str:
    try:
        evenload.place(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), devices)
    except ConfigError as error:
        return str(error)
    return "placed"


def test_the_script_must_not_say_otherwise_than_the_command_line() -> None:
    own = {"devices": ("cpu", "cpu")}
    assert run_ranks(_place, 1, None, **own) == ["placed"]
    assert run_ranks(_place, 1, ["cpu", "cpu"], **own) == ["placed"]
    (told,) = run_ranks(_place, 1, ["cpu"] * 3, **own)
    assert (
        "set twice, differently: place(devices=['cpu', 'cpu', 'cpu']) in the script, and -d gave rank 0 cpu+cpu" in told
    )
    (told,) = run_ranks(_place, 1, None)
    assert "this process has one device (cpu)" in told


def _prepare(kind: str, folder: str) -> str:
    run = evenload.init(project_dir=folder)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x = torch.ones(8, 4)
    loader = DataLoader(TensorDataset(x, x), batch_size=4)
    try:
        if kind == "after":
            run.prepare(model, loader)
            evenload.place(model, ["cpu", "cpu"])
        elif kind == "part":
            run.prepare(nn.Sequential(evenload.place(model, ["cpu", "cpu"]), nn.Linear(1, 1)))
        else:
            prepared, _ = run.prepare(evenload.place(model, ["cpu", "cpu"]), loader)
            assert prepared is model
            assert split_of(prepared) is not None
    except ConfigError as error:
        return str(error)
    finally:
        run.close()
    return "fine"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("after", "place after run.prepare"),
        ("part", "Sequential.0 was cut by evenload.place, Sequential itself wasn't"),
    ],
)
def test_place_and_prepare_in_the_wrong_order(kind: str, told: str, tmp_path: Path) -> None:
    (message,) = run_ranks(_prepare, 1, kind, str(tmp_path))
    assert told in message


# -- buckets ----------------------------------------------------------------------------------------------------------


def _buckets(rank_cuts: tuple[int, ...]) -> list[list[list[str]]]:
    """Which parameters share a bucket, with the model's end on another device; before and after a layer is replaced."""
    from evenload.training.launch.environment import detect

    spec = detect()
    groups = Groups(Membership(0, spec.workers, spec.store), spec.rank, backend="gloo", timeout_s=30)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(6)))
    for layer in model[rank_cuts[spec.rank] :]:
        layer.to("meta")
    try:
        segments = BucketSegments([model], groups)
        found = []
        for _ in range(2):
            reducer = BucketReducer([model], groups, segments)
            found.append([[slot.name for slot in bucket.slots] for bucket in reducer.buckets])
            reducer.remove()
            model[1] = nn.Linear(2, 2, bias=False)
            model[4] = nn.Linear(2, 2, bias=False)
        return found
    finally:
        groups.close()


def test_a_bucket_ends_where_any_ranks_piece_ends() -> None:
    names = [f"{index}.weight" for index in range(6)]
    for found in run_ranks(_buckets, 3, (2, 4, 4)):
        before, after = found
        assert before == [names[5:3:-1], names[3:1:-1], names[1::-1]]
        assert sorted(after) == sorted(
            [["5.weight"], ["3.weight", "2.weight"], ["0.weight"], ["1.weight"], ["4.weight"]]
        )
    for found in run_ranks(_buckets, 2, (6, 6)):
        assert found[0] == [names[::-1]]
