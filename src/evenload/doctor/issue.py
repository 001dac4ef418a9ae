"""Block for a bug report: versions, devices, findings; names and addresses are removed by default."""

from __future__ import annotations

import getpass
import ipaddress
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from evenload import __version__
from evenload.doctor.checklist import DRIVER, Check
from evenload.doctor.finding import Finding
from evenload.doctor.report import as_text

DEVICES = Check("devices", "devices:devices", "", "fail", DRIVER)
"""The devices of this machine; a child because the driver may hang."""
PACKAGES = ("torch", "numpy", "nvidia-ml-py", "psutil", "rich", "typer")
MIN_NAME_LENGTH = 2
"""Shorter names of users and machines would match inside words."""
COMMON_NAMES = frozenset({"root", "localhost", "user", "ubuntu", "debian"})
_ADDRESS = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:])")
_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")


def as_issue(findings: Sequence[Finding], devices: Finding, with_names: bool = False) -> str:
    """Format a Markdown block; without ``with_names``, the findings come from ``Options(private=True)``."""
    findings_text = as_text(findings, who=None if with_names else "this machine")
    text = "\n".join([*_versions(), devices.found, "", findings_text])
    if not with_names:
        text = anonymous(text, own_names())
    return f"<details><summary>evenload doctor</summary>\n\n```\n{text}\n```\n\n</details>"


def own_names() -> dict[str, str]:
    """Return the names that identify this machine and its user, each with its replacement, longest first."""
    names: dict[str, str] = {}
    with suppress(OSError, KeyError, ImportError):
        names[getpass.getuser()] = "USER"
    for host in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        names[host] = "HOST"
    with suppress(RuntimeError):
        names[str(Path.home())] = "~"
    names = {name: word for name, word in names.items() if len(name) >= MIN_NAME_LENGTH and name not in COMMON_NAMES}
    return dict(sorted(names.items(), key=lambda pair: -len(pair[0])))


def anonymous(text: str, names: Mapping[str, str]) -> str:
    """Remove names and network addresses from a text; loopback addresses and ``0.0.0.0`` stay."""
    for name, word in names.items():
        begins, ends = (r"(?<![\w-])" if name[0].isalnum() else "", r"(?![\w-])" if name[-1].isalnum() else "")
        text = re.sub(begins + re.escape(name) + ends, word, text)
    return _ADDRESS.sub(_address, text)


def _address(match: re.Match[str]) -> str:
    if _MAC_ADDRESS.fullmatch(match.group()):
        return "ADDRESS"
    try:
        address = ipaddress.ip_address(match.group())
    except ValueError:
        return match.group()  # a time or a PCI address
    return match.group() if address.is_loopback or address.is_unspecified else "ADDRESS"


def _versions() -> list[str]:
    system = platform.uname()
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return [
        f"evenload  {__version__}",
        f"Python    {sys.version.split()[0]} ({platform.python_implementation()})",
        f"system    {system.system} {system.release} {system.machine}{_distribution()}",
        "packages  " + (", ".join(f"{name} {version}" for name, version in found.items()) or "none"),
    ]


def _distribution() -> str:
    try:
        return f", {platform.freedesktop_os_release()['PRETTY_NAME']}"
    except (OSError, KeyError):
        return ""
