"""What the doctor of one machine asks another one: a short talk with `evenload doctor --serve` or a run's meeting point."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenload.errors import LaunchError
from evenload.hardware import mount_of
from evenload.rendezvous import PROTOCOL
from evenload.rendezvous.address import Address, route_of
from evenload.rendezvous.connect import ATTEMPT_S, Miss, dial
from evenload.rendezvous.host_info import Card, digest_of, version_of
from evenload.rendezvous.messages import Message, Wire, printable
from evenload.rendezvous.reachability import Door, Doorplate, Round
from evenload.version import __version__

_IDLE_S = 10.0
_ANSWER_S = 3.0
_MOST_BYTES = 1 << 30
_MOST_VISITS = 8
_NUM_PINGS = 15
_TRIAL_BYTES = 1 << 16
_MEASURE_S = 0.6
"""How long a measurement of bandwidth should take, each way."""
_SLOW_TRIAL_S = 0.3
"""A link that takes so long for the trial (1.7 Mbit/s) is not measured further."""
_MOST_FILES = 20_000


@dataclass(frozen=True)
class Data:
    """A data path as one machine sees it."""

    path: str
    kind: str
    """``file``, ``folder`` or ``missing``."""
    num_files: int = 0
    num_bytes: int = 0
    digest: str = ""
    """Of all names and sizes, or of the ends of one file."""
    source: str = ""
    """The file system and where it comes from, such as ``nfs4 box1:/export``."""
    is_cut: bool = False
    """There were too many files to look at all."""


@dataclass(frozen=True)
class Sheet:
    """The facts of one machine that the doctor compares."""

    host_name: str
    evenload: str
    python: str
    torch: str
    interface: str = ""
    mtu: int = 0
    script: str = ""
    digest: str = ""
    data: Data | None = None


@dataclass(frozen=True)
class Measured:
    """What a visit found out; times in seconds, speeds in bytes a second, None for what it did not come to."""

    theirs: Sheet
    round_trip_s: float
    clock_s: float
    """The other clock minus ours."""
    there: float | None = None
    """Bandwidth from here to there."""
    back: float | None = None
    stalled: str = ""
    """What of the bulk did not arrive, and which way."""
    to_door: Miss | None = None
    """Why a port that the system picked there is not reached from here; None: it is."""
    from_door: Miss | None = None
    """The same, from there to here."""


def make_sheet(own_host: str = "", script: str = "", data: str = "") -> Sheet:
    """The facts of this machine."""
    route = route_of(own_host) if own_host else None
    return Sheet(
        host_name=socket.gethostname(),
        evenload=__version__,
        python=platform.python_version(),
        torch=version_of("torch"),
        interface=route.interface if route else "",
        mtu=route.mtu if route else 0,
        script=script,
        digest=digest_of(Path(script)) if script else "",
        data=look_at_data(data) if data else None,
    )


def sheet_of_card(card: Card) -> Sheet:
    """What a run's meeting point tells a doctor."""
    return Sheet(card.host_name, __version__, card.python, card.torch, script=card.script, digest=card.digest)


def look_at_data(path: str) -> Data:
    """Names and sizes below a path; of a single file its ends. Contents of folders are not read: that may take hours."""
    import hashlib

    place = Path(path)
    digest = hashlib.sha256()
    source = _file_system(place)
    if place.is_file():
        size = place.stat().st_size
        with place.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
        return Data(path, "file", 1, size, digest.hexdigest()[:16], source)
    if not place.is_dir():
        return Data(path, "missing")
    count = total = 0
    for folder, folders, names in os.walk(place):
        folders.sort()  # walked in this order: the same on all machines
        for name in sorted(names):
            if count == _MOST_FILES:
                return Data(path, "folder", count, total, digest.hexdigest()[:16], source, is_cut=True)
            file_path = Path(folder, name)
            try:
                size = file_path.stat().st_size
            except OSError:
                size = -1
            digest.update(f"{file_path.relative_to(place).as_posix()}\0{size}\n".encode())
            count += 1
            total += max(0, size)
    return Data(path, "folder", count, total, digest.hexdigest()[:16], source)


def _file_system(place: Path) -> str:
    """Return the file system of a path, such as ``ext4 /dev/sda1``; empty if unknown."""
    mount = mount_of(place)
    return "" if mount is None else f"{mount.fs_type} {mount.source}"


# The side that is asked


_places = threading.BoundedSemaphore(_MOST_VISITS)


def attend(wire: Wire, sheet: Sheet, hello: Message, heard: Callable[[str], None] = lambda line: None) -> None:
    """Answers a doctor's questions in a thread of its own, until it leaves.

    Args:
        wire: to the doctor, whose hello has been read.
        sheet: the facts of this machine.
        hello: what it said.
        heard: told one line about who came.
    """
    if not _places.acquire(blocking=False):
        wire.send("refuse", text="too many doctors at once; try again in a minute")
        wire.finish(0.2)
        return

    def talk() -> None:
        try:
            _attend(wire, sheet, hello, heard)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            pass  # gone, or none of ours
        finally:
            wire.close()
            _places.release()

    threading.Thread(target=talk, name="evenload-visit", daemon=True).start()


def _attend(wire: Wire, sheet: Sheet, hello: Message, heard: Callable[[str], None]) -> None:
    if hello.get("protocol") != PROTOCOL:
        version = printable(hello.get("evenload"), 50)
        wire.send("refuse", text=f"Evenload {__version__} here can't talk with {version} there: install the same")
        wire.finish(0.5)
        return
    route = route_of(wire.own_host)
    door = Door(wire.own_host)
    try:
        facts = {**asdict(sheet), "interface": route.interface, "mtu": route.mtu}
        wire.send("welcome", sheet=facts, door=[door.plate.port, door.plate.token])
        heard(f"{printable(hello.get('host_name'), 100)} ({wire.peer.host}) looks at this machine")
        since_s = time.monotonic()
        while not wire.lost and time.monotonic() - since_s < _IDLE_S:
            door.poll()
            message = wire.receive(0.05)
            if message is None:
                continue
            since_s = time.monotonic()
            if message["kind"] == "bye":
                wire.finish(0.5)
                return
            _answer(wire, door, message)
    finally:
        door.close()


def _answer(wire: Wire, door: Door, message: Message) -> None:
    num_bytes = min(_MOST_BYTES, max(0, int(message.get("num_bytes", 0))))
    match message["kind"]:
        case "ping":
            wire.send("pong", time_s=time.time())
        case "sink":
            wire.send("ready")  # sent earlier, the bytes would be taken for messages
            began_s = time.monotonic()
            count = wire.read_raw(num_bytes, _ANSWER_S)
            wire.send("sunk", num_bytes=count, seconds=time.monotonic() - began_s)
        case "source":
            wire.write_raw(num_bytes, _ANSWER_S)
        case "try":
            # Only back to where the doctor itself is: nobody can send us to a third machine.
            plate = Doorplate(wire.peer.host, int(message["door"][0]), str(message["door"][1]))
            tries = Round([plate], _ANSWER_S)
            while not tries.poll():
                door.poll()
                time.sleep(0.005)
            miss = tries.attempts[0].miss
            wire.send("tried", miss=None if miss is None else asdict(miss))


# The side that asks


def call(address: Address, sheet: Sheet, limit_s: float = ATTEMPT_S) -> tuple[Wire, Message] | Miss:
    """Connects and says hello; the wire and the welcome.

    Raises:
        LaunchError: who answers is none of ours, or refuses.
    """
    found = dial(address, limit_s)
    if isinstance(found, Miss):
        return found
    wire = Wire(found)
    wire.send("hello", what="doctor", protocol=PROTOCOL, evenload=__version__, host_name=sheet.host_name)
    message = wire.receive(_ANSWER_S)
    if message is None or message["kind"] not in ("welcome", "refuse"):
        told = wire.lost or f"it said nothing within {_ANSWER_S:.0f} s"
        wire.close()
        raise LaunchError(f"something listens at {address}, but it does not speak as Evenload does ({told})")
    if message["kind"] == "refuse":
        wire.close()
        raise LaunchError(printable(message.get("text")))
    return wire, message


def examine(wire: Wire, welcome: Message) -> Measured:
    """Asks everything, in a few seconds.

    Raises:
        LaunchError: the other side is gone in the middle of it.
    """
    theirs = _sheet(welcome.get("sheet"))
    trips, clocks = [], []
    for _ in range(_NUM_PINGS):
        began_s, sent_s = time.monotonic(), time.time()
        wire.send("ping")
        pong = _expect(wire, "pong")
        trips.append(time.monotonic() - began_s)
        clocks.append((trips[-1], float(pong["time_s"]) - (sent_s + time.time()) / 2))
    facts: dict[str, Any] = {
        "theirs": theirs,
        "round_trip_s": statistics.median(trips),
        "clock_s": min(clocks)[1],  # the quickest answer is the least disturbed
    }
    facts.update(_try_doors(wire, welcome))
    facts.update(_measure(wire))
    if not facts.get("stalled"):
        wire.send("bye")
        wire.finish(0.5)
    wire.close()
    return Measured(**facts)


def _try_doors(wire: Wire, welcome: Message) -> dict[str, Miss | None]:
    there = Round([Doorplate(wire.peer.host, int(welcome["door"][0]), str(welcome["door"][1]))], _ANSWER_S - 0.5)
    while not there.poll():
        time.sleep(0.005)
    door = Door(wire.own_host)
    try:
        wire.send("try", door=[door.plate.port, door.plate.token])
        end_s = time.monotonic() + _ANSWER_S + 1.0
        tried = None
        while tried is None and time.monotonic() < end_s and not wire.lost:
            door.poll()
            tried = wire.receive(0.02)
    finally:
        door.close()
    raw = tried.get("miss") if tried is not None else asdict(Miss("silent", _ANSWER_S))
    back = None if raw is None else Miss(raw["kind"], float(raw["seconds"]), printable(raw["told"], 200))
    return {"to_door": there.attempts[0].miss, "from_door": back}


def _measure(wire: Wire) -> dict[str, Any]:
    """Bandwidth both ways: a small trial tells how much to send."""
    found: dict[str, Any] = {}
    for key, way, transfer in (
        ("there", "from here to there", _send_bulk),
        ("back", "from there to here", _fetch_bulk),
    ):
        trial_s = transfer(wire, _TRIAL_BYTES)
        if trial_s is None:
            found["stalled"] = f"{_TRIAL_BYTES // 1024} KiB {way} did not arrive within {_ANSWER_S:.0f} s"
            return found
        speed = _TRIAL_BYTES / trial_s
        # Twice: the first 64 KiB fit into the buffers on the way and are too fast or too slow to be believed.
        for part in (0.2, 1.0) if trial_s < _SLOW_TRIAL_S else ():
            num_bytes = int(min(_MOST_BYTES // 4, max(_TRIAL_BYTES, speed * _MEASURE_S * part)))
            seconds = transfer(wire, num_bytes)
            if seconds is None:
                found["stalled"] = f"{num_bytes / 1e6:.1f} MB {way} did not arrive"
                return found
            speed = num_bytes / seconds
        found[key] = speed
    return found


def _send_bulk(wire: Wire, num_bytes: int) -> float | None:
    wire.send("sink", num_bytes=num_bytes)
    ready = wire.receive(_ANSWER_S)
    if ready is None or ready["kind"] != "ready":
        return None
    began_s = time.monotonic()
    if wire.write_raw(num_bytes, _ANSWER_S) < num_bytes:
        return None
    answer = wire.receive(_ANSWER_S + 1.0)
    if answer is None or answer["kind"] != "sunk" or int(answer["num_bytes"]) < num_bytes:
        return None
    return max(1e-6, time.monotonic() - began_s)


def _fetch_bulk(wire: Wire, num_bytes: int) -> float | None:
    began_s = time.monotonic()
    wire.send("source", num_bytes=num_bytes)
    if wire.read_raw(num_bytes, _ANSWER_S) < num_bytes:
        return None
    return max(1e-6, time.monotonic() - began_s)


def _expect(wire: Wire, kind: str) -> Message:
    message = wire.receive(_ANSWER_S)
    if message is None or message["kind"] != kind:
        raise LaunchError(f"the other machine broke off the talk: {wire.lost or 'no answer'}")
    return message


def _sheet(raw: Any) -> Sheet:
    try:
        data = raw["data"]
        texts = {
            key: printable(raw[key], 500)
            for key in ("host_name", "evenload", "python", "torch", "interface", "script", "digest")
        }
        return Sheet(**texts, mtu=int(raw["mtu"]), data=None if data is None else Data(**data))
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"the other machine's facts can't be read: {error!r}") from None
