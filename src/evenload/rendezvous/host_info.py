"""Facts that a machine sends about itself at the rendezvous, and the comparison of two machines."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from evenload.rendezvous.address import chosen_interface, gloo_address
from evenload.rendezvous.connection import printable
from evenload.rendezvous.settings import RendezvousConfig

MAX_CLOCK_OFFSET_S = 1.0
"""Clocks further apart are reported: files and records of two machines would not fit together."""
_MAY_DIFFER = ("project_dir", "log_every_s")
"""Settings that only rank 0's machine uses."""
_MAX_SIBLINGS = 200


@dataclass(frozen=True)
class DeviceSlot:
    """The device of one rank."""

    device: str
    name: str
    num_threads: int
    speed: float = 1.0
    """The part of its own speed to which it is throttled."""
    inner_backend: str = ""
    """That of `WorkerSpec`."""


@dataclass(frozen=True)
class LocalLaunch:
    """This machine's part of a run."""

    script: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, Any]
    slots: tuple[DeviceSlot, ...]
    may_change: bool = False
    """Machines may join the run while it is in progress, and be lost."""


@dataclass(frozen=True)
class HostInfo:
    """One machine, as it introduces itself."""

    host_name: str
    address: str
    """Address of its ranks: the one that gloo takes on the interface; empty until it is known."""
    interface: str
    source: str
    """Digest of Evenload's own code."""
    python: str
    torch: str
    script: str
    digest: str
    siblings: Mapping[str, str]
    """Other Python files in the script's folder, and their digests."""
    arguments: tuple[str, ...]
    paths: Mapping[str, bool]
    """Arguments of the script that look like paths; true where the path exists."""
    settings: Mapping[str, Any]
    nodes: str
    job_id: str
    node_rank: int | None
    slots: tuple[DeviceSlot, ...]
    endpoint: str = ""
    """`Machine.endpoint`."""

    @property
    def label(self) -> str:
        return f"{self.host_name} ({self.address})" if self.address else self.host_name


@dataclass(frozen=True)
class HostDifferences:
    errors: tuple[str, ...] = ()
    """They make training wrong or impossible."""
    notes: tuple[str, ...] = ()


def collect_host_info(config: RendezvousConfig, launch: LocalLaunch, own_address: str = "") -> HostInfo:
    """Return the facts of this machine; ``own_address`` at the rendezvous is empty where it is not known yet."""
    interface = chosen_interface(own_address) if own_address else ""
    script, arguments = launch.script, launch.arguments
    return HostInfo(
        host_name=socket.gethostname(),
        address=gloo_address(interface, own_address) if own_address else "",
        interface=interface,
        source=_source_digest(),
        python=platform.python_version(),
        torch=version_of("torch"),
        script=str(script.absolute()),
        digest=digest_of(script),
        siblings=_sibling_digests(script),
        arguments=arguments,
        paths={argument: _exists(argument) for argument in arguments if os.sep in argument or _exists(argument)},
        settings=json.loads(json.dumps(dict(launch.settings), default=str)),
        nodes=config.nodes,
        job_id=config.job_id,
        node_rank=config.node_rank,
        slots=launch.slots,
    )


def from_message(raw: Any) -> HostInfo:
    """Read a machine's facts from a message; ValueError if it is invalid."""
    try:
        rank = raw["node_rank"]
        if not raw["slots"]:
            raise ValueError("it has no rank")
        return HostInfo(
            **{key: printable(raw[key], 500) for key in _TEXTS},
            siblings=_table(raw["siblings"], str),
            arguments=tuple(printable(argument) for argument in raw["arguments"]),
            paths=_table(raw["paths"], bool),
            settings=dict(raw["settings"]),
            node_rank=None if rank is None else int(rank),
            slots=tuple(
                DeviceSlot(
                    printable(slot["device"], 100),
                    printable(slot["name"], 200),
                    int(slot["num_threads"]),
                    float(slot["speed"]),
                    printable(slot["inner_backend"], 10),
                )
                for slot in raw["slots"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"invalid host info: {error!r}") from None


_TEXTS = (
    "host_name",
    "address",
    "endpoint",
    "interface",
    "source",
    "python",
    "torch",
    "script",
    "digest",
    "nodes",
    "job_id",
)


def compare(coordinator: HostInfo, member: HostInfo, clock_offset_s: float) -> HostDifferences:
    """Compare two machines; ``clock_offset_s`` is the member's clock minus the coordinator's."""
    errors = [
        *_compare_versions(coordinator, member),
        *_compare_code(coordinator, member),
        *_compare_settings(coordinator, member),
    ]
    return HostDifferences(tuple(errors), tuple(_notes(coordinator, member, clock_offset_s)))


def version_difference(here: str, there: str, name: str, versions: tuple[str, str]) -> str:
    """Return the error about two versions of a package; ``here`` and ``there`` are the machines."""
    own, other = (version or "none" for version in versions)
    wanted = (versions[0] or versions[1]).partition("+")[0]  # the build may differ
    fix = f"on {there}: python -m pip install {name}=={wanted}"
    if name == "python":
        fix = f"make an environment with Python {'.'.join(wanted.split('.')[:2])} on {there}"
    return f"{here} has {name} {own}, {there} has {other}; all machines need the same: {fix}"


def numbers_of(version: str, count: int) -> tuple[str, ...]:
    """Return the first numbers of a version: ``2.13.0+cpu`` gives ("2", "13")."""
    return tuple(version.partition("+")[0].split(".")[:count])


def version_of(package: str) -> str:
    """Return an installed package's version without importing it; empty where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def digest_of(path: Path) -> str:
    """Return the digest of a file; empty where it can't be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _compare_versions(coordinator: HostInfo, member: HostInfo) -> list[str]:
    errors = []
    for name, here, there in (
        ("python", coordinator.python, member.python),
        ("torch", coordinator.torch, member.torch),
    ):
        if numbers_of(here, 2) != numbers_of(there, 2):
            errors.append(version_difference(coordinator.label, member.label, name, (here, there)))
    return errors


def _compare_code(coordinator: HostInfo, member: HostInfo) -> list[str]:
    if coordinator.digest == member.digest:
        return []
    source = f"{coordinator.address or coordinator.host_name}:{coordinator.script}"
    return [
        f"the script differs: {coordinator.script} on {coordinator.label} and {member.script} on {member.label}; copy one "
        f"over the other, on {member.host_name}: scp {source} {member.script}"
    ]


def _compare_settings(coordinator: HostInfo, member: HostInfo) -> list[str]:
    errors = []
    if coordinator.nodes != member.nodes:
        errors.append(
            f"--nodes {coordinator.nodes} on {coordinator.label}, --nodes {member.nodes} on {member.label}; give the same "
            "number on all"
        )
    for key in sorted((coordinator.settings.keys() | member.settings.keys()) - set(_MAY_DIFFER)):
        here, there = (info.settings.get(key, "not set") for info in (coordinator, member))
        if here != there:
            errors.append(
                f"{key} is {_spell(here)} on {coordinator.label} and {_spell(there)} on {member.label}; type the same options "
                "on all machines (-d, --throttle, --project-dir and --log-every may differ)"
            )
    if coordinator.arguments != member.arguments:
        errors.append(
            f"the script's arguments differ: {' '.join(coordinator.arguments) or 'none'} on {coordinator.label}, "
            f"{' '.join(member.arguments) or 'none'} on {member.label}; type the same on all machines (where a path must "
            "differ, make a link of one name on each)"
        )
    return errors


def _notes(coordinator: HostInfo, member: HostInfo, clock_offset_s: float) -> list[str]:
    notes = []
    if coordinator.torch != member.torch and numbers_of(coordinator.torch, 2) == numbers_of(member.torch, 2):
        notes.append(
            f"torch is {coordinator.torch} on {coordinator.label} and {member.torch} on {member.label}: these work together, "
            "but the same version is safer"
        )
    if coordinator.source != member.source:
        notes.append(
            f"Evenload has the same version on {coordinator.label} and {member.label}, but other code; install the same on both"
        )
    names = sorted(
        name
        for name in coordinator.siblings.keys() & member.siblings.keys()
        if coordinator.siblings[name] != member.siblings[name]
    )
    if names:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        notes.append(f"{listed} beside the script: the code on {member.label} differs from {coordinator.label}")
    for argument in sorted(coordinator.paths.keys() | member.paths.keys()):
        here, there = coordinator.paths.get(argument, False), member.paths.get(argument, False)
        if here != there:
            has, lacks = (coordinator, member) if here else (member, coordinator)
            notes.append(f"{argument} exists on {has.label}, but not on {lacks.label}")
    if abs(clock_offset_s) > MAX_CLOCK_OFFSET_S:
        notes.append(
            f"the clock of {member.label} is {abs(clock_offset_s):.1f} s {'ahead of' if clock_offset_s > 0 else 'behind'} "
            f"that of {coordinator.label}; synchronize both: sudo timedatectl set-ntp true"
        )
    return notes


def _spell(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else printable(value, 200)


def _table(raw: Any, kind: type) -> dict[str, Any]:
    return {printable(key, 500): kind(value) for key, value in raw.items()}


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a name, or a null character: text, not a path
        return False


def _sibling_digests(script: Path) -> dict[str, str]:
    others = sorted(path for path in script.absolute().parent.glob("*.py") if path.name != script.name)
    return {path.name: digest_of(path) for path in others[:_MAX_SIBLINGS]}


def _source_digest() -> str:
    home = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
