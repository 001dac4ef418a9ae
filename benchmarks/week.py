"""A week of a queue that nobody looks after, in faked time.

Method: a real daemon with four CPU slots, real runners and programs; their clocks (CLOCK_BOOTTIME, wall clock, boot id) are
moved from one event to the next, and go at their true rate in between. Jobs arrive day and night: of minutes and of up to 16
hours, with one or two devices, some that fail, that are over their limit, that save, that can be started again. The daemon is
killed by SIGKILL once a day in a random hour; its runners start it again, or a service does. The disk of the queue is
full twice, for two hours; the second time the daemon is killed meanwhile. Once the machine starts anew, ten minutes later, and
its clock is three hours late for two hours. On the third day summer time ends; one recurring reservation begins within the
change. Each program notes when it began and ended.

Bars: no job lost (also: none ends in another state than it must), none run twice, none twice at once, each bill right to 1 s,
never more than one hour, the longest move (another) and a minute without a backup, each reservation at its time of day.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.report import rows

_DAYS = 7
_BILL_S = 1.0
_BACKUP_S = 2 * 3600.0 + 60.0


def measure(quick: bool) -> dict[str, Any]:
    """One run."""
    from tests.system.scheduler.week import run

    found = asdict(run(12 if quick else 24 * _DAYS, seed=5, rate=1.0))
    bills_s = found.pop("bills_off_s")
    found["bills_off_s"] = {"least": bills_s[0], "most": bills_s[-1], "median": bills_s[len(bills_s) // 2]}
    nothing = ("lost", "run_twice", "at_once", "reservations", "record", "left_behind")
    return {
        **found,
        "bars": {
            **{f"{name.replace('_', ' ')}: none": not found[name] for name in nothing},
            f"each bill is right to {_BILL_S:g} s": max(-bills_s[0], bills_s[-1]) <= _BILL_S,
            "a backup every hour": found["oldest_backup_s"] <= _BACKUP_S,
            "a reboot, two full disks, a kill a day": found["reboots"] >= 1
            and found["full_disks"] == 2
            and found["kills"] >= _DAYS,
        },
    }


def table(result: dict[str, Any]) -> str:
    """A fault, and its effect."""
    bills = result["bills_off_s"]
    lines = [
        ["jobs, attempts", f"{result['jobs']}, {result['attempts']}"],
        ["daemon killed, started by runners", f"{result['kills']}, {result['started_by_runners']}"],
        ["full disks, reboots, clock set", f"{result['full_disks']}, {result['reboots']}, {result['clocks_set']}"],
        ["lost, run twice, at once", ", ".join(str(len(result[n])) for n in ("lost", "run_twice", "at_once"))],
        ["bill less run time", f"{bills['least']:+.2f} to {bills['most']:+.2f} s, median {bills['median']:+.2f} s"],
        ["longest time without a backup", f"{result['oldest_backup_s'] / 60:.0f} min"],
        ["windows seen, wrong", f"{result['num_windows']}, {len(result['reservations'])}"],
    ]
    return rows(["", ""], lines)
