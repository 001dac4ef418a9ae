"""The devices, speeds and shares with which all ranks start again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evenload.training.launch import changeable_members
from evenload.training.launch.changeable_members import ChangeableMembers
from evenload.training.launch.devices import RankDevice
from evenload.training.launch.membership_decider import LostWorker, MembershipDecider, WorkerPlace
from evenload.training.launch.request import LaunchRequest
from evenload.training.launch.restarts import restart

A, B, C = (RankDevice(f"cuda:{number}", "a card", uuids=(f"GPU-{name}",)) for number, name in enumerate("abc"))
CPU = RankDevice("cpu", "CPU")
PAIR = RankDevice("cuda:1", "two cards", devices=("cuda:1", "cuda:2"), uuids=("GPU-b", "GPU-c"))


def members(devices: list[RankDevice], request: LaunchRequest, lost: int | None = None) -> ChangeableMembers:
    """Members at these devices after all of them trained, one of which is lost for good."""
    found: Any = ChangeableMembers.__new__(ChangeableMembers)
    found._host = SimpleNamespace(request=request)
    found._places = {f"w{n}": WorkerPlace(n, device.device, local_rank=n) for n, device in enumerate(devices)}
    found._devices = dict(enumerate(devices))
    found._decider = decider = MembershipDecider(found._places, "", request.max_restarts)
    for name in decider.members:
        decider.capable(name, "")
    if lost is not None:
        decider.lost([LostWorker(f"w{lost}", "gone", 0.0)], restart=False)
    members: ChangeableMembers = found
    return members


@pytest.mark.parametrize(
    ("devices", "lost", "here", "given"),
    [
        ([A, B, C], None, "abc", "auto"),  # as typed
        ([A, B, C], 1, "abc", "0,2"),
        ([A, B, C], 1, "cba", "2,0"),  # CUDA counts them in another order now
        ([A, B, C], None, "ac", "0,1"),  # one has fallen off the bus
        ([A, B, C], None, "", "auto"),  # nothing to choose from: as typed
        ([A, PAIR, CPU], 0, "abc", "1+2,cpu"),
        ([A, PAIR, CPU], 0, "cab", "2+0,cpu"),
        ([A, PAIR, CPU], None, "ab", "0,cpu"),  # half of a rank is none
    ],
)
def test_gpus_are_named_as_they_are_counted_now(
    devices: list[RankDevice], lost: int | None, here: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SimpleNamespace(uuid=f"GPU-{name}", index=index) for index, name in enumerate(here)]
    monkeypatch.setattr(changeable_members, "read_host", lambda: SimpleNamespace(gpus=gpus))
    assert members(devices, LaunchRequest(("train.py",)), lost).for_restart().devices == given


def test_speeds_and_shares_of_a_lost_device_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changeable_members, "read_host", lambda: SimpleNamespace(gpus=[]))
    request = LaunchRequest(("train.py",), "cpu:3", {"balance": (3, 1, 2)}, throttle=(1.0, 0.5, 0.25))
    before = members([CPU, CPU, CPU], request, lost=1).for_restart()
    assert (before.devices, before.throttle, before.settings["balance"]) == ("cpu,cpu", (1.0, 0.25), (3, 2))
    lines: list[str] = []
    following, _ = restart(request, "rank 0 failed: killed by SIGKILL", None, 0.0, before, lines.append)
    assert following is not None and following.throttle == (1.0, 0.25) and following.settings == {"balance": (3, 2)}
    assert lines == [
        "evenload: rank 0 failed: killed by SIGKILL; the run starts again from the beginning, with --throttle 1,0.25 for the "
        "devices that remain, with --balance 3,2 for the devices that remain (restart 1 of 3)"
    ]
    unchanged, _ = restart(request, "rank 0 failed", None, 0.0, request, lines.append)
    assert unchanged is not None and unchanged.throttle == request.throttle and "remain" not in lines[-1]
