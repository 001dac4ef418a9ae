"""Check of the system clock."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path

import evenload
from evenload.doctor.finding import Finding, Options, fail, ok, skip, warn

UNSYNCHRONIZED, TIME_ERROR = 0x40, 5
"""STA_UNSYNC, and the state that adjtimex returns with it: https://man7.org/linux/man-pages/man2/adjtimex.2.html"""
MAX_ERROR_S = 1.0
SLACK_S = 86400.0
"""The clock may be this far behind the installation of Evenload: time zones, copied files."""
ENABLE_NTP = "sudo timedatectl set-ntp true   # without systemd: sudo apt-get install -y chrony"


@dataclass(frozen=True)
class ClockState:
    is_synchronized: bool
    error_s: float
    """The kernel's estimate of the maximum error."""


def clock(options: Options) -> Finding:
    expected = "a clock synchronized with a time server"
    now_s, installed_s = time.time(), Path(evenload.__file__).stat().st_mtime
    if now_s < installed_s - SLACK_S:
        found = f"the clock shows {_day(now_s)}, but Evenload was installed on {_day(installed_s)}: certificates will be rejected"
        return fail(found, expected, ENABLE_NTP)
    state = read_clock()
    if state is None:
        return skip("the kernel does not report the state of its clock")
    if not state.is_synchronized:
        return ok("not synchronized with a time server; sufficient for one machine, not for several", expected)
    if state.error_s > MAX_ERROR_S:
        return warn(f"the error may be {state.error_s:.1f} s", expected, "sudo chronyc makestep")
    return ok(f"synchronized, error at most {state.error_s * 1000:.0f} ms")


class _Timex(ctypes.Structure):
    # The first fields of struct timex, followed by padding.
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
    """Read the state by adjtimex, which changes nothing with modes 0; None if there is no such call."""
    state = _Timex()
    try:
        code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return None
    if code < 0:
        return None
    return ClockState(code != TIME_ERROR and not state.status & UNSYNCHRONIZED, state.maxerror / 1e6)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
