"""Does the CPU run as fast as it can: governor, frequency limits, quotas that stop it, heat?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload import hardware
from evenload.doctor import files
from evenload.doctor.finding import Finding, Options

GOVERNOR, THROTTLING = "CPU governor", "CPU throttling"
OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose ``powersave`` raises the frequency under load; with the others it stays at the lowest."""
LOW_FREQUENCY_FRACTION = 0.9
STOPPED_FRACTION = 0.05
"""Of the periods in which the quota was used up; more, and every step waits for it."""
HOT_FRACTION = 0.01
"""Of the time since the start that heat has slowed the CPU."""


@dataclass(frozen=True)
class CoreFrequency:
    """How one core's frequency is governed; empty or None where the system doesn't tell."""

    core: int
    driver: str
    governor: str
    preference: str
    """``power`` ... ``performance``, for drivers that govern themselves."""
    limit_khz: int | None
    possible_khz: int | None


def governor(options: Options) -> Finding:
    """Reads cpufreq of the cores this process may use."""
    cores = [_read_core(options.root_path, core) for core in hardware.usable_cores()]
    return judge_governor([core for core in cores if core.governor or core.limit_khz])


def judge_governor(cores: Sequence[CoreFrequency]) -> Finding:
    """What governors and limits mean."""
    if not cores:
        return Finding(GOVERNOR, "skip", "the system doesn't tell how frequencies are governed (a virtual machine?)")
    everywhere = "/sys/devices/system/cpu/cpu*/cpufreq"
    saving = [
        core
        for core in cores
        if core.governor == "conservative" or (core.governor == "powersave" and core.driver not in OWN_GOVERNORS)
    ]
    if saving:
        found = f"{_count(saving, cores)} under the governor {saving[0].governor} ({saving[0].driver})"
        mend = f"echo performance | sudo tee {everywhere}/scaling_governor"
        return Finding(GOVERNOR, "warn", found, "a governor that follows the load: performance or schedutil", mend)
    thrifty = [core for core in cores if core.preference == "power"]
    if thrifty:
        found = f"{_count(thrifty, cores)} told to prefer power over speed"
        mend = f"echo performance | sudo tee {everywhere}/energy_performance_preference"
        return Finding(GOVERNOR, "warn", found, "the preference performance, or balance_performance", mend)
    limited = [
        core
        for core in cores
        if core.limit_khz and core.possible_khz and core.limit_khz < LOW_FREQUENCY_FRACTION * core.possible_khz
    ]
    if limited:
        low, high = limited[0].limit_khz or 0, limited[0].possible_khz or 0
        found = f"{_count(limited, cores)} limited to {low / 1e6:.1f} of {high / 1e6:.1f} GHz"
        mend = f"echo {high} | sudo tee {everywhere}/scaling_max_freq"
        return Finding(GOVERNOR, "warn", found, "no limit below what the CPU can do", mend)
    return Finding(GOVERNOR, "ok", f"{cores[0].governor or 'no governor'} ({cores[0].driver or 'driver unknown'})")


def throttling(options: Options) -> Finding:
    """Reads what stopped this process's control groups, and how long heat has slowed the CPU."""
    root = options.root_path
    stops = {
        str(folder): files.table(folder / "cpu.stat")
        for folder in hardware.cgroup_folders("cpu", root)
        if (folder / "cpu.stat").exists()
    }
    hot_ms = max(
        (
            files.number(folder / "package_throttle_total_time_ms") or 0
            for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle")
        ),
        default=0,
    )
    uptime = files.text(root / "proc/uptime").split()
    return judge_throttling(stops, hot_s=hot_ms / 1000, up_s=float(uptime[0]) if uptime else 0.0)


def judge_throttling(stops: Mapping[str, Mapping[str, int]], *, hot_s: float, up_s: float) -> Finding:
    """What the counters mean.

    Args:
        stops: for each control group that holds this process, its ``cpu.stat``.
        hot_s: seconds since the start in which heat slowed the CPU.
        up_s: seconds since the start.
    """
    for folder, counts in stops.items():
        periods, stopped = counts.get("nr_periods", 0), counts.get("nr_throttled", 0)
        if periods and stopped / periods > STOPPED_FRACTION:
            found = f"the CPU quota stopped this process's group in {stopped / periods:.0%} of {periods} periods"
            is_v1 = "throttled_time" in counts
            more = f"echo -1 | sudo tee {folder}/cpu.cfs_quota_us" if is_v1 else f"echo max | sudo tee {folder}/cpu.max"
            expected = f"less than {STOPPED_FRACTION:.0%}: a quota that is larger than what runs in it"
            return Finding(
                THROTTLING, "warn", found, expected, f"{more}   # in a container: docker update --cpus N NAME"
            )
    if up_s > 0 and hot_s / up_s > HOT_FRACTION:
        found = f"heat slowed the CPU for {hot_s:.0f} s, {hot_s / up_s:.0%} of the time since the start"
        return Finding(
            THROTTLING, "warn", found, "no slowdown by heat", "sensors   # then: fans, dust, air in the case"
        )
    return Finding(THROTTLING, "ok", "neither a quota nor heat has stopped it")


def _read_core(root: Path, core: int) -> CoreFrequency:
    folder = root / f"sys/devices/system/cpu/cpu{core}/cpufreq"
    return CoreFrequency(
        core,
        driver=files.text(folder / "scaling_driver"),
        governor=files.text(folder / "scaling_governor"),
        preference=files.text(folder / "energy_performance_preference"),
        limit_khz=files.number(folder / "scaling_max_freq"),
        possible_khz=files.number(folder / "cpuinfo_max_freq"),
    )


def _count(some: Sequence[CoreFrequency], all_: Sequence[CoreFrequency]) -> str:
    return f"{len(some)} of {len(all_)} cores"
