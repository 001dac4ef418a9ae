"""List of all checks in display order, grouped by child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenload.doctor.finding import Status

DRIVER = "the driver responds"
SYSTEM = "the system responds"
TORCH = "torch can be imported"
DRIVER_S, TORCH_S, CUDA_S = 30.0, 60.0, 90.0
"""Limits of the checks that start a driver without persistence mode, import torch from a cold disk, or start CUDA and NCCL on
all GPUs: on a cold host each takes a multiple of its usual seconds."""
FILES = "the file system responds"
PEER = "the other machine responds"


@dataclass(frozen=True)
class Check:
    """One check: its function, and its finding if it never returns."""

    name: str
    function: str
    """``module:function`` in ``evenload.doctor.checks``."""
    subject: str
    """Its description in ``--list``."""
    on_timeout: Status = "warn"
    expected: str = SYSTEM
    limit_s: float = 9.0
    """Time limit, from the end of the check before it in its group."""


GROUPS: tuple[tuple[Check, ...], ...] = (
    (
        Check("packages", "packages:packages", "required packages and their versions", "fail"),
        Check("Python", "interpreter:interpreter", "one environment, no package installed twice or hidden"),
        Check("variables", "environment:variables", "environment variables that slow or stop a run"),
        Check("threads", "environment:threads", "OpenMP settings"),
    ),
    # These share one child because importing torch is the slowest part.
    (
        Check("wheel and driver", "torch_build:wheel", "torch's build against driver and GPUs", "fail", TORCH, TORCH_S),
        Check(
            "CUDA libraries",
            "torch_build:libraries",
            "versions of cuDNN and NCCL",
            "fail",
            "CUDA libraries load",
            TORCH_S,
        ),
        Check(
            "all-reduce", "allreduce:allreduce", "an all-reduce between local ranks", "fail", "it ends in time", CUDA_S
        ),
    ),
    (
        Check("GPU access", "gpu_config:access", "GPUs that the driver refuses", "fail", DRIVER, DRIVER_S),
        Check("GPU memory", "gpu_memory:memory_held", "GPU memory used by other processes", "fail", DRIVER, DRIVER_S),
        Check(
            "GPU order",
            "gpu_config:order",
            "CUDA_VISIBLE_DEVICES; cuda:N against nvidia-smi's N",
            "fail",
            DRIVER,
            DRIVER_S,
        ),
        Check(
            "GPU generations",
            "gpu_config:generations",
            "one wheel and one precision for all GPUs",
            "fail",
            DRIVER,
            DRIVER_S,
        ),
        Check("GPU mode", "gpu_config:mode", "compute mode, MIG", "fail", DRIVER, DRIVER_S),
        Check(
            "GPU throttling",
            "gpu_health:throttling",
            "slowdown by heat or power supply right now",
            "warn",
            DRIVER,
            DRIVER_S,
        ),
        Check("GPU clocks", "gpu_health:clocks", "lowered power limits and clocks", "warn", DRIVER, DRIVER_S),
        Check("GPU links", "gpu_health:links", "PCIe link width, NVLinks", "warn", DRIVER, DRIVER_S),
        Check(
            "GPU errors", "gpu_health:errors", "memory errors, Xid errors in the kernel log", "warn", DRIVER, DRIVER_S
        ),
    ),
    # A separate child: it initializes CUDA, which the all-reduce must not, and a wrong IOMMU setting makes it hang.
    (
        Check(
            "peer copies",
            "peer_copies:peer_copies",
            "values copied between GPUs",
            "fail",
            "copies between GPUs end",
            CUDA_S,
        ),
    ),
    (
        Check("IOMMU and ACS", "iommu:iommu", "the PCIe path between GPUs"),
        Check("NUMA", "numa:numa", "NUMA nodes of cores, memory, GPUs and network cards"),
        Check("CPU cores", "cpu:cores", "cores and quota against the number of GPUs"),
        Check("CPU governor", "cpu:governor", "frequency governor and limits"),
        Check("CPU throttling", "cpu:throttling", "throttling by a quota or by heat"),
        Check("memory", "memory:memory", "free memory, the cgroup limit, the OOM killer", "fail"),
        Check("memory pressure", "memory:pressure", "swap, and time lost to memory pressure"),
        Check("open files", "limits:open_files", "ulimit -n against the number of ranks"),
        Check("processes", "limits:processes", "ulimit -u and the cgroup's limit of processes"),
        Check("clock", "clock:clock", "error of the system clock"),
    ),
    # An unresponsive file system blocks its readers, so each has a separate child.
    (Check("/dev/shm", "storage:shared_memory", "space for loader workers and NCCL", "fail", FILES),),
    (Check("run folder", "storage:runs", "space, type of file system, a test write", "fail", FILES),),
    (Check("temporary folder", "storage:temporary", "space, length of its path, noexec", "fail", FILES),),
    (Check("host name", "network:host_name", "resolves to this machine", "warn", "DNS responds within a second"),),
    (
        Check("port", "network:port", "the port of the rendezvous is free"),
        Check("network link", "interconnect:link", "speed, duplex and packet loss; NCCL_SOCKET_IFNAME"),
        Check("InfiniBand", "interconnect:infiniband", "ports, device files, locked memory"),
    ),
)
"""Each group is one child process, which runs its checks in order; all groups run in parallel."""

FULL: tuple[tuple[Check, ...], ...] = (
    (Check("device speeds", "speed:device_speeds", "matmul and memory speed of every device", "fail", "matmuls end"),),
    (
        Check(
            "link speeds", "speed:link_speeds", "copies between host and GPUs, and between GPUs", "fail", "copies end"
        ),
    ),
    (Check("all-reduce speed", "speed:allreduce_speed", "its bandwidth over all ranks", "fail", "an all-reduce ends"),),
)
"""Measurements of ``--full``, one after the other because they would slow each other."""

HOSTS: tuple[tuple[Check, ...], ...] = (
    (
        Check("name", "hosts:name", "addresses of HOST", "fail", "DNS responds"),
        Check("port", "hosts:port", "open, refused or blocked; the program that listens", "fail", PEER),
        Check("interface", "hosts:interface", "the network interface of the route", "fail", PEER),
        Check("MTU", "hosts:mtu", "large packets", "fail", PEER),
        Check("other ports", "hosts:other_ports", "ports as chosen by gloo and NCCL, both ways", "fail", PEER),
        Check("versions", "hosts:versions", "Evenload, Python and torch on both", "fail", PEER),
        Check("clocks", "hosts:clocks", "difference of the clocks", "warn", PEER),
        Check("same code", "hosts:code", "the script of --script on both", "fail", PEER),
        Check("same data", "hosts:data", "the path of --data on both", "fail", PEER),
        Check("round trip", "hosts:round_trip", "latency", "fail", PEER),
        Check("bandwidth", "hosts:bandwidth", "each way", "warn", PEER),
        Check("exchange", "hosts:exchange", "predicted time of gradients in each format", "warn", PEER),
    ),
)
"""Checks of ``--host``, in one child because they share one connection."""


def chosen(names: Sequence[str], groups: tuple[tuple[Check, ...], ...]) -> tuple[tuple[Check, ...], ...]:
    """Return the groups restricted to the named checks; all of them without names."""
    if not names:
        return groups
    kept = (tuple(check for check in group if check.name in names) for group in groups)
    return tuple(group for group in kept if group)


def every_name() -> tuple[str, ...]:
    return tuple(check.name for groups in (GROUPS, FULL) for group in groups for check in group)
