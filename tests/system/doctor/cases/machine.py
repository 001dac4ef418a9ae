"""The PCI bus, NUMA, the CPU, memory, limits and folders: by files that stand in, or really."""

from __future__ import annotations

import resource
import struct

from evenload.doctor.finding import Finding
from tests.system.doctor.cases.registry import unwell, well
from tests.system.doctor.conftest import Machine, in_child
from tests.system.doctor.nvml import GIB


def two_gpus(machine: Machine, kind: str = "", control: int | None = None, node: tuple[int, int] = (0, 0)) -> None:
    """Two GPUs, each below a bridge of its own: how the IOMMU treats them, ACS's control word of the first bridge."""
    for index in (1, 2):
        bridge, gpu = f"0000:00:0{index}.0", f"0000:0{index}:00.0"
        home = f"sys/devices/pci0000:00/{bridge}/{gpu}"
        files = {"vendor": "0x10de\n", "class": "0x030200\n", "numa_node": f"{node[index - 1]}\n"}
        machine.write({f"{home}/{name}": text for name, text in files.items()})
        machine.write({f"sys/devices/pci0000:00/{bridge}/class": "0x060400\n"})
        machine.link(f"sys/bus/pci/devices/{gpu}", home)
        machine.link(f"sys/bus/pci/devices/{bridge}", f"sys/devices/pci0000:00/{bridge}")
        if kind:
            machine.write({f"sys/kernel/iommu_groups/{index}/type": f"{kind}\n"})
            machine.link(f"{home}/iommu_group", f"sys/kernel/iommu_groups/{index}")
    if control is not None:
        space = bytearray(4096)
        struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)  # another capability, then this one
        struct.pack_into("<I", space, 0x140, 0x000D | 1 << 16)
        struct.pack_into("<H", space, 0x146, control)
        (machine.root / "sys/devices/pci0000:00/0000:00:01.0/config").write_bytes(space)


@unwell("IOMMU and ACS", "warn", "an IOMMU translates the copies of 0000:01:00.0, 0000:02:00.0", "iommu=pt")
def translated(machine: Machine) -> Finding:
    two_gpus(machine, kind="DMA-FQ")
    machine.write({"proc/cmdline": "quiet intel_iommu=on\n"})
    return machine.look("IOMMU and ACS")


@unwell("IOMMU and ACS", "warn", "(ACS) of 0000:00:01.0", "sudo setpci -s 0000:00:01.0 ECAP_ACS+6.w=0000")
def redirected(machine: Machine) -> Finding:
    two_gpus(machine, control=0x001D)
    return machine.look("IOMMU and ACS")


@well("IOMMU and ACS")
def straight(machine: Machine) -> Finding:
    two_gpus(machine, control=0x0001)
    return machine.look("IOMMU and ACS")


@well("IOMMU and ACS")
def passed_through(machine: Machine) -> Finding:
    two_gpus(machine, kind="identity")
    return machine.look("IOMMU and ACS")


NODES = {"sys/devices/system/node/node0/cpulist": "0-3\n", "sys/devices/system/node/node1/cpulist": "4-7\n"}


@unwell(
    "NUMA", "warn", "GPU 0000:02:00.0 is on node 1, but this process may only use cores of node 0", "taskset -c 0-7"
)
def far_gpu(machine: Machine) -> Finding:
    two_gpus(machine, node=(0, 1))
    machine.write(NODES)
    machine.cores(0, 1, 2, 3)
    return machine.look("NUMA")


@unwell("NUMA", "warn", "ib0 is on node 1", "taskset -c 0-7")
def far_card(machine: Machine) -> Finding:
    machine.write({**NODES, "sys/class/net/ib0/device/numa_node": "1\n", "sys/class/net/lo/operstate": "up\n"})
    machine.cores(2, 3)
    return machine.look("NUMA")


@unwell("NUMA", "warn", "cores of node 0-1, but only memory of node 0", "--cpuset-mems 0-1")
def far_memory(machine: Machine) -> Finding:
    machine.write({**NODES, "proc/self/status": "Name:\tpython\nMems_allowed_list:\t0\n"})
    machine.cores(3, 4)
    return machine.look("NUMA")


@well("NUMA")
def near(machine: Machine) -> Finding:
    two_gpus(machine, node=(0, 1))
    machine.write({**NODES, "proc/self/status": "Mems_allowed_list:\t0-1\n"})
    machine.cores(0, 4)
    return machine.look("NUMA")


@well("NUMA")
def one_node(machine: Machine) -> Finding:
    return machine.look("NUMA", root="/")


# The CPU, memory and limits


@unwell("CPU cores", "warn", "a quota of 0.5 cores", "taskset -c ")
def under_a_quota(machine: Machine) -> Finding:
    machine.write(cgroup2("cpu.max", "50000 100000\n"))
    return machine.look("CPU cores")


@well("CPU cores")
def all_cores(machine: Machine) -> Finding:
    return machine.look("CPU cores")


def cgroup2(name: str, text: str, **more: str) -> dict[str, str]:
    """A control group of version 2 that holds this process."""
    files = {name: text, **more}
    return {
        "proc/self/mountinfo": "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 x rw\n",
        "proc/self/cgroup": "0::/job\n",
        **{f"sys/fs/cgroup/job/{file}": text for file, text in files.items()},
    }


def frequency(core: int, **files: str) -> dict[str, str]:
    usual = {
        "scaling_driver": "acpi-cpufreq",
        "scaling_governor": "schedutil",
        "scaling_max_freq": "4000000",
        "cpuinfo_max_freq": "4000000",
    }
    return {
        f"sys/devices/system/cpu/cpu{core}/cpufreq/{name}": f"{text}\n" for name, text in {**usual, **files}.items()
    }


@unwell("CPU governor", "warn", "1 of 2 cores use the governor powersave (acpi-cpufreq)", "echo performance | sudo tee")
def powersave(machine: Machine) -> Finding:
    machine.write({**frequency(0), **frequency(1, scaling_governor="powersave")})
    machine.cores(0, 1)
    return machine.look("CPU governor")


@unwell("CPU governor", "warn", "prefer power over speed", "energy_performance_preference")
def thrifty(machine: Machine) -> Finding:
    pstate = {
        "scaling_driver": "intel_pstate",
        "scaling_governor": "powersave",
        "energy_performance_preference": "power",
    }
    machine.write(frequency(0, **pstate))
    machine.cores(0)
    return machine.look("CPU governor")


@unwell("CPU governor", "warn", "limited to 2.0 of 4.0 GHz", "echo 4000000 | sudo tee")
def slow_on_purpose(machine: Machine) -> Finding:
    machine.write(frequency(0, scaling_max_freq="2000000"))
    machine.cores(0)
    return machine.look("CPU governor")


@well("CPU governor")
def pstate(machine: Machine) -> Finding:
    machine.write(frequency(0, scaling_driver="intel_pstate", scaling_governor="powersave"))
    machine.cores(0)
    return machine.look("CPU governor")


@unwell("CPU throttling", "warn", "in 40% of 1000 periods", "echo max | sudo tee")
def stopped_by_quota(machine: Machine) -> Finding:
    machine.write(cgroup2("cpu.stat", "usage_usec 9\nnr_periods 1000\nnr_throttled 400\nthrottled_usec 7\n"))
    return machine.look("CPU throttling")


@unwell("CPU throttling", "warn", "in 25% of 80 periods", "cpu.cfs_quota_us")
def stopped_by_an_old_quota(machine: Machine) -> Finding:
    machine.write(
        {
            "proc/self/mountinfo": "1 1 0:1 / /sys/fs/cgroup/cpu rw - cgroup x rw,cpu\n",
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.stat": "nr_periods 80\nnr_throttled 20\nthrottled_time 5\n",
        }
    )
    return machine.look("CPU throttling")


@unwell("CPU throttling", "warn", "heat slowed the CPU for 50 s", "sensors")
def hot_cpu(machine: Machine) -> Finding:
    machine.write(
        {
            "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_total_time_ms": "50000\n",
            "proc/uptime": "1000.00 900.00\n",
        }
    )
    return machine.look("CPU throttling")


@well("CPU throttling")
def never_stopped(machine: Machine) -> Finding:
    machine.write({**cgroup2("cpu.stat", "nr_periods 1000\nnr_throttled 3\n"), "proc/uptime": "9.0 1.0\n"})
    return machine.look("CPU throttling")


def meminfo(total_gib: float, available_gib: float, swap_gib: float = 0, swap_free_gib: float = 0) -> dict[str, str]:
    values = {"MemTotal": total_gib, "MemAvailable": available_gib, "SwapTotal": swap_gib, "SwapFree": swap_free_gib}
    return {"proc/meminfo": "".join(f"{name}:   {int(gib * 2**20)} kB\n" for name, gib in values.items())}


@unwell("memory", "fail", "0.5 GiB free of the machine's 64.0 GiB", "ps -eo pid,user,rss,args")
def none_left(machine: Machine) -> Finding:
    machine.write(meminfo(64, 0.5))
    return machine.look("memory")


@unwell("memory", "warn", "2.0 GiB free of the cgroup's 4.0 GiB", "job/memory.max")
def small_group(machine: Machine) -> Finding:
    machine.write(meminfo(64, 60))
    used = {"memory.current": f"{3 * GIB}\n", "memory.stat": f"anon 5\ninactive_file {GIB}\n"}
    machine.write(cgroup2("memory.max", f"{4 * GIB}\n", **used))
    return machine.look("memory")


@unwell("memory", "warn", "the OOM killer ended 2 processes of this cgroup", "ps -eo")
def killed(machine: Machine) -> Finding:
    machine.write({**meminfo(64, 60), **cgroup2("memory.events", "low 0\noom 3\noom_kill 2\n")})
    return machine.look("memory")


@well("memory")
def plenty(machine: Machine) -> Finding:
    machine.write({**meminfo(64, 60), **cgroup2("memory.max", "max\n", **{"memory.current": "5\n"})})
    return machine.look("memory")


@unwell("memory pressure", "warn", "12.0 GiB in swap, 38% of the memory", "sudo swapoff -a && sudo swapon -a")
def swapped(machine: Machine) -> Finding:
    machine.write(meminfo(32, 8, swap_gib=16, swap_free_gib=4))
    return machine.look("memory pressure")


@unwell("memory pressure", "warn", "in 31 % of the last minute", "ps -eo")
def pressed(machine: Machine) -> Finding:
    machine.write(meminfo(32, 8))
    machine.write({"proc/pressure/memory": "some avg10=9.00 avg60=31.20 avg300=1.00 total=5\nfull avg10=0.00\n"})
    return machine.look("memory pressure")


@well("memory pressure")
def at_ease(machine: Machine) -> Finding:
    machine.write(meminfo(32, 8, swap_gib=16, swap_free_gib=15))
    machine.write({"proc/pressure/memory": "some avg10=0.00 avg60=0.10 avg300=0.00 total=5\n"})
    return machine.look("memory pressure")


@unwell("/dev/shm", "fail", "/dev/shm is not readable", "docker run --shm-size=8g")
def no_shared_memory(machine: Machine) -> Finding:
    machine.write({".dockerenv": ""})
    return machine.look("/dev/shm")


@well("/dev/shm")
def shared_memory(machine: Machine) -> Finding:
    machine.link("dev/shm", ".")
    return machine.look("/dev/shm")


@unwell("open files", "fail", "ulimit -n is 128", "ulimit -n ")
def few_files(machine: Machine) -> Finding:
    return in_child("open files", prefix="ulimit -S -n 128;")


@well("open files")
def many_files(machine: Machine) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    try:
        return machine.look("open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@unwell("processes", "fail", "the cgroup allows 20 more", "job/pids.max")
def few_processes(machine: Machine) -> Finding:
    machine.write(cgroup2("pids.max", "100\n", **{"pids.current": "80\n"}))
    return machine.look("processes")


@unwell("processes", "warn", "ulimit -u is 400, and this user has 150", "ulimit -u 9000")
def few_processes_of_a_user(machine: Machine) -> Finding:
    from evenload.doctor.checks.limits import evaluate_processes

    return evaluate_processes(400, 9000, num_own=150, cgroup_left=float("inf"), cgroup="", num_ranks=2, is_root=False)


@well("processes")
def enough_processes(machine: Machine) -> Finding:
    machine.write(cgroup2("pids.max", "max\n", **{"pids.current": "80\n"}))
    machine.monkeypatch.setattr("os.geteuid", lambda: 0)
    return machine.look("processes")


# Folders


def with_room(machine: Machine) -> None:
    """As if every disk had room enough."""
    for name in ("SLOWS_BYTES", "STOPS_BYTES", "TEMPORARY_SLOWS_BYTES"):
        machine.monkeypatch.setattr(f"evenload.doctor.checks.storage.{name}", 0)


def with_mounts(machine: Machine, table: str) -> None:
    """As if psutil read this table as /proc/self/mounts."""
    machine.write({"proc/self/mounts": table})
    machine.monkeypatch.setattr("psutil.PROCFS_PATH", str(machine.root / "proc"))


@unwell("run folder", "fail", "is a file", "evenload run --project-dir")
def in_the_way(machine: Machine) -> Finding:
    machine.write({"work/runs": "in the way"})
    return machine.look("run folder", folder=str(machine.root / "work/runs/first"))


@unwell("run folder", "warn", ", nfs4", "--project-dir /var/tmp")
def far_away(machine: Machine) -> Finding:
    with_room(machine)
    machine.write({"home/x": ""})
    with_mounts(machine, f"server:/home {machine.root}/home nfs4 rw 0 0\n")
    return machine.look("run folder", folder=str(machine.root / "home/runs"))


@unwell("run folder", "warn", ", tmpfs", "--project-dir")
def in_memory(machine: Machine) -> Finding:
    with_room(machine)
    with_mounts(machine, f"x / ext4 rw 0 0\nx {machine.root} tmpfs rw 0 0\n")
    return machine.look("run folder", folder=str(machine.root / "runs"))


@well("run folder")
def a_disk(machine: Machine) -> Finding:
    with_room(machine)
    with_mounts(machine, f"x / tmpfs rw 0 0\nx {machine.root} ext4 rw 0 0\n")
    return machine.look("run folder", folder=str(machine.root / "runs"))


@unwell("temporary folder", "fail", "characters", "export TMPDIR=")
def long_name(machine: Machine) -> Finding:
    folder = machine.root / ("deep/" * 12)
    folder.mkdir(parents=True)
    return machine.look("temporary folder", temporary=str(folder))


@unwell("temporary folder", "fail", "is a file", "export TMPDIR=")
def no_folder(machine: Machine) -> Finding:
    machine.write({"tmp": ""})
    return machine.look("temporary folder", temporary=str(machine.root / "tmp"))


@well("temporary folder")
def usual_one(machine: Machine) -> Finding:
    with_room(machine)
    return machine.look("temporary folder", temporary="/tmp")
