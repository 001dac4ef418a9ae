"""Wheel, driver, libraries and memory of GPUs: findings for facts that no single machine has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evenload import hardware
from evenload.balance.values import ComputeDevice
from evenload.doctor.checklist import GROUPS
from evenload.doctor.checks import gpu_memory, torch_build
from evenload.doctor.checks.gpu_health import read_xids
from evenload.doctor.finding import Finding, Options
from evenload.doctor.gpu_state import read_gpu_states
from tests.system.doctor.conftest import all_in_child, environment, in_child

GIB = 2**30
MODERN = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
needs_gpu = pytest.mark.skipif(not hardware.gpus(), reason="no NVIDIA GPU here")


def judge(
    *capabilities: tuple[int, int],
    wheel_cuda: str | None = "12.6",
    driver_cuda: tuple[int, int] = (12, 4),
    architectures: tuple[str, ...] = MODERN,
    problem: str = "",
) -> Finding:
    built = torch_build.Wheel("2.13.0", wheel_cuda, architectures if wheel_cuda else ())
    cards = [ComputeDevice(f"Card {index}", "cuda", index, 24 * GIB) for index, _ in enumerate(capabilities)]
    return torch_build.evaluate_wheel(built, hardware.GpuDriver("550.1", driver_cuda, capabilities), cards, problem)


def test_wheel_fits_unlike_cards() -> None:
    finding = judge((8, 6), (8, 9), (7, 5), wheel_cuda="12.8")  # a newer minor version of CUDA is no hindrance
    assert finding.status == "ok"
    assert "1 x Card 2 (7.5)" in finding.found


def test_driver_too_old_for_the_wheel() -> None:
    finding = judge((8, 6), wheel_cuda="13.0")
    assert finding.status == "fail"
    assert "a driver for CUDA 13" in finding.expected
    assert finding.fix.endswith("=cu126")
    assert judge((12, 0), wheel_cuda="13.0").fix.endswith("=cu128")


@pytest.mark.parametrize(
    ("capability", "driver", "tag"),
    [((6, 1), (13, 0), "cu126"), ((12, 0), (12, 8), "cu128"), ((12, 0), (13, 0), "cu130")],
)
def test_wheel_without_code_for_a_card(capability: tuple[int, int], driver: tuple[int, int], tag: str) -> None:
    finding = judge((8, 0), capability, driver_cuda=driver, architectures=("sm_70", "sm_80", "sm_90a"))
    assert finding.status == "fail"
    assert finding.expected.startswith("code for Card 1;")
    assert finding.fix.endswith(f"={tag}")


def test_cpu_wheel_beside_a_gpu() -> None:
    finding = judge((8, 6), wheel_cuda=None)
    assert finding.status == "warn"
    assert "stay idle" in finding.expected


def test_driver_that_does_not_answer() -> None:
    assert judge(problem="Driver/library version mismatch").fix.startswith("sudo reboot")
    assert "nvidia-ml-py" in judge(problem="the package nvidia-ml-py is missing").fix
    other = judge(problem="Unknown Error")
    assert (other.status, other.fix.split()[0]) == ("fail", "nvidia-smi")


def test_no_gpu_and_hidden_gpus() -> None:
    assert "no NVIDIA GPU" in torch_build.evaluate_wheel(torch_build.Wheel("2.13.0+cpu", None, ()), None, ()).found
    assert "CUDA_VISIBLE_DEVICES" in judge().found
    assert torch_build.evaluate_wheel(torch_build.Wheel("2.13.0", None, (), is_rocm=True), None, ()).status == "skip"


def test_a_gpu_whose_driver_is_missing(tmp_path: Path) -> None:
    if hardware.gpus():
        pytest.skip("the driver here answers")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    finding = torch_build.wheel(Options(root=str(tmp_path)))
    assert finding.status == "fail"
    assert "does not respond" in finding.found


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 9), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("compute_90a", (10, 0), False),
        ("sm_120", (12, 1), True),
        ("gfx90a", (9, 0), False),
    ],
)
def test_what_code_runs_where(architecture: str, capability: tuple[int, int], runs: bool) -> None:
    assert torch_build.runs_on((architecture,), capability) is runs


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudnn.so.9: cannot open shared object file')\n")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    finding = in_child("torch_build:wheel", env=environment(PYTHONPATH=path))
    assert finding.status == "fail"
    assert "OSError: libcudnn.so.9" in finding.found
    assert "--force-reinstall" in finding.fix
    for check in ("torch_build:libraries", "allreduce:allreduce"):
        assert in_child(check, env=environment(PYTHONPATH=path)).status == "skip"


def test_torch_that_is_missing(bare_python: Path) -> None:
    for check in ("torch_build:wheel", "torch_build:libraries", "allreduce:allreduce"):
        finding = in_child(check, python=bare_python)
        assert (finding.status, "torch is not installed" in finding.found) == ("skip", True)


def libraries(
    cudnn: tuple[int, ...] | None = (9, 10, 2),
    nccl: tuple[int, ...] | None = (2, 27, 5),
    num_gpus: int = 2,
    path: str = "",
) -> Finding:
    loaded = torch_build.Libraries("12.8", (9, 10, 2), cudnn, (2, 27, 5), nccl)
    return torch_build.evaluate_libraries(loaded, num_gpus=num_gpus, library_path=path)


def test_libraries() -> None:
    assert libraries().found == "CUDA 12.8, cuDNN 9.10.2, NCCL 2.27.5"
    assert libraries().status == libraries(cudnn=(9, 12, 0), nccl=(2, 28, 0)).status == "ok"
    for wrong in ((9, 1, 0), (8, 9, 7), (10, 0, 0), None):
        assert libraries(cudnn=wrong).status == "fail"
    shadowed = libraries(nccl=(2, 18, 1), path="/usr/local/nccl")
    assert (shadowed.status, shadowed.fix) == ("fail", "unset LD_LIBRARY_PATH")
    assert libraries(nccl=None).status == "warn"
    assert libraries(nccl=None, num_gpus=1).status == "ok"


def held(*used_gib: float, processes: tuple[hardware.GpuProcess, ...] = ()) -> Finding:
    cards = [ComputeDevice("Card", "cuda", index, 10 * GIB) for index, _ in enumerate(used_gib)]
    return gpu_memory.evaluate_memory(cards, [int(gib * GIB) for gib in used_gib], processes)


def test_memory_held() -> None:
    assert held(0.1, 0.2).status == "ok"
    process = hardware.GpuProcess(1, 4711, "python old.py", "ada", 3 * GIB)
    finding = held(0.1, 4.0, processes=(process,))
    assert (finding.status, finding.fix) == ("warn", "kill 4711")
    assert "cuda:1: 4.0 of 10.0 GiB used by 3.0 GiB by process 4711 (python old.py, user ada)" in finding.found
    unseen = held(9.5)
    assert unseen.status == "fail"
    assert "not visible from here" in unseen.found
    assert held().status == "skip"


@pytest.mark.gpu
@needs_gpu
def test_memory_held_for_real() -> None:
    import subprocess

    hold = (
        "import torch; total = torch.cuda.get_device_properties(0).total_memory;"
        "kept = torch.empty(int(total * 0.1), dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == b"held"
        finding = gpu_memory.memory_held(Options())
        holder.kill()
    assert finding.status in ("warn", "fail")
    assert "cuda:0" in finding.found


@pytest.mark.gpu
@needs_gpu
def test_wheel_and_libraries_for_real() -> None:
    assert in_child("torch_build:wheel").status in ("ok", "warn")
    assert in_child("torch_build:libraries").status in ("ok", "skip")


@pytest.mark.gpu
@needs_gpu
def test_cards_for_real() -> None:
    cards = read_gpu_states()
    assert [card.name for card in cards] == [gpu.name for gpu in hardware.gpus()]
    assert all(card.bus.count(":") == 2 and card.smi_index is not None for card in cards)
    assert any(card.temperature_c is not None for card in cards)
    names = [check.name for group in GROUPS for check in group if check.name.startswith("GPU ")]
    findings = all_in_child(*names, limit_s=60)
    assert [finding.name for finding in findings] == names
    assert all(finding.expected and finding.fix for finding in findings if finding.status in ("warn", "fail"))


@pytest.mark.gpu
@pytest.mark.skipif(len(hardware.gpus()) < 2, reason="copies between GPUs need two")
def test_peer_copies_for_real() -> None:
    finding = in_child("peer copies", limit_s=60)
    assert finding.status in ("ok", "fail")
    assert "values differ" in finding.found or "all values are correct" in finding.found


def test_the_kernels_log_is_read_without_waiting() -> None:
    assert read_xids(Path("/")) in ((), None) or hardware.gpus()
