"""Each check, well and unwell: for real where this machine can be made so, else by what it would read."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from evenload.doctor.checks import cpu, network, packages, storage
from evenload.doctor.finding import Finding, Options
from tests.paths import ROOT
from tests.system.doctor.conftest import environment, in_child

GIB = 2**30


# packages


def test_packages_here_are_well() -> None:
    assert in_child("packages:packages").status == "ok"


def test_packages_missing(bare_python: Path) -> None:
    finding = in_child("packages:packages", python=bare_python)
    assert finding.status == "fail"
    assert all(f"no {name}" in finding.found for name in packages.REQUIRED)


def test_packages_too_old() -> None:
    found: dict[str, str | None] = {**packages.REQUIRED, "torch": "2.9.1+cu128", "rich": "13.6.9"}
    finding = packages.evaluate_packages("3.12.1", found)
    assert (finding.status, finding.found) == ("fail", "torch 2.9.1+cu128, rich 13.6.9")
    assert finding.fix == f"{sys.executable} -m pip install 'torch>=2.11' 'rich>=13.7'"
    assert packages.evaluate_packages("3.10.14", {}).found == "Python 3.10.14"
    assert packages.evaluate_packages("3.11.0", {**packages.REQUIRED, "torch": "2.11.0a0+git"}).status == "ok"


def test_required_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [f"{name}>={lowest}" for name, lowest in packages.REQUIRED.items()] == project["dependencies"]
    assert project["requires-python"] == f">={packages.PYTHON}"


# /dev/shm


def test_shared_memory_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    free_bytes = shutil.disk_usage(tmp_path).free
    expected = "ok" if free_bytes >= GIB else "warn" if free_bytes >= GIB // 8 else "fail"
    assert storage.shared_memory(Options(root=str(tmp_path))).status == expected


def test_shared_memory_missing(tmp_path: Path) -> None:
    finding = in_child("storage:shared_memory", root=str(tmp_path))
    assert finding.status == "fail"
    assert "mount -t tmpfs" in finding.fix


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("unshare"), reason="needs unshare to mount anew")
@pytest.mark.parametrize(("size", "status"), [("64m", "fail"), ("512m", "warn")])
def test_shared_memory_small_for_real(size: str, status: str) -> None:
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("this user may not mount in a namespace of their own")
    finding = in_child("/dev/shm", prefix=f"{mount} &&", shell=("unshare", "-rm", "sh"))
    assert finding.status == status
    assert "remount" in finding.fix or "--shm-size" in finding.fix


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("unshare"), reason="needs unshare to mount anew")
@pytest.mark.parametrize(
    ("options", "fill", "check", "status", "found"),
    [
        ("size=64m", "", "run folder", "fail", "0.1 GiB free"),
        ("size=64m", "head -c 64m /dev/zero > {0}/all", "run folder", "fail", "No space left on device (the disk"),
        ("size=64m,nr_inodes=2", "touch {0}/one", "run folder", "fail", "No space left on device"),
        ("ro,size=64m", "", "run folder", "fail", "Read-only file system"),
        ("noexec,size=2g", "", "temporary folder", "warn", "mounted with noexec"),
        ("size=64m", "", "temporary folder", "warn", "0.1 GiB free"),
    ],
)
def test_small_disks_for_real(options: str, fill: str, check: str, status: str, found: str) -> None:
    place = "/mnt"  # in a namespace of the child's own; the names of pytest's folders are too long for sockets
    mount = f"mount -t tmpfs -o {options} tmpfs {place}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("this user may not mount in a namespace of their own")
    prefix = f"{mount} && {fill.format(place) or 'true'} 2>/dev/null;"
    finding = in_child(check, prefix=prefix, shell=("unshare", "-rm", "sh"), folder=place, temporary=place)
    assert finding.status == status, finding
    assert found in finding.found


def test_shared_memory_sizes() -> None:
    def judge(total: int, free: int, is_container: bool = False) -> Finding:
        return storage.evaluate_shared_memory(total, free, is_container=is_container)

    assert judge(8 * GIB, 2 * GIB).status == "ok"
    assert "--shm-size" in judge(GIB // 16, GIB // 16, True).fix
    full = judge(8 * GIB, 0)
    assert full.status == "fail"
    assert full.fix.startswith("ls ")


# open files


def test_open_files() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = in_child("limits:open_files", prefix="ulimit -S -n 1024;" if soft >= 1024 else "")
    assert here.status == ("ok" if soft >= 1024 else "warn")
    few = in_child("limits:open_files", prefix="ulimit -S -n 128;")
    assert few.status == "fail"
    assert few.fix.startswith("ulimit -n ")
    some = in_child("limits:open_files", prefix="ulimit -n 512;")  # the hard limit too
    assert some.status == "warn"
    assert "limits.conf" in some.fix


def test_open_files_grow_with_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for index in range(8):
        (tmp_path / f"dev/nvidia{index}").touch()
    finding = in_child("limits:open_files", prefix="ulimit -S -n 1024;", root=str(tmp_path))
    assert finding.status == "warn"
    assert "8 ranks" in finding.expected


# cores


def test_cores_under_a_quota(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 x rw\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    finding = in_child("cpu:cores", root=str(tmp_path))
    assert finding.status == "warn"
    assert "0.5 cores" in finding.found
    assert finding.fix.startswith("taskset -c ")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert in_child("cpu:cores", root=str(tmp_path)).status == "ok"


def test_cores_findings() -> None:
    few = cpu.evaluate_cores((0, 1), num_cores=16, quota=None, num_gpus=2, model="X")
    assert (few.status, few.fix) == ("warn", "taskset -c 0-15 evenload run train.py")
    all_used = cpu.evaluate_cores((0, 1, 2, 3), num_cores=4, quota=None, num_gpus=4, model="X")
    assert (all_used.status, all_used.fix) == ("warn", "evenload run -d 0,1 train.py")
    assert cpu.evaluate_cores((0, 1), num_cores=2, quota=2.0, num_gpus=1, model="X").status == "ok"
    quota = cpu.evaluate_cores((4, 5, 6), num_cores=8, quota=2.5, num_gpus=0, model="X")
    assert quota.fix == "taskset -c 4,5 evenload run train.py"


# host name


def test_host_name_well() -> None:
    assert network.evaluate_host_name("localhost").status == "ok"
    assert in_child("network:host_name").status in ("ok", "warn")  # this machine's own business


def test_host_name_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    finding = network.evaluate_host_name("box9")
    assert finding.status == "warn"
    assert "does not resolve" in finding.found
    assert finding.fix.endswith(" box9' | sudo tee -a /etc/hosts")


def test_host_name_of_another_machine() -> None:
    finding = network.evaluate_host_name("203.0.113.7")  # an address kept for documentation: nobody has it
    assert finding.status == "warn"
    assert "which no interface of this machine has" in finding.found


def test_interface_named_to_gloo_that_is_not_there() -> None:
    finding = in_child("network:host_name", env=environment(GLOO_SOCKET_IFNAME="nosuch0"))
    assert (finding.status, finding.fix) == ("fail", "unset GLOO_SOCKET_IFNAME")


def test_host_name_without_psutil(bare_python: Path) -> None:
    assert "resolve" in in_child("network:host_name", python=bare_python).expected


# port


def test_port_in_use_and_free() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        finding = in_child("network:port", port=number)
        assert finding.status == "fail"
        if sys.platform == "linux":
            assert f"used by process {os.getpid()}" in finding.found
            assert finding.fix == f"kill {os.getpid()}"
    assert in_child("network:port", port=number).status == "ok"
    assert in_child("network:port").status == "ok"


def test_port_whose_holder_is_hidden(tmp_path: Path) -> None:
    assert network.port_owner(29500, tmp_path) is None
    row = "   0: 00000000:733C 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 77 1\n"
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/9/fd").mkdir(parents=True)
    (tmp_path / "proc/9/cmdline").write_text("python\0train.py\0")
    (tmp_path / "proc/9/fd/3").symlink_to("socket:[77]")
    (tmp_path / "proc/net/tcp").write_text("head\n" + row.format(state="0A"))
    assert network.port_owner(29500, tmp_path) == (9, "python train.py")
    assert network.port_owner(29501, tmp_path) is None
    (tmp_path / "proc/net/tcp").write_text("head\n" + row.format(state="01"))  # connected, not listening
    assert network.port_owner(29500, tmp_path) is None
