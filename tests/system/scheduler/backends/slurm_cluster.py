"""A real Slurm of several nodes on this host, in a temp folder: munged, slurmctld and a slurmd a node, as any user.

`slurm` starts one for a file of tests; those that need it are skipped, with the reason, where Slurm's programs are missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from evenload.hardware import free_port

NODES = ("n1", "n2", "n3")
CPUS = 2
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_START_S = 60.0


def wait_until(is_so: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.1)


@dataclass
class SlurmCluster:
    """The cluster while it runs."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self.conf)}

    def tool(self, *words: str, stdin: str = "") -> str:
        done = subprocess.run(
            words, env=self.environment(), input=stdin, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def start(self) -> None:
        write_configuration(self.folder)
        key = self.folder / "munge.key"
        subprocess.run(["mungekey", "--create", "--keyfile", str(key)], env=self.environment(), check=True, timeout=30)
        names = {name: str(self.folder / f"munge.{name}") for name in ("sock", "pid", "log", "seed")}
        self._run(
            "munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}", f"--socket={names['sock']}",
            f"--pid-file={names['pid']}", f"--log-file={names['log']}", f"--seed-file={names['seed']}",
        )  # fmt: skip
        wait_until(Path(names["sock"]).exists, "munged's socket")
        self._run("slurmctld", "-D", "-f", str(self.conf))
        for node in NODES:
            self._run("slurmd", "-D", "-N", node, "-f", str(self.conf))
        wait_until(
            lambda: self.tool("sinfo", "-h", "-o", "%D %T").strip() == f"{len(NODES)} idle", self.told(), _START_S
        )

    def told(self) -> str:
        return f"all nodes idle; {self.folder}"

    def logs(self) -> str:
        """The end of each daemon's log, for a failed test."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def clear(self) -> None:
        """Ends all jobs, so that the next test has the nodes to itself."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.tool("scancel", "--full", "--signal=KILL", "--state=RUNNING", f"--user={os.getuid()}")
            self.tool("scancel", f"--user={os.getuid()}")
            wait_until(lambda: not self.tool("squeue", "-h").strip(), "an empty queue")

    def stop(self) -> None:
        self.clear()
        below = [child for process in self.processes for child in _below(process.pid)]
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self.processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # What a slurmd started has left it (slurmstepd makes itself a daemon): found by the folder it names.
        for process in psutil.process_iter(["pid", "environ"]):
            if (process.info["environ"] or {}).get("SLURM_CONF") == str(self.conf) and process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *words: str) -> None:
        with (self.folder / f"{words[0]}-{len(self.processes)}.out").open("wb") as out:
            self.processes.append(
                subprocess.Popen(words, env=self.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def write_configuration(folder: Path) -> None:
    control, *ports = (free_port("127.0.0.1") for _ in range(1 + len(NODES)))
    host = socket.gethostname()
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} State=UNKNOWN"
        for node, port in zip(NODES, ports, strict=True)
    )
    folder.chmod(0o755)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(
        f"""\
ClusterName=evenload
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
MinJobAge=300
ReturnToService=2
{nodes}
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 MaxTime=INFINITE
PartitionName=high Nodes=ALL State=UP PriorityTier=10 MaxTime=INFINITE
"""
    )
    # Nothing here uses cgroups, but a slurmd loads a plugin for them; versions up to 22.05 know no "disabled".
    version = subprocess.run(
        ["slurmctld", "-V"], env={"PATH": _PATH}, capture_output=True, text=True, check=True
    ).stdout
    is_old = [int(part) for part in version.split()[-1].split(".")[:2]] <= [22, 5]
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={'cgroup/v1' if is_old else 'disabled'}\n")


@pytest.fixture(scope="module")
def slurm_of_file() -> Iterator[SlurmCluster]:
    missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        pytest.skip(f"needs Slurm; there is no {', '.join(missing)} here (Debian's packages slurm-wlm and munge)")
    cluster = SlurmCluster(Path(tempfile.mkdtemp(prefix="el-slurm-")))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(slurm_of_file: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The file's cluster, with this process's commands going there, and no jobs in it before and after."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_of_file.conf))
    yield slurm_of_file
    slurm_of_file.clear()


@pytest.fixture(scope="module")
def srun_here(request: pytest.FixtureRequest) -> str | None:
    """For tests that need no more than srun: this machine's own Slurm where it has one, else one of this file of tests.

    SLURM_CONF for it; None where the commands find it by themselves.
    """
    if shutil.which("scontrol") is not None:
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=60, check=False)
        if "UP" in ping.stdout:
            return os.environ.get("SLURM_CONF")
    cluster: SlurmCluster = request.getfixturevalue("slurm_of_file")
    return str(cluster.conf)
