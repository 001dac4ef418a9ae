"""Unequal ranks on one machine, for tests: CPU ranks throttled to a fraction of their speed.

If control groups can be written, a rank's group has a CPU quota; otherwise the rank repeats part of its computation. It never
sleeps: a sleeping rank frees its core for the others and hides communication. The quota's period is 5 ms. With the usual
100 ms, steps of one second vary by 10 %; and work within a period is free until the quota is used up, so under a period of
20 ms a step of 20 ms would jump from 10 ms to 20 ms instead of growing with its samples.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evenload import hardware
from evenload.atomic_file import write_atomically
from evenload.errors import ConfigError, LaunchError
from evenload.training.launch.environment import WorkerSpec

PERIOD_US = 5_000
_LEAST_QUOTA_US = 1_000
"""The kernel's minimum; a rank with less has a longer period."""
_REQUEST = "throttle-request.json"
_APPLIED = "throttle.json"


def parse_throttle(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--throttle {text}: expected one speed for each rank, such as 1,0.5") from None


def check_factors(factors: Sequence[float], num_ranks: int) -> tuple[float, ...]:
    """Return the relative speeds; ConfigError unless there is one in (0, 1] for each rank."""
    spelled = ",".join(f"{factor:g}" for factor in factors)
    if len(factors) != num_ranks:
        raise ConfigError(
            f"--throttle {spelled}: {len(factors)} speeds for {num_ranks} ranks; give one for each rank, such as "
            f"{','.join(['1'] * num_ranks)}"
        )
    if not all(0 < factor <= 1 for factor in factors):
        raise ConfigError(f"--throttle {spelled}: a speed is more than 0 and at most 1, the rank's own full speed")
    return tuple(float(factor) for factor in factors)


class ThrottleController:
    """The supervisor's part: sets the speeds of the ranks, and changes them on request.

    ``num_cores[rank]`` is the number of the rank's own cores, a fraction where ranks share cores.
    """

    def __init__(
        self,
        launch_dir: Path,
        factors: Sequence[float],
        num_cores: Sequence[float],
        devices: Sequence[str],
        use_quota: bool = True,
    ) -> None:
        self._launch_dir = launch_dir
        self._num_cores = tuple(num_cores)
        self._quotas: CpuCgroups | None = None
        cpu_ranks = [rank for rank, device in enumerate(devices) if device == "cpu"]
        if use_quota and cpu_ranks:
            with suppress(OSError):
                self._quotas = CpuCgroups(cpu_ranks)
        self._factors: tuple[float, ...] = ()
        self._seen: tuple[int, int] | None = None
        try:
            self._apply(check_factors(factors, len(self._num_cores)), 0)
        except BaseException:
            self.close()
            raise

    def spec_of(self, rank: int) -> dict[str, Any]:
        means = "quota" if self._quotas is not None and rank in self._quotas.ranks else "compute"
        return {"factor": self._factors[rank], "means": means}

    def admit(self, rank: int, pid: int) -> None:
        """Move a worker's process into its control group, in which its children start too."""
        if self._quotas is not None and rank in self._quotas.ranks:
            self._quotas.admit(rank, pid)

    def poll(self) -> None:
        """Apply a change made by `request_speeds`."""
        path = self._launch_dir / _REQUEST
        try:
            stat = path.stat()
        except OSError:
            return
        if (stat.st_ino, stat.st_mtime_ns) == self._seen:
            return
        self._seen = (stat.st_ino, stat.st_mtime_ns)
        wanted = json.loads(path.read_text())
        self._apply(tuple(wanted["factors"]), wanted["number"])

    def close(self) -> None:
        if self._quotas is not None:
            self._quotas.remove()
            self._quotas = None

    def _apply(self, factors: tuple[float, ...], number: int) -> None:
        self._factors = factors
        if self._quotas is not None:
            for rank in self._quotas.ranks:
                own = self._num_cores[rank]
                # A rank at full speed on cores of its own needs no limit; one that shares its cores does.
                full = factors[rank] == 1 and own == int(own)
                try:
                    self._quotas.limit(rank, None if full else factors[rank] * own)
                except OSError as error:
                    # Seen where a group above has a quota of its own that this one would exceed.
                    if number:
                        raise LaunchError(f"the CPU quota of rank {rank} can't be changed: {error}") from error
                    self._quotas.remove()
                    self._quotas = None
                    break
        write_atomically(self._launch_dir / _APPLIED, json.dumps({"number": number, "factors": factors}))


def request_speeds(launch_dir: Path, factors: Sequence[float], timeout_s: float = 5.0) -> None:
    """Request other speeds from the supervisor of a throttled launch, and wait until they apply.

    ConfigError: the launch is not throttled, or the speeds are wrong. LaunchError: they did not apply in time.
    """
    try:
        applied = json.loads((launch_dir / _APPLIED).read_text())
    except OSError:
        raise ConfigError(
            f"the speeds of the launch in {launch_dir} can't be changed: it was started without `--throttle`; "
            f"start it with `--throttle 1,1` (one speed for each rank)"
        ) from None
    checked = check_factors(factors, len(applied["factors"]))
    number = time.monotonic_ns()
    write_atomically(launch_dir / _REQUEST, json.dumps({"number": number, "factors": checked}))
    deadline = time.monotonic() + timeout_s
    while json.loads((launch_dir / _APPLIED).read_text())["number"] < number:
        if time.monotonic() > deadline:
            raise LaunchError(f"the supervisor did not apply the speeds {list(checked)} in {timeout_s:g} s")
        time.sleep(0.002)


class ComputeThrottle:
    """A rank's part without a quota: after t seconds of computation at speed f it computes (1/f − 1)·t seconds more."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._rank = spec.local_rank  # a launch throttles the ranks of its own machine
        self._device = spec.device
        self.active = spec.throttle.get("means") == "compute"
        """True if this rank computes longer than it needs."""
        self._factor = float(spec.throttle.get("factor", 1.0))
        self._path = Path(spec.launch_dir) / _APPLIED
        self._seen: tuple[int, int] | None = None
        self._matrix: Any = None

    def slow_down(self, seconds: float) -> float:
        """Compute for the time that ``seconds`` of computation cost more at this rank's speed; return the seconds spent."""
        if not self.active:
            return 0.0
        self._reread()
        extra_s = (1.0 / self._factor - 1.0) * seconds
        if extra_s <= 0:
            return 0.0
        start = time.perf_counter()
        while time.perf_counter() - start < extra_s:
            self._compute()
        return time.perf_counter() - start

    def _compute(self) -> None:
        import torch

        if self._matrix is None:
            device = torch.device("cpu" if self._device == "auto" else self._device)
            self._matrix = torch.full((192, 192), 1 / 192, device=device)
        with torch.inference_mode():
            torch.mm(self._matrix, self._matrix)
        if self._matrix.is_cuda:
            torch.cuda.synchronize(self._matrix.device)

    def _reread(self) -> None:
        try:
            stat = self._path.stat()
        except OSError:
            return
        if (stat.st_ino, stat.st_mtime_ns) != self._seen:
            self._seen = (stat.st_ino, stat.st_mtime_ns)
            self._factor = json.loads(self._path.read_text())["factors"][self._rank]


class CpuCgroups:
    """One control group for each rank below this process's own, of the version (1 or 2) with the CPU controller.

    A quota of this process itself stays in force. OSError: groups can't be created.
    """

    def __init__(self, ranks: Sequence[int], period_us: int = PERIOD_US) -> None:
        self.ranks = tuple(ranks)
        self._period_us = period_us
        above, self._version = find_cpu_group()
        _sweep(above)
        self._folder = _make_folder(above)
        try:
            if self._version == 2:
                (self._folder / "cgroup.subtree_control").write_text("+cpu")
            for rank in self.ranks:
                self._of(rank).mkdir()
                self.limit(rank, None)
        except OSError:
            self.remove()
            raise

    def admit(self, rank: int, pid: int) -> None:
        (self._of(rank) / "cgroup.procs").write_text(str(pid))

    def limit(self, rank: int, num_cores: float | None) -> None:
        """Limit the rank to ``num_cores`` cores; None removes the limit."""
        group = self._of(rank)
        period_us, quota_us = self._period_us, -1
        if num_cores is not None:
            period_us = min(1_000_000, max(self._period_us, round(_LEAST_QUOTA_US / num_cores)))
            quota_us = max(_LEAST_QUOTA_US, round(num_cores * period_us))
        if self._version == 2:
            (group / "cpu.max").write_text(f"{'max' if quota_us < 0 else quota_us} {period_us}")
            return
        # Lifted first: a quota that fits the new period may exceed what the old one allows.
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))

    def remove(self) -> None:
        """Remove the groups; processes that have just ended may keep them for a moment."""
        _remove(self._folder, wait_s=1.0)

    def _of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}"


def find_cpu_group(root: Path = hardware.ROOT) -> tuple[Path, int]:
    """Return the folder of this process's cgroup with the CPU controller, and its version; else FileNotFoundError."""
    for folder, _, version in hardware.own_cgroups("cpu", root):
        controllers = folder / "cgroup.subtree_control"
        if version == 1 or (controllers.exists() and "cpu" in controllers.read_text().split()):
            return folder, version
    raise FileNotFoundError("no control group with the CPU controller is mounted here")


def _make_folder(above: Path) -> Path:
    for number in itertools.count():
        folder = above / (f"evenload-{os.getpid()}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _sweep(above: Path) -> None:
    """Remove groups of supervisors that were killed."""
    for folder in above.glob("evenload-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _remove(folder, wait_s=0.0)


def _remove(folder: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        for group in folder.glob("rank-*"):
            with suppress(OSError):
                group.rmdir()
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.01)
        else:
            return
