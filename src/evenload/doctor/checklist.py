"""Which checks there are, in the order in which they are told, and which of them share a child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenload.doctor.finding import Status


@dataclass(frozen=True)
class Check:
    """One check: where its function is, and what it means when it never answers."""

    name: str
    function: str
    """``module:function`` below ``evenload.doctor.checks``."""
    expected: str
    if_stuck: Status
    looks_at: str = ""
    """What it looks at, for ``--list``."""


DRIVER = "the driver answers"
SYSTEM = "the system answers"
TORCH = "torch can be imported"

GROUPS: tuple[tuple[Check, ...], ...] = (
    (
        Check("packages", "packages:packages", "the packages answer", "fail", "required packages and their versions"),
        Check(
            "Python", "interpreter:interpreter", SYSTEM, "warn", "one environment, nothing installed twice or hidden"
        ),
        Check("variables", "environment:variables", SYSTEM, "warn", "variables that slow or stop a run"),
        Check("threads", "environment:threads", SYSTEM, "warn", "what is said to OpenMP"),
    ),
    # One child for all that imports torch: the import is the dearest second here.
    (
        Check("wheel and driver", "wheel:wheel", TORCH, "fail", "torch's build against driver and GPUs"),
        Check(
            "CUDA libraries", "wheel:libraries", "torch can load its CUDA libraries", "fail", "cuDNN and NCCL as built"
        ),
        Check("all-reduce", "allreduce:allreduce", "an all-reduce ends in time", "fail", "ranks meet, and sum rightly"),
    ),
    (
        Check("GPU memory", "gpus:memory_held", DRIVER, "fail", "memory that others hold, and who"),
        Check("GPU order", "lineup:order", DRIVER, "fail", "CUDA_VISIBLE_DEVICES; cuda:N against nvidia-smi's N"),
        Check("GPU generations", "lineup:generations", DRIVER, "fail", "one wheel and one precision for all GPUs"),
        Check("GPU mode", "lineup:mode", DRIVER, "fail", "compute mode, MIG"),
        Check("GPU throttling", "health:throttling", DRIVER, "warn", "slowed by heat or power supply right now"),
        Check("GPU clocks", "health:clocks", DRIVER, "warn", "lowered power limits and clocks"),
        Check("GPU links", "health:links", DRIVER, "warn", "PCIe lanes, NVLinks"),
        Check("GPU errors", "health:errors", DRIVER, "warn", "uncorrected memory errors, Xid in the kernel's log"),
    ),
    # A child of its own: a wrong IOMMU makes it hang, and it begins CUDA, which the all-reduce must not.
    (
        Check(
            "peer copies",
            "peers:peer_copies",
            "copies between GPUs end",
            "fail",
            "what GPUs copy to each other, by value",
        ),
    ),
    (
        Check("IOMMU and ACS", "iommu:iommu", SYSTEM, "warn", "what stands between GPUs on the PCI bus"),
        Check("NUMA", "numa:numa", SYSTEM, "warn", "cores, memory, GPUs and network cards at one node"),
        Check("CPU cores", "machine:cores", SYSTEM, "warn", "cores and quota, against the number of GPUs"),
        Check("CPU governor", "cpu:governor", SYSTEM, "warn", "governor and limits of the frequency"),
        Check("CPU throttling", "cpu:throttling", SYSTEM, "warn", "periods stopped by a quota, slowdown by heat"),
        Check("memory", "memory:memory", SYSTEM, "fail", "free memory, the group's limit, the OOM killer"),
        Check("memory pressure", "memory:pressure", SYSTEM, "warn", "swap, and time lost for want of memory"),
        Check("open files", "machine:open_files", SYSTEM, "warn", "ulimit -n, against the number of ranks"),
        Check("processes", "processes:processes", SYSTEM, "warn", "ulimit -u and the group's limit of processes"),
        Check("clock", "clock:clock", SYSTEM, "warn", "not plainly wrong; how far it may be off"),
    ),
    # File systems that don't answer hang whoever asks: each has a child of its own.
    (
        Check(
            "/dev/shm", "machine:shared_memory", "the file system answers", "fail", "room for loader workers and NCCL"
        ),
    ),
    (
        Check(
            "run folder", "storage:runs", "the file system answers", "fail", "room, kind of file system, a trial write"
        ),
    ),
    (
        Check(
            "temporary folder",
            "storage:temporary",
            "the file system answers",
            "fail",
            "room, length of its name, noexec",
        ),
    ),
    (Check("host name", "network:host_name", "the name server answers within a second", "warn", "resolves to here"),),
    (
        Check("port", "network:port", SYSTEM, "warn", "the port of the rendezvous is free"),
        Check("network link", "fabric:link", SYSTEM, "warn", "speed, duplex and losses; NCCL_SOCKET_IFNAME"),
        Check("InfiniBand", "fabric:infiniband", SYSTEM, "warn", "ports, device files, locked memory"),
    ),
)
"""Each group is one child process, its checks run one after the other; all groups side by side."""

FULL: tuple[tuple[Check, ...], ...] = (
    (
        Check(
            "device speeds", "speed:device_speeds", "matrix products end", "fail", "matmul and memory of every device"
        ),
    ),
    (Check("link speeds", "speed:link_speeds", "copies end", "fail", "copies from and to the host, and between GPUs"),),
    (Check("all-reduce speed", "speed:allreduce_speed", "an all-reduce ends", "fail", "its bandwidth over all ranks"),),
)
"""What ``--full`` adds; one after the other, because they would slow each other."""

_TALK = "the other machine answers"
HOSTS: tuple[tuple[Check, ...], ...] = (
    (
        Check("name", "hosts:name", "the name server answers", "fail", "what HOST stands for"),
        Check("port", "hosts:port", _TALK, "fail", "open, refused, or dropped by a firewall; who listens"),
        Check("interface", "hosts:interface", _TALK, "fail", "which network leads there"),
        Check("MTU", "hosts:mtu", _TALK, "fail", "whether large packets pass"),
        Check("other ports", "hosts:other_ports", _TALK, "fail", "ports as gloo and NCCL pick them, both ways"),
        Check("versions", "hosts:versions", _TALK, "fail", "Evenload, Python, torch on both"),
        Check("clocks", "hosts:clocks", _TALK, "warn", "how far apart"),
        Check("same code", "hosts:code", _TALK, "fail", "the script of --script on both"),
        Check("same data", "hosts:data", _TALK, "fail", "the path of --data on both"),
        Check("round trip", "hosts:round_trip", _TALK, "fail", "there and back"),
        Check("bandwidth", "hosts:bandwidth", _TALK, "warn", "each way"),
    ),
)
"""With ``--host``. One child for all: they share one talk with the other machine."""


def chosen(names: Sequence[str], groups: tuple[tuple[Check, ...], ...]) -> tuple[tuple[Check, ...], ...]:
    """The groups with the named checks alone; all of them without names."""
    if not names:
        return groups
    kept = (tuple(check for check in group if check.name in names) for group in groups)
    return tuple(group for group in kept if group)


def every_name() -> tuple[str, ...]:
    """The names of all checks, those of ``--full`` last."""
    return tuple(check.name for groups in (GROUPS, FULL) for group in groups for check in group)
