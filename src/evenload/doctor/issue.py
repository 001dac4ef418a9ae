"""The block for a bug report: versions, devices, findings; no names of machines, users or addresses unless asked for."""

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
from evenload.doctor.checklist import Check
from evenload.doctor.finding import Finding
from evenload.doctor.report import as_text

DEVICES = Check("devices", "devices:devices", "the driver answers", "fail")
"""What computes here; asked in a child, as all that may hang."""
PACKAGES = ("torch", "numpy", "nvidia-ml-py", "psutil", "rich", "typer")
SHORTEST_NAME = 2
"""Shorter names of users and machines would take parts out of words."""
COMMON_NAMES = frozenset({"root", "localhost", "user", "ubuntu", "debian"})
_ADDRESS = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:])")
_CARD_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")


def as_issue(findings: Sequence[Finding], devices: Finding, with_names: bool = False) -> str:
    """A block in Markdown, to be pasted into an issue.

    Args:
        findings: at least one; made with ``Options(private=True)`` unless names are asked for.
        devices: what `DEVICES` found.
        with_names: leave names of machines, users, folders and addresses in.
    """
    findings_text = as_text(findings, who=None if with_names else "this machine")
    text = "\n".join([*_versions(), devices.found, "", findings_text])
    if not with_names:
        text = anonymous(text, own_names())
    return f"<details><summary>evenload doctor</summary>\n\n```\n{text}\n```\n\n</details>"


def own_names() -> dict[str, str]:
    """What gives this machine and its user away, and what stands for it; longest first."""
    names: dict[str, str] = {}
    with suppress(OSError, KeyError, ImportError):
        names[getpass.getuser()] = "USER"
    for host in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        names[host] = "HOST"
    with suppress(RuntimeError):
        names[str(Path.home())] = "~"
    names = {name: word for name, word in names.items() if len(name) >= SHORTEST_NAME and name not in COMMON_NAMES}
    return dict(sorted(names.items(), key=lambda pair: -len(pair[0])))


def anonymous(text: str, names: Mapping[str, str]) -> str:
    """A text without the given names, and without addresses of networks; the loopback and ``0.0.0.0`` stay."""
    for name, word in names.items():
        begins, ends = (r"(?<![\w-])" if name[0].isalnum() else "", r"(?![\w-])" if name[-1].isalnum() else "")
        text = re.sub(begins + re.escape(name) + ends, word, text)
    return _ADDRESS.sub(_address, text)


def _address(match: re.Match[str]) -> str:
    if _CARD_ADDRESS.fullmatch(match.group()):
        return "ADDRESS"
    try:
        address = ipaddress.ip_address(match.group())
    except ValueError:
        return match.group()  # a time of day, a place on the PCI bus
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
