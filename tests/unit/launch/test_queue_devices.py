"""Assignment of ranks to the devices of a queue, and the runs that can't follow a change of these devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenload.job.devices import GivenDevice, GivenDevices, read_given, read_reply, write_given
from evenload.job.protocol import RunnerContract
from evenload.training.launch.devices import RankDevice
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.queue_devices import QueueDevices

GPUS = (GivenDevice("GPU-a"), GivenDevice("GPU-b"))
SLOTS = (GivenDevice("cpu:0-1", (0, 1)), GivenDevice("cpu:2-3", (2, 3)))


def _gpu(number: int, uuid: str) -> RankDevice:
    return RankDevice(f"cuda:{number}", "a card", uuids=(uuid,))


def _cpu(*cores: int) -> tuple[RankDevice, tuple[int, ...]]:
    return RankDevice("cpu", "CPU"), cores


def _reply(
    tmp_path: Path, given: tuple[GivenDevice, ...], ranks: list[Any], settings: dict[str, Any] | None = None
) -> tuple[str, str, dict[int, str]]:
    contract = RunnerContract(
        "j", 1, str(tmp_path / "report"), str(tmp_path / "stop"), 1.0,
        devices_file=str(tmp_path / "devices"), devices_reply_file=str(tmp_path / "reply"),
    )  # fmt: skip
    placed = [one if isinstance(one, tuple) else (one, ()) for one in ranks]
    staying = {f"w{i}": replace(WorkerSpec(), local_rank=i, cores=cores) for i, (_, cores) in enumerate(placed)}
    members: Any = SimpleNamespace(
        staying=staying, device_of=lambda name: placed[int(name[1:])][0], why_not_change=lambda: ""
    )
    devices = QueueDevices(contract, GivenDevices(0, given), settings or {})
    devices._why_not = ""  # this process is no program of a queue
    devices.poll(members)
    reply = read_reply(contract)
    assert reply is not None and reply.number == 0
    return reply.state, reply.reason, devices._device_of


def test_ranks_belong_to_the_device_they_run_on(tmp_path: Path) -> None:
    cpu = RankDevice("cpu", "CPU")
    assert _reply(tmp_path, GPUS, [_gpu(0, "GPU-b"), _gpu(1, "GPU-a"), cpu]) == ("ready", "", {0: "GPU-b", 1: "GPU-a"})
    two_each = [_cpu(0), _cpu(1), _cpu(2), _cpu(3)]
    assert _reply(tmp_path, SLOTS, two_each)[2] == {0: "cpu:0-1", 1: "cpu:0-1", 2: "cpu:2-3", 3: "cpu:2-3"}
    unbound = [_cpu(), _cpu()]
    assert _reply(tmp_path, SLOTS, unbound)[2] == {0: "cpu:0-1", 1: "cpu:2-3"}


@pytest.mark.parametrize(
    ("given", "ranks", "settings", "named"),
    [
        (GPUS, [_gpu(0, "GPU-a")], {}, "not have the same number of ranks: 1 on GPU-a, 0 on GPU-b"),
        (SLOTS, [_cpu(0, 1, 2, 3)], {}, "rank 0 is not on cpu:0-1 alone"),
        (SLOTS, [_cpu(), _cpu(), _cpu()], {}, "2 on cpu:0-1, 1 on cpu:2-3"),
        (SLOTS, [_cpu(0, 1), _cpu(2, 3)], {"balance": (3, 1)}, "its shares are fixed: --balance 3,1"),
        (GPUS, [replace(_gpu(0, "GPU-a"), devices=("cuda:0", "cuda:1"))], {}, "several devices"),
    ],
)
def test_a_run_that_can_not_follow_says_why(
    tmp_path: Path, given: tuple[GivenDevice, ...], ranks: list[Any], settings: dict[str, Any], named: str
) -> None:
    state, reason, _ = _reply(tmp_path, given, ranks, settings)
    assert state == "refused" and named in reason


def test_what_is_no_file_of_devices_is_none(tmp_path: Path) -> None:
    path = tmp_path / "devices"
    write_given(path, GivenDevices(3, SLOTS))
    assert read_given(path) == GivenDevices(3, SLOTS)
    path.write_text('{"schema": 1, "number": 3}')
    assert read_given(path) is None and read_given(tmp_path / "missing") is None
