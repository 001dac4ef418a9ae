"""What is here: on this machine, on stand-in file trees, and through a stand-in NVML."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenload import hardware, visible_gpus

GIB = 2**30


class FakeNvml:
    """The part of pynvml that hardware.py calls, for made-up GPUs along a PCI bus."""

    nvmlMemory_v2 = 2

    class NVMLError(Exception):
        pass

    def __init__(self, *names: str, broken: str = "") -> None:
        self.names, self.broken, self.open = names, broken, 0
        self.processes: dict[int, list[SimpleNamespace]] = {}

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError(self.broken)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}-aa"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(total=(handle + 1) * GIB, used=handle * 1000)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return self.processes.get(handle, [])

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 8, handle


def stand_in(monkeypatch: pytest.MonkeyPatch, *names: str, broken: str = "") -> FakeNvml:
    nvml = FakeNvml(*names, broken=broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    return nvml


def names(environ: dict[str, str]) -> list[str]:
    return [gpu.name for gpu in hardware.gpus(environ)]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["A", "B", "C"]),
        ("2,0", ["C", "A"]),
        (" 1 , 2 ", ["B", "C"]),
        ("GPU-22,GPU-00-aa", ["C", "A"]),
        ("0,-1,2", ["A"]),  # an entry that names nothing ends the list
        ("1,7,0", ["B"]),
        ("GPU-", []),  # the beginning of several
        ("MIG-nowhere,0", []),
        ("1,1", []),  # twice the same: the driver shows none
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices_and_their_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    nvml = stand_in(monkeypatch, "A", "B", "C")
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    found = hardware.gpus(environ)
    assert [gpu.name for gpu in found] == expected
    assert [gpu.index for gpu in found] == list(range(len(expected)))
    assert all(gpu.kind == "cuda" for gpu in found)
    assert nvml.open == 0


def test_unlike_gpus_are_counted_as_cuda_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "slow", "fast", "slow")
    monkeypatch.setattr(visible_gpus, "_cuda_uuids", lambda environ: ("GPU-11-aa", "GPU-00-aa", "GPU-22-aa"))
    assert names({}) == ["fast", "slow", "slow"]
    assert names({"CUDA_VISIBLE_DEVICES": "1,0"}) == ["slow", "fast"]
    assert names({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == ["slow", "fast", "slow"]
    assert [gpu.memory_bytes for gpu in hardware.gpus({})] == [2 * GIB, GIB, 3 * GIB]


def test_without_the_drivers_answer_the_order_is_the_buses(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "slow", "fast")
    monkeypatch.setattr(visible_gpus, "_DRIVER_QUERY", "raise SystemExit('no driver')")
    assert names({}) == ["slow", "fast"]


def test_the_driver_is_asked_without_the_restriction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        visible_gpus, "_DRIVER_QUERY", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), 'b', sep='\\n')"
    )
    assert visible_gpus._cuda_uuids({"CUDA_VISIBLE_DEVICES": "1"}) == ("None", "b")


def test_driver_and_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "A", "A")
    assert hardware.gpu_driver({}) == hardware.GpuDriver("550.54.15", (12, 4), ((8, 0), (8, 1)))
    assert hardware.gpu_used_bytes({"CUDA_VISIBLE_DEVICES": "1"}) == (1000,)


def test_who_holds_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = stand_in(monkeypatch, "A", "A")
    write(tmp_path, {"proc/41/cmdline": "python\0train.py\0"})
    nvml.processes[1] = [SimpleNamespace(pid=41, usedGpuMemory=5), SimpleNamespace(pid=42, usedGpuMemory=None)]
    seen, hidden = hardware.gpu_processes({"CUDA_VISIBLE_DEVICES": "1,0"}, tmp_path)
    assert (seen.gpu_index, seen.pid, seen.name, seen.used_bytes) == (0, 41, "python train.py", 5)
    assert seen.user
    assert (hidden.pid, hidden.name, hidden.user, hidden.used_bytes) == (42, "", "", 0)


def test_no_driver_and_no_package_mean_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, {"dev/nvidia0": ""})
    stand_in(monkeypatch, "A", broken="Driver/library version mismatch")
    assert hardware.gpus() == hardware.gpu_processes() == hardware.gpu_used_bytes() == ()
    assert hardware.gpu_driver() is None
    assert visible_gpus.nvml_problem(tmp_path) == "Driver/library version mismatch"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert hardware.gpus() == ()
    assert visible_gpus.nvml_problem(tmp_path) == "the package nvidia-ml-py is missing"
    assert visible_gpus.nvml_problem(tmp_path / "elsewhere") == ""


def mountinfo(*rows: tuple[str, str, str, str]) -> str:
    return "".join(
        f"3{n} 1 0:{n} {root} {at} rw - {kind} x {options}\n" for n, (root, at, kind, options) in enumerate(rows)
    )


V2 = ("/", "/sys/fs/cgroup", "cgroup2", "rw")


def test_quota_v2_counts_the_tightest_level(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": mountinfo(V2),
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
        },
    )
    assert hardware.cpu_quota(root) == 1.5
    (root / "sys/fs/cgroup/jobs/mine/cpu.max").write_text("5000 20000\n")
    assert hardware.cpu_quota(root) == 0.25


def test_quota_v1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": mountinfo(("/docker/ab", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")),
            "proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "40000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "20000\n",
        },
    )
    assert hardware.cpu_quota(root) == 2.0
    (root / "proc/self/cgroup").write_text("3:cpu,cpuacct:/somewhere/else\n")
    assert hardware.cpu_quota(root) == 2.0


@pytest.mark.parametrize("quota", ["-1", "max 100000", "", "rubbish"])
def test_no_quota(tmp_path: Path, quota: str) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": mountinfo(V2, ("/", "/sys/fs/cgroup/cpu", "cgroup", "rw,cpu")),
            "proc/self/cgroup": "1:cpu:/\n0::/\n",
            "sys/fs/cgroup/cpu.max": quota,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert hardware.cpu_quota(root) is None
    assert hardware.cpu_quota(root / "nothing here") is None


def test_memory_is_the_lower_of_machine_and_cgroup(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       2048 kB\nMemFree: 5 kB\n",
        "proc/cpuinfo": "processor : 0\nmodel name : Some CPU: 9000\n",
    }
    root = write(tmp_path, files)
    assert hardware.cpu(root=root).memory_bytes == 2048 * 1024
    assert hardware.cpu_model(root) == "Some CPU: 9000"
    write(root, {"proc/self/mountinfo": mountinfo(V2), "proc/self/cgroup": "0::/a\n"})
    write(root, {"sys/fs/cgroup/a/memory.max": "1000000\n"})
    assert hardware.cpu(root=root).memory_bytes == 1_000_000
    write(root, {"sys/fs/cgroup/a/memory.max": "max\n"})
    assert hardware.cpu(root=root).memory_bytes == 2048 * 1024


def test_cpu_names_its_cores() -> None:
    assert hardware.cpu((0, 1, 2, 5)).name == "CPU (cores 0-2,5)"
    one = hardware.cpu((3,))
    assert (one.name, one.kind, one.index, one.num_cores) == ("CPU (core 3)", "cpu", -1, 1)
    here = hardware.cpu()
    assert here.num_cores == len(hardware.usable_cores()) >= 1
    assert here.memory_bytes > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity_is_honoured() -> None:
    core = hardware.usable_cores()[-1]
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); from evenload import hardware; print(hardware.usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({core},)"


def test_interfaces_and_a_free_port() -> None:
    loopback = [interface for interface in hardware.interfaces() if interface.is_loopback]
    assert loopback
    assert "127.0.0.1" in loopback[0].addresses
    port = hardware.free_port("127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
    # An outgoing connection that begins before the port is used does not take it.
    assert 20_000 <= port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_importing_hardware_loads_neither_torch_nor_numpy_nor_nvml() -> None:
    code = (
        "import sys; import evenload.hardware; print(sorted({'torch', 'numpy', 'pynvml', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.skipif(not hardware.gpus(), reason="no NVIDIA GPU here")
def test_gpus_are_torchs_gpus() -> None:
    code = (
        "import torch; print([(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))"
        " for i in range(torch.cuda.device_count())])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    driver: Any = hardware.gpu_driver()
    ours = [(gpu.name, capability) for gpu, capability in zip(hardware.gpus(), driver.capabilities, strict=True)]
    assert done.stdout.strip() == str(ours)
