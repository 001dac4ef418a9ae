"""The network, what a user sets and installs, and what torch itself must show."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from evenload.doctor.checks.clock import ClockState
from evenload.doctor.finding import Finding
from tests.system.doctor.cases.registry import unwell, well
from tests.system.doctor.conftest import Machine, environment, in_child

if TYPE_CHECKING:
    import torch


@unwell("host name", "warn", "does not resolve", "/etc/hosts")
def nameless(machine: Machine) -> Finding:
    machine.monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    return machine.look("host name")


@well("host name")
def known(machine: Machine) -> Finding:
    machine.monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    return machine.look("host name")


@unwell("port", "fail", "port ", "kill ")
def taken(machine: Machine) -> Finding:
    import socket

    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        return machine.look("port", port=holder.getsockname()[1], root="/")


@well("port")
def any_port(machine: Machine) -> Finding:
    return machine.look("port")


def card(name: str, speed: str = "10000", duplex: str = "full", lost: int = 0) -> dict[str, str]:
    files = {
        "operstate": "up",
        "speed": speed,
        "duplex": duplex,
        "statistics/rx_packets": "100000",
        "statistics/rx_errors": "0",
        "statistics/rx_dropped": str(lost),
    }
    return {f"sys/class/net/{name}/{file}": f"{text}\n" for file, text in files.items()}


@unwell("network link", "warn", "eth1 runs at 0.1 Gbit/s", "sudo ethtool -s eth1 autoneg on")
def slow_link(machine: Machine) -> Finding:
    machine.write({**card("eth0"), **card("eth1", speed="100"), **card("lo", speed="10")})
    return machine.look("network link")


@unwell("network link", "warn", "half duplex", "ethtool -s eth0")
def half_duplex(machine: Machine) -> Finding:
    machine.write(card("eth0", duplex="half"))
    return machine.look("network link")


@unwell("network link", "warn", "lost 5000 of 100000 received packets", "ethtool -G eth0")
def lossy(machine: Machine) -> Finding:
    machine.write(card("eth0", lost=5000))
    return machine.look("network link")


@unwell("network link", "fail", "NCCL_SOCKET_IFNAME=ib", "unset NCCL_SOCKET_IFNAME")
def missing_card(machine: Machine) -> Finding:
    machine.write(card("eth0"))
    machine.monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib,=bond0")
    return machine.look("network link")


@well("network link")
def fast_link(machine: Machine) -> Finding:
    machine.write({**card("eth0", speed="-1"), **card("eth1")})
    machine.monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    return machine.look("network link")


def infiniband(machine: Machine, state: str = "4: ACTIVE", can_open: bool = True) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    machine.write({f"{port}/state": f"{state}\n", f"{port}/rate": "100 Gb/sec (4X EDR)\n"})
    if can_open:
        machine.write({"dev/infiniband/uverbs0": ""})


def with_locked_memory(machine: Machine, soft: int, hard: int) -> None:
    machine.monkeypatch.setattr("resource.getrlimit", lambda which: (soft, hard))


@unwell("InfiniBand", "fail", "ulimit -l is 64 KiB", "ulimit -l unlimited")
def little_locked_memory(machine: Machine) -> Finding:
    infiniband(machine)
    with_locked_memory(machine, 65536, resource.RLIM_INFINITY)
    return machine.look("InfiniBand")


@unwell("InfiniBand", "fail", "ulimit -l is 8192 KiB", "/etc/security/limits.conf")
def no_more_locked_memory(machine: Machine) -> Finding:
    infiniband(machine)
    with_locked_memory(machine, 8 << 20, 8 << 20)
    return machine.look("InfiniBand")


@unwell("InfiniBand", "warn", "mlx5_0:1 down", "ibstat mlx5_0")
def port_down(machine: Machine) -> Finding:
    infiniband(machine, state="1: DOWN")
    return machine.look("InfiniBand")


@unwell("InfiniBand", "warn", "/dev/infiniband) are missing", "--device=/dev/infiniband")
def not_in_the_container(machine: Machine) -> Finding:
    infiniband(machine, can_open=False)
    return machine.look("InfiniBand")


@well("InfiniBand")
def ready_port(machine: Machine) -> Finding:
    infiniband(machine)
    with_locked_memory(machine, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    return machine.look("InfiniBand")


@unwell("clock", "warn", "the error may be 4.0 s", "sudo chronyc makestep")
def far_off(machine: Machine) -> Finding:
    machine.monkeypatch.setattr("evenload.doctor.checks.clock.read_clock", lambda: ClockState(True, 4.0))
    return machine.look("clock")


@unwell("clock", "fail", "the clock shows 1970-01-01, but Evenload was installed on 20", "set-ntp true")
def at_the_beginning(machine: Machine) -> Finding:
    machine.monkeypatch.setattr("time.time", lambda: 5.0)
    return machine.look("clock")


@well("clock")
def kept_right(machine: Machine) -> Finding:
    machine.monkeypatch.setattr("evenload.doctor.checks.clock.read_clock", lambda: ClockState(True, 0.01))
    return machine.look("clock")


@well("clock")
def as_it_is_here(machine: Machine) -> Finding:
    return machine.look("clock")


# What a user sets and installs


@unwell(
    "variables", "warn", "CUDA_LAUNCH_BLOCKING=1: every kernel waits", "unset CUDA_LAUNCH_BLOCKING NCCL_P2P_DISABLE"
)
def left_over(machine: Machine) -> Finding:
    machine.monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    machine.monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    return machine.look("variables")


@unwell("variables", "fail", "RANK=0 and WORLD_SIZE=4 are left over", "unset RANK WORLD_SIZE MASTER_ADDR")
def half_a_launch(machine: Machine) -> Finding:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "box"}.items():
        machine.monkeypatch.setenv(name, value)
    return machine.look("variables")


@well("variables")
def clean(machine: Machine) -> Finding:
    machine.monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    machine.monkeypatch.setenv("NCCL_DEBUG", "WARN")
    return machine.look("variables")


@unwell("threads", "warn", "OMP_NUM_THREADS=64, but only 2 cores", "unset OMP_NUM_THREADS")
def too_many_threads(machine: Machine) -> Finding:
    machine.cores(0, 1)
    machine.monkeypatch.setenv("OMP_NUM_THREADS", "64")
    return machine.look("threads")


@unwell("threads", "warn", "OMP_NUM_THREADS=all is not a number", "unset OMP_NUM_THREADS")
def no_number(machine: Machine) -> Finding:
    machine.monkeypatch.setenv("OMP_NUM_THREADS", "all")
    return machine.look("threads")


@unwell("threads", "warn", "GOMP_CPU_AFFINITY=0-3, OMP_PROC_BIND=true", "unset GOMP_CPU_AFFINITY OMP_PROC_BIND")
def tied(machine: Machine) -> Finding:
    machine.monkeypatch.setenv("GOMP_CPU_AFFINITY", "0-3")
    machine.monkeypatch.setenv("OMP_PROC_BIND", "true")
    return machine.look("threads")


@unwell("threads", "warn", "two OpenMP libraries", "unset KMP_DUPLICATE_LIB_OK")
def two_libraries(machine: Machine) -> Finding:
    machine.monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    return machine.look("threads")


@well("threads")
def few_threads(machine: Machine) -> Finding:
    machine.cores(0, 1)
    machine.monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    return machine.look("threads")


def in_an_empty_folder(machine: Machine) -> Path:
    folder = machine.root / "cwd"
    folder.mkdir(parents=True)
    machine.monkeypatch.chdir(folder)
    machine.monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    machine.monkeypatch.setenv("PATH", str(folder / "nowhere"))
    return folder


@unwell("Python", "fail", "torch.py in this folder is imported", "mv torch.py my_torch.py")
def shadowed(machine: Machine) -> Finding:
    (in_an_empty_folder(machine) / "torch.py").touch()
    return machine.look("Python")


@unwell("Python", "warn", "random.py in this folder", "mv random.py my_random.py")
def shadowed_standard_library(machine: Machine) -> Finding:
    (in_an_empty_folder(machine) / "random.py").touch()
    return machine.look("Python")


@unwell("Python", "warn", "the shell has activated /opt/other", ". /opt/other/bin/activate")
def other_environment(machine: Machine) -> Finding:
    in_an_empty_folder(machine)
    machine.monkeypatch.setenv("VIRTUAL_ENV", "/opt/other")
    return machine.look("Python")


@unwell("Python", "warn", "the command evenload is ", "export PATH=")
def other_command(machine: Machine) -> Finding:
    folder = in_an_empty_folder(machine)
    (folder / "nowhere").mkdir()
    command = folder / "nowhere/evenload"
    command.touch()
    command.chmod(0o755)
    return machine.look("Python")


@unwell("Python", "warn", "numpy is in ", "pip uninstall -y numpy")
def twice(machine: Machine) -> Finding:
    in_an_empty_folder(machine)
    machine.look("Python")  # imports what it needs
    for name, version in (("one", "1.26.0"), ("two", "2.2.0")):
        machine.write(
            {f"{name}/numpy-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: numpy\nVersion: {version}\n"}
        )
    machine.monkeypatch.setattr("sys.path", [str(machine.root / "one"), str(machine.root / "two")])
    return machine.look("Python")


@well("Python")
def one_environment(machine: Machine) -> Finding:
    (in_an_empty_folder(machine) / "train.py").touch()
    return machine.look("Python")


@unwell("packages", "fail", "no torch", "pip install")
def nothing_installed(machine: Machine) -> Finding:
    machine.look("packages")  # imports what it needs
    machine.monkeypatch.setattr("sys.path", [])
    return machine.look("packages")


@well("packages")
def installed(machine: Machine) -> Finding:
    return machine.look("packages")


# What torch itself must show, in a child


@unwell("wheel and driver", "fail", "OSError: libcudnn.so.9", "--force-reinstall")
def broken_torch(machine: Machine) -> Finding:
    machine.write({"torch.py": "raise OSError('libcudnn.so.9: cannot open shared object file')\n"})
    return in_child("wheel and driver", env=environment(PYTHONPATH=f"{machine.root}:{environment()['PYTHONPATH']}"))


@unwell("CUDA libraries", "fail", "cuDNN 9.1.0", "unset LD_LIBRARY_PATH")
def shadowed_library(machine: Machine) -> Finding:
    from evenload.doctor.checks.torch_build import Libraries, evaluate_libraries

    loaded = Libraries("12.8", (9, 10, 2), (9, 1, 0), (2, 27, 5), (2, 27, 5))
    return evaluate_libraries(loaded, num_gpus=2, library_path="/usr/local/cuda/lib64")


@well("CUDA libraries")
def own_libraries(machine: Machine) -> Finding:
    from evenload.doctor.checks.torch_build import Libraries, evaluate_libraries

    return evaluate_libraries(
        Libraries("12.8", (9, 10, 2), (9, 10, 2), (2, 27, 5), (2, 27, 5)), num_gpus=2, library_path=""
    )


@unwell("all-reduce", "fail", "nosuch0", "GLOO_SOCKET_IFNAME=lo ")
def ranks_apart(machine: Machine) -> Finding:
    env = environment(GLOO_SOCKET_IFNAME="nosuch0")
    return in_child("all-reduce", env=env, backend="gloo", limit_s=60)


@unwell("peer copies", "fail", "cpu to cpu: 4,000,000 of 4,000,000 values differ", "export NCCL_P2P_DISABLE=1")
def copies_that_never_arrive(machine: Machine) -> Finding:
    import torch

    from evenload.doctor.checks.peer_copies import compare_copies

    stale = torch.zeros(4_000_000, dtype=torch.int32)
    return compare_copies([torch.device("cpu")] * 2, lambda numbers, device: stale)


@unwell("peer copies", "fail", "cpu to cpu: 1 of 4,000,000 values differ", "NCCL_P2P_DISABLE")
def one_wrong_value(machine: Machine) -> Finding:
    from evenload.doctor.checks.peer_copies import compare_copies

    cpu = _cpu()

    def spoil(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
        numbers = numbers.clone()
        numbers[1234] += 1
        return numbers

    return compare_copies([cpu, cpu], spoil)


@well("peer copies")
def copies_that_arrive(machine: Machine) -> Finding:
    from evenload.doctor.checks.peer_copies import compare_copies

    return compare_copies([_cpu()] * 3, lambda numbers, device: numbers.to(device).clone())


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")
