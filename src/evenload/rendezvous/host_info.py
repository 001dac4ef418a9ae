"""What a machine tells of itself at the meeting, and what must be the same on all of them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from evenload.rendezvous.address import chosen_interface, gloo_address
from evenload.rendezvous.messages import printable
from evenload.rendezvous.settings import Terms
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.target import target_file

CLOCK_S = 1.0
"""Clocks further apart are told: files and records of two machines would not fit together."""
_MAY_DIFFER = ("project_dir", "log_every_s")
"""Settings that rank 0's machine alone uses."""
_MOST_BESIDE = 200


@dataclass(frozen=True)
class Seat:
    """Where one rank computes, as its machine tells it."""

    device: str
    name: str
    num_threads: int
    speed: float = 1.0
    """The part of its own speed that it is held to."""


@dataclass(frozen=True)
class Card:
    """One machine, as it introduces itself."""

    host_name: str
    address: str
    """By which its ranks are reached: what gloo takes on the interface; empty until it is known."""
    interface: str
    machine: str
    """The same for two launches on one machine."""
    source: str
    """A digest of Evenload's own code."""
    python: str
    torch: str
    script: str
    digest: str
    beside: Mapping[str, str]
    """Other Python files in the script's folder, and their digests."""
    arguments: tuple[str, ...]
    paths: Mapping[str, bool]
    """Arguments of the script that look like paths, and whether they are there."""
    settings: Mapping[str, Any]
    nodes: str
    job: str
    node_rank: int | None
    seats: tuple[Seat, ...]
    backend: str

    @property
    def label(self) -> str:
        """What a person calls it."""
        return f"{self.host_name} ({self.address})" if self.address else self.host_name


@dataclass(frozen=True)
class Differences:
    """What two machines do not have in common."""

    errors: tuple[str, ...] = ()
    """Training would be wrong or impossible."""
    notes: tuple[str, ...] = ()
    """Worth a line."""


def make_card(
    terms: Terms,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    workers: Sequence[WorkerSpec],
    own_address: str = "",
) -> Card:
    """The card of this machine.

    Args:
        terms: what the user asked.
        arguments: script and its arguments.
        settings: what the command line set.
        workers: the ranks of this machine, numbered as if it were alone.
        own_address: by which this machine is at the meeting; empty where that is not known yet.
    """
    script = target_file(arguments)
    own = arguments[2:] if arguments[0] == "-m" else arguments[1:]
    interface = chosen_interface(own_address) if own_address else ""
    return Card(
        host_name=socket.gethostname(),
        address=gloo_address(interface, own_address) if own_address else "",
        interface=interface,
        machine=_machine_id(),
        source=_source_digest(),
        python=platform.python_version(),
        torch=version_of("torch"),
        script=str(script.absolute()),
        digest=digest_of(script),
        beside=_beside(script),
        arguments=tuple(own),
        paths={argument: _exists(argument) for argument in own if os.sep in argument or _exists(argument)},
        settings=json.loads(json.dumps(dict(settings), default=str)),
        nodes=terms.nodes,
        job=terms.job,
        node_rank=terms.node_rank,
        seats=tuple(_seat(spec) for spec in workers),
        backend=workers[0].backend,
    )


def as_message(card: Card) -> dict[str, Any]:
    """The card as it travels."""
    return asdict(card)


def from_message(raw: Any) -> Card:
    """A card that has travelled.

    Raises:
        ValueError: it is none.
    """
    try:
        rank = raw["node_rank"]
        if not raw["seats"]:
            raise ValueError("it has no rank")
        return Card(
            **{key: printable(raw[key], 500) for key in _TEXTS},
            beside=_table(raw["beside"], str),
            arguments=tuple(printable(argument) for argument in raw["arguments"]),
            paths=_table(raw["paths"], bool),
            settings=dict(raw["settings"]),
            node_rank=None if rank is None else int(rank),
            seats=tuple(
                Seat(
                    printable(seat["device"], 100),
                    printable(seat["name"], 200),
                    int(seat["num_threads"]),
                    float(seat["speed"]),
                )
                for seat in raw["seats"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"this is no card: {error!r}") from None


_TEXTS = (
    *("host_name", "address", "interface", "machine", "source", "python", "torch", "script", "digest", "nodes", "job"),
    "backend",
)


def compare(point: Card, guest: Card, clock_s: float) -> Differences:
    """What keeps two machines from training together, and what is worth a line.

    Args:
        point: the meeting point's card.
        guest: the other one.
        clock_s: the guest's clock minus the point's.
    """
    errors = [
        *_compare_versions(point, guest),
        *_compare_code(point, guest),
        *_compare_settings(point, guest),
    ]
    return Differences(tuple(errors), tuple(_notes(point, guest, clock_s)))


def version_difference(here: str, there: str, name: str, versions: tuple[str, str]) -> str:
    """The error about two versions of a package; ``here`` and ``there`` are the machines."""
    mine, theirs = (version or "none" for version in versions)
    wanted = (versions[0] or versions[1]).partition("+")[0]  # the build is each machine's own
    mend = f"on {there}: python -m pip install {name}=={wanted}"
    if name == "python":
        mend = f"make an environment with Python {'.'.join(wanted.split('.')[:2])} on {there}"
    return f"{here} has {name} {mine}, {there} has {theirs}; all machines need the same: {mend}"


def numbers_of(version: str, count: int) -> tuple[str, ...]:
    """The first numbers of a version: ``2.13.0+cpu`` gives ("2", "13")."""
    return tuple(version.partition("+")[0].split(".")[:count])


def version_of(package: str) -> str:
    """An installed package's version, without importing it; empty where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def digest_of(path: Path) -> str:
    """Of a file's bytes; empty where it can't be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _compare_versions(point: Card, guest: Card) -> list[str]:
    errors = []
    for name, here, there in (("python", point.python, guest.python), ("torch", point.torch, guest.torch)):
        if numbers_of(here, 2) != numbers_of(there, 2):
            errors.append(version_difference(point.label, guest.label, name, (here, there)))
    return errors


def _compare_code(point: Card, guest: Card) -> list[str]:
    if point.digest == guest.digest:
        return []
    return [
        f"the script is not the same code: {point.script} on {point.label} and {guest.script} on {guest.label}; copy one "
        f"over the other, on {guest.host_name}: scp {point.address or point.host_name}:{point.script} {guest.script}"
    ]


def _compare_settings(point: Card, guest: Card) -> list[str]:
    errors = []
    if point.nodes != guest.nodes:
        errors.append(
            f"--nodes {point.nodes} on {point.label}, --nodes {guest.nodes} on {guest.label}; give the same number on all"
        )
    for key in sorted((point.settings.keys() | guest.settings.keys()) - set(_MAY_DIFFER)):
        here, there = (card.settings.get(key, "not set") for card in (point, guest))
        if here != there:
            errors.append(
                f"{key} is {_spell(here)} on {point.label} and {_spell(there)} on {guest.label}; type the same options on "
                "all machines (-d and --throttle alone are each machine's own)"
            )
    if point.arguments != guest.arguments:
        errors.append(
            f"the script gets other arguments: {' '.join(point.arguments) or 'none'} on {point.label}, "
            f"{' '.join(guest.arguments) or 'none'} on {guest.label}; type the same on all machines (where a path must "
            "differ, make a link of one name on each)"
        )
    return errors


def _notes(point: Card, guest: Card, clock_s: float) -> list[str]:
    notes = []
    if point.torch != guest.torch and numbers_of(point.torch, 2) == numbers_of(guest.torch, 2):
        notes.append(
            f"torch is {point.torch} on {point.label} and {guest.torch} on {guest.label}: near enough, but the same is safer"
        )
    if point.source != guest.source:
        notes.append(
            f"Evenload has the same version on {point.label} and {guest.label}, but other code; install the same on both"
        )
    names = sorted(
        name for name in point.beside.keys() & guest.beside.keys() if point.beside[name] != guest.beside[name]
    )
    if names:
        told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        notes.append(f"{told} beside the script is other code on {guest.label} than on {point.label}")
    for argument in sorted(point.paths.keys() | guest.paths.keys()):
        here, there = point.paths.get(argument, False), guest.paths.get(argument, False)
        if here != there:
            has, lacks = (point, guest) if here else (guest, point)
            notes.append(f"{argument} is there on {has.label}, but not on {lacks.label}")
    if abs(clock_s) > CLOCK_S:
        notes.append(
            f"the clock of {guest.label} is {abs(clock_s):.1f} s {'ahead of' if clock_s > 0 else 'behind'} that of "
            f"{point.label}; set both by the network: sudo timedatectl set-ntp true"
        )
    return notes


def _spell(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else printable(value, 200)


def _table(raw: Any, kind: type) -> dict[str, Any]:
    return {printable(key, 500): kind(value) for key, value in raw.items()}


def _seat(spec: WorkerSpec) -> Seat:
    device = "+".join(spec.devices) or spec.device
    return Seat(device, spec.device_names[spec.rank], spec.num_threads, float(spec.throttle.get("factor", 1.0)))


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a name, or a null character: text, not a path
        return False


def _beside(script: Path) -> dict[str, str]:
    others = sorted(path for path in script.absolute().parent.glob("*.py") if path.name != script.name)
    return {path.name: digest_of(path) for path in others[:_MOST_BESIDE]}


def _source_digest() -> str:
    home = Path(__file__).parents[3]
    digest = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _machine_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{platform.node()}/{os.getppid()}"
