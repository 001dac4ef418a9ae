"""GPUs that the driver refuses, GPUs in parts (MIG), and GPUs without NVML: what a launch does with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from evenload import hardware, visible_gpus
from evenload.doctor.gpu_state import usable_gpus
from evenload.errors import ConfigError
from evenload.training.launch.devices import HostDevices, parse_devices, plan_workers, read_host
from evenload.training.launch.process import worker_variables
from evenload.training.launch.replicas import as_one_worker
from tests.system.doctor.nvml import GIB, StandInNvml


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def host_of(monkeypatch: pytest.MonkeyPatch, *cards: dict[str, Any]) -> HostDevices:
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml(list(cards)))
    return read_host()


def planned(text: str, host: HostDevices) -> list[tuple[str, str, str]]:
    workers = plan_workers(parse_devices(text, host), host)
    variables = [worker_variables(worker, Path("w.json"), {"CUDA_VISIBLE_DEVICES": "before"}) for worker in workers]
    return [(w.device, v["CUDA_VISIBLE_DEVICES"], w.backend) for w, v in zip(workers, variables, strict=True)]


@pytest.mark.parametrize("reason", ["GPU is lost", "Insufficient Permissions", "Unknown Error"])
def test_a_refused_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    host = host_of(monkeypatch, {}, {"refused": reason}, {})
    assert [gpu.index for gpu in host.gpus] == [0, 2]
    assert host.problems == (f"GPU 1 is left out: {reason}",)
    assert planned("auto", host) == [("cuda:0", "GPU-00-aa", "nccl"), ("cuda:0", "GPU-22-aa", "nccl")]
    assert [worker.device for worker in plan_workers(parse_devices("all", host), host)] == ["cuda:0", "cuda:0", "cpu"]
    assert planned("2+0", host) == [("cuda:0", "GPU-22-aa,GPU-00-aa", "gloo")]
    with pytest.raises(ConfigError, match=f"there is no GPU 1 here; GPU 1 is left out: {reason}"):
        parse_devices("0,1", host)


def test_a_gpu_that_is_lost_at_a_later_question(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(StandInNvml):
        def nvmlDeviceGetName(self, handle: int) -> str:
            if handle == 0:
                raise self.NVMLError("GPU is lost")
            return super().nvmlDeviceGetName(handle)

    monkeypatch.setitem(sys.modules, "pynvml", Lost([{}, {"Name": "RTX 3060"}]))
    assert [(gpu.index, gpu.name) for gpu in hardware.gpus({})] == [(1, "RTX 3060")]
    assert hardware.gpu_driver({}) is not None
    assert len(hardware.gpu_used_bytes({})) == 1


def test_numbers_of_visible_devices_count_refused_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,2")
    host = host_of(monkeypatch, {}, {"refused": "GPU is lost"}, {})
    assert [(gpu.index, gpu.uuid) for gpu in host.gpus] == [(1, "GPU-00-aa"), (2, "GPU-22-aa")]


def test_all_gpus_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(monkeypatch, {}, {})
    assert host.problems == ()
    assert planned("auto", host) == [("cuda:0", "before", "nccl"), ("cuda:1", "before", "nccl")]


PARTS = {"Name": "A100", "parts": ["A100 MIG 3g.20gb", "A100 MIG 2g.10gb"], "capability": (8, 0), "total": 20 * GIB}


def test_parts_of_a_gpu_are_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(monkeypatch, PARTS, {"Name": "A100"})
    assert [(gpu.index, gpu.name) for gpu in host.gpus] == [
        (0, "A100 MIG 3g.20gb"),
        (1, "A100 MIG 2g.10gb"),
        (2, "A100"),
    ]
    uuids = [gpu.uuid for gpu in host.gpus]
    assert [uuid[:4] for uuid in uuids] == ["MIG-", "MIG-", "GPU-"]
    assert planned("auto", host) == [("cuda:0", uuid, "gloo") for uuid in uuids]
    driver = hardware.gpu_driver()
    assert driver is not None
    assert driver.capabilities == ((8, 0), (8, 0), (8, 6))
    with pytest.raises(ConfigError, match=r"only one part of a GPU \(MIG\); write 0,1"):
        parse_devices("0+1", host)
    workers = plan_workers(parse_devices("0,1", host), host)
    with pytest.raises(ConfigError, match="use --strategy ddp"):
        as_one_worker(workers, {"strategy": "dp"})


def test_one_process_over_gpus_that_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(monkeypatch, {}, {"refused": "GPU is lost"}, {})
    workers = plan_workers(parse_devices("2,0,cpu", host), host)
    (worker,) = as_one_worker(workers, {"strategy": "dp"})
    assert worker.visible_devices == "GPU-22-aa,GPU-00-aa"
    assert [replica["device"] for replica in worker.replicas] == ["cuda:0", "cuda:1", "cpu"]
    with pytest.raises(ConfigError, match="named twice"):
        as_one_worker(plan_workers(parse_devices("2,2", host), host), {"strategy": "dp"})


def test_parts_named_by_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [gpu.uuid for gpu in host_of(monkeypatch, PARTS).gpus]
    for visible, expected in (
        (names[1], names[1:]),
        (",".join(names[::-1]), names[::-1]),
        (f"{names[0]},{names[0]}", []),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.uuid for gpu in hardware.gpus()] == expected


def test_mig_mode_without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(monkeypatch, {"Name": "A100", "parts": []})
    assert host.gpus == ()
    assert "A100 is in MIG mode, but has no parts" in host.problems[0]


@pytest.fixture
def without_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    return tmp_path


def test_torch_is_asked_where_nvml_is_missing(monkeypatch: pytest.MonkeyPatch, without_nvml: Path) -> None:
    answer = f'["2.13.0", [["H100", {80 * GIB}], ["H100", {80 * GIB}]]]'
    monkeypatch.setattr(visible_gpus, "_TORCH_QUERY", f"print({answer!r})")
    gpus, problems = hardware.find_gpus(root=without_nvml)
    assert [(gpu.name, gpu.index, gpu.memory_bytes, gpu.uuid) for gpu in gpus] == [
        ("H100", 0, 80 * GIB, ""),
        ("H100", 1, 80 * GIB, ""),
    ]
    assert problems == ("NVML can't be asked for GPUs (the package nvidia-ml-py is missing); torch 2.13.0 finds 2",)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import sys; sys.exit('libcudart.so.12: cannot open shared object file')", "torch (libcudart.so.12: cannot"),
        ("print('noise')", "torch (Expecting value"),
        ("import time; time.sleep(9)", "torch (no answer within 1 s)"),
    ],
)
def test_torch_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, without_nvml: Path, program: str, text: str
) -> None:
    monkeypatch.setattr(visible_gpus, "_TORCH_QUERY", program)
    monkeypatch.setattr(visible_gpus, "TORCH_LIMIT_S", 1.0)
    gpus, (problem,) = hardware.find_gpus(root=without_nvml)
    assert gpus == ()
    assert text in problem
    assert "so the CPU is used" in problem


def test_the_installed_torch_answers(without_nvml: Path) -> None:
    import torch

    gpus, (problem,) = hardware.find_gpus(root=without_nvml)
    assert len(gpus) == torch.cuda.device_count()
    assert torch.__version__ in problem


def test_nothing_is_asked_without_a_sign_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(visible_gpus, "_TORCH_QUERY", "raise SystemExit('not to be run')")
    assert hardware.find_gpus(root=tmp_path) == ((), ())
    assert hardware.find_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ((), ())
    assert "not to be run" in hardware.find_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)[1][0]


def test_one_process_of_the_doctor_sees_only_what_it_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    host_of(monkeypatch, {}, {"refused": "GPU is lost"}, {})
    assert [gpu.index for gpu in usable_gpus()] == [0, 1]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-00-aa,GPU-22-aa"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    host_of(monkeypatch, PARTS, {})
    assert [gpu.name for gpu in usable_gpus()] == ["A100 MIG 3g.20gb"]
