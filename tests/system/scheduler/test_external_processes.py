"""Devices that others hold: never started on, named, and used again when they are free."""

from __future__ import annotations

import pytest

from evenload.scheduler.daemon.devices import kind_of
from evenload.scheduler.daemon.external_processes import DeviceProcess, DeviceUse, closed_reason
from tests.system.scheduler.external_box import run

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("NVIDIA H100 NVL", "h100"),
        ("", "gpu"),
    ],
)
def test_kinds_are_what_people_call_them(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_device_is_free_when_nobody_and_nothing_is_on_it() -> None:
    external = DeviceProcess(7, "ann", "python x.py", GIB)
    assert closed_reason(DeviceUse(), GIB // 2) == ""
    assert closed_reason(DeviceUse(used_bytes=GIB // 4), GIB // 2) == ""
    assert "process 7 of ann (python x.py)" in closed_reason(DeviceUse((external,), GIB), GIB // 2)
    assert "can't be read" in closed_reason(DeviceUse((DeviceProcess(7, "", "", None),), 9 * GIB), GIB // 2)
    assert "5.0 GiB" in closed_reason(DeviceUse(used_bytes=5 * GIB), GIB // 2)
    assert closed_reason(None, 0) != "" and closed_reason(DeviceUse(problem="lost"), 0) == "lost"
    assert DeviceUse((external,), 4 * GIB).ghost_bytes(GIB) == 3 * GIB


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_starts_on_a_held_device() -> None:
    found = run(25, seed=1)
    assert found["kinds"] == ["h200"]
    assert found["counts"] == {"SUCCEEDED": 25} and found["starts"] == 25
    assert found["on_held_devices"] == []
    assert found["named"]["command"].endswith("1") and "external.py" in found["named"]["command"]
    assert max(found["ghosts_named_s"]) < 10
