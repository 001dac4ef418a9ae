"""Does the system's clock follow true time?"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path

import evenload
from evenload.doctor.finding import Finding, Options

NAME = "clock"
UNSYNCHRONISED, TIME_ERROR = 0x40, 5
"""STA_UNSYNC, and the state that adjtimex returns with it: https://man7.org/linux/man-pages/man2/adjtimex.2.html"""
FAR_S = 1.0
SLACK_S = 86400.0
"""A clock may be this much behind the newest file of Evenload: zones, copied files."""
MEND = "sudo timedatectl set-ntp true   # without systemd: sudo apt-get install -y chrony"


@dataclass(frozen=True)
class ClockState:
    """What the kernel says of its clock."""

    is_synchronised: bool
    error_s: float
    """The most it may be wrong, as the kernel estimates it."""


def clock(options: Options) -> Finding:
    """Asks the kernel, and compares with when Evenload was installed."""
    del options
    return judge_clock(read_clock(), time.time(), Path(evenload.__file__).stat().st_mtime)


def judge_clock(state: ClockState | None, now_s: float, installed_s: float) -> Finding:
    """What the state means.

    Args:
        state: None where the kernel can't be asked.
        now_s: what the clock says, in seconds since 1970.
        installed_s: when Evenload was installed, likewise.
    """
    expected = "a clock that a time server keeps right"
    if now_s < installed_s - SLACK_S:
        found = (
            f"the clock says {_day(now_s)}, but Evenload was installed on {_day(installed_s)}: certificates are refused"
        )
        return Finding(NAME, "fail", found, expected, MEND)
    if state is None:
        return Finding(NAME, "skip", "the kernel can't be asked whether its clock is synchronised")
    if not state.is_synchronised:
        return Finding(
            NAME, "ok", "no time server keeps it right; enough for this machine alone, several want one", expected
        )
    if state.error_s > FAR_S:
        return Finding(NAME, "warn", f"it may be {state.error_s:.1f} s wrong", expected, "sudo chronyc makestep")
    return Finding(NAME, "ok", f"synchronised, at most {state.error_s * 1000:.0f} ms wrong")


class _Timex(ctypes.Structure):
    """The beginning of struct timex; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock() -> ClockState | None:
    """Asks by adjtimex, which changes nothing with modes 0; None where there is no such call."""
    state = _Timex()
    try:
        code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return None
    if code < 0:
        return None
    return ClockState(code != TIME_ERROR and not state.status & UNSYNCHRONISED, state.maxerror / 1e6)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
