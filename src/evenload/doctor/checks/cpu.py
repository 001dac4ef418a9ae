"""Checks of the CPU: cores and quota, frequency governor and limits, throttling."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from evenload import hardware
from evenload.doctor import system_files
from evenload.doctor.finding import Finding, Options, ok, skip, warn

CORES_PER_GPU = 2
SELF_GOVERNED = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose ``powersave`` raises the frequency under load; with others it stays at the lowest."""
LOW_FREQUENCY_FRACTION = 0.9
THROTTLED_FRACTION = 0.05
"""Of the periods of a quota; with more, every step waits for the next period."""
HOT_FRACTION = 0.01
"""Of the time since the start in which heat slowed the CPU."""


def cores(options: Options) -> Finding:
    root = options.root_path
    return evaluate_cores(
        hardware.usable_cores(),
        num_cores=os.cpu_count() or 1,
        quota=hardware.cpu_quota(root),
        num_gpus=system_files.num_gpu_files(root),
        model=hardware.cpu_model(root),
    )


def evaluate_cores(
    usable: tuple[int, ...], *, num_cores: int, quota: float | None, num_gpus: int, model: str
) -> Finding:
    """Evaluate cores and quota: threads beyond a quota stall, and a GPU with too few cores waits for data."""
    found = f"{len(usable)} of {num_cores} cores ({model})"
    if quota is not None and quota < len(usable):
        whole = max(1, math.floor(quota))
        fix = shlex.join(["taskset", "-c", ",".join(map(str, usable[:whole])), "evenload", "run", "train.py"])
        return warn(f"{found}, but a quota of {quota:g} cores", f"no more cores than the quota: {whole}", fix)
    found += "" if quota is None else f", a quota of {quota:g} cores"
    expected = f"at least {CORES_PER_GPU} cores for each of {num_gpus} GPUs" if num_gpus else "at least 1 core"
    if len(usable) >= CORES_PER_GPU * num_gpus:
        return ok(found, expected)
    if len(usable) < num_cores:
        return warn(found, expected, f"taskset -c 0-{num_cores - 1} evenload run train.py")
    gpus = ",".join(map(str, range(max(1, len(usable) // CORES_PER_GPU))))
    return warn(found, expected, f"evenload run -d {gpus} train.py")


@dataclass(frozen=True)
class CoreFrequency:
    """Frequency settings of one core; empty or None if unknown."""

    driver: str
    governor: str
    preference: str
    """``power`` ... ``performance``, for drivers that control the frequency themselves."""
    limit_khz: int
    max_khz: int


def governor(options: Options) -> Finding:
    cores = [_read_core(options.root_path, core) for core in hardware.usable_cores()]
    cores = [core for core in cores if core.governor or core.limit_khz]
    if not cores:
        return skip("the frequency settings are not visible (a virtual machine?)")
    folder = "/sys/devices/system/cpu/cpu*/cpufreq"

    def count(some: list[CoreFrequency]) -> str:
        return f"{len(some)} of {len(cores)} cores"

    saving = [
        core
        for core in cores
        if core.governor == "conservative" or (core.governor == "powersave" and core.driver not in SELF_GOVERNED)
    ]
    if saving:
        found = f"{count(saving)} use the governor {saving[0].governor} ({saving[0].driver})"
        fix = f"echo performance | sudo tee {folder}/scaling_governor"
        return warn(found, "a governor that follows the load: performance or schedutil", fix)
    thrifty = [core for core in cores if core.preference == "power"]
    if thrifty:
        fix = f"echo performance | sudo tee {folder}/energy_performance_preference"
        return warn(
            f"{count(thrifty)} prefer power over speed", "the preference performance or balance_performance", fix
        )
    limited = [core for core in cores if 0 < core.limit_khz < LOW_FREQUENCY_FRACTION * core.max_khz]
    if limited:
        low, high = limited[0].limit_khz, limited[0].max_khz
        fix = f"echo {high} | sudo tee {folder}/scaling_max_freq"
        found = f"{count(limited)} are limited to {low / 1e6:.1f} of {high / 1e6:.1f} GHz"
        return warn(found, "no limit below the maximum of the CPU", fix)
    return ok(f"{cores[0].governor or 'no governor'} ({cores[0].driver or 'unknown driver'})")


def throttling(options: Options) -> Finding:
    root = options.root_path
    for folder in hardware.cgroup_folders("cpu", root):
        counts = system_files.table(folder / "cpu.stat")
        periods, throttled = counts.get("nr_periods", 0), counts.get("nr_throttled", 0)
        if periods and throttled / periods > THROTTLED_FRACTION:
            found = f"the CPU quota throttled this process's cgroup in {throttled / periods:.0%} of {periods} periods"
            is_v1 = "throttled_time" in counts
            fix = f"echo -1 | sudo tee {folder}/cpu.cfs_quota_us" if is_v1 else f"echo max | sudo tee {folder}/cpu.max"
            expected = f"less than {THROTTLED_FRACTION:.0%}: a quota that suffices for the processes in it"
            return warn(found, expected, f"{fix}   # in a container: docker update --cpus N NAME")
    throttles = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/package_throttle_total_time_ms")
    hot_s = max((system_files.number(path) or 0 for path in throttles), default=0) / 1000
    uptime = system_files.text(root / "proc/uptime").split()
    up_s = float(uptime[0]) if uptime else 0.0
    if up_s > 0 and hot_s / up_s > HOT_FRACTION:
        found = f"heat slowed the CPU for {hot_s:.0f} s, {hot_s / up_s:.0%} of the time since the start"
        return warn(found, "no slowdown by heat", "sensors   # then check: fans, dust, air in the case")
    return ok("no throttling by a quota or by heat")


def _read_core(root: Path, core: int) -> CoreFrequency:
    folder = root / f"sys/devices/system/cpu/cpu{core}/cpufreq"
    return CoreFrequency(
        driver=system_files.text(folder / "scaling_driver"),
        governor=system_files.text(folder / "scaling_governor"),
        preference=system_files.text(folder / "energy_performance_preference"),
        limit_khz=system_files.number(folder / "scaling_max_freq") or 0,
        max_khz=system_files.number(folder / "cpuinfo_max_freq") or 0,
    )
