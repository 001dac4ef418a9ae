"""The doctor's measurement of another machine, by `evenload doctor --serve` or a run's coordinator on the other side."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenload.errors import LaunchError
from evenload.hardware import mount_of
from evenload.rendezvous import PROTOCOL
from evenload.rendezvous.address import Address, route_of
from evenload.rendezvous.connection import ConnectFailure, Connection, Message, connect, printable
from evenload.rendezvous.host_info import HostInfo, digest_of, version_of
from evenload.rendezvous.reachability import (
    ProbeListener,
    ProbeTarget,
    failure_from_message,
    probe,
)
from evenload.version import __version__

_IDLE_S = 10.0
_ANSWER_S = 3.0
_MAX_BYTES = 1 << 30
_MAX_DOCTORS = 8
_NUM_PINGS = 15
_TRIAL_BYTES = 1 << 16
_TRANSFER_S = 0.6
"""Intended time of a bandwidth measurement, each way."""
_SLOW_TRIAL_S = 0.3
"""A link that needs so long for the trial (1.7 Mbit/s) is not measured further."""
_MAX_FILES = 20_000

_num_doctors = 0


@dataclass(frozen=True)
class DataSummary:
    """A data path as one machine sees it."""

    path: str
    kind: str
    """``file``, ``folder`` or ``missing``."""
    num_files: int = 0
    num_bytes: int = 0
    digest: str = ""
    """Of all names and sizes, or of both ends of one file."""
    source: str = ""
    """The file system and its device, such as ``nfs4 box1:/export``."""
    is_partial: bool = False
    """There were too many files to read all names."""


@dataclass(frozen=True)
class HostReport:
    """The facts of one machine that the doctor compares."""

    host_name: str
    evenload: str
    python: str
    torch: str
    interface: str = ""
    mtu: int = 0
    script: str = ""
    digest: str = ""
    data: DataSummary | None = None


@dataclass(frozen=True)
class HostMeasurement:
    """Measurements with another machine; None for what was not measured."""

    remote: HostReport
    round_trip_s: float
    clock_offset_s: float
    """The other clock minus ours."""
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    both_bytes_per_s: float | None = None
    """Each way, while bytes travel both ways at once."""
    stalled: str = ""
    """The bulk that did not arrive, and its direction."""
    outward_failure: ConnectFailure | None = None
    """The failed connection to a port that the system picked there; None if it succeeded."""
    inward_failure: ConnectFailure | None = None
    """The same, from there to here."""


def make_host_report(own_host: str = "", script: str = "", data: str = "") -> HostReport:
    route = route_of(own_host) if own_host else None
    return HostReport(
        host_name=socket.gethostname(),
        evenload=__version__,
        python=platform.python_version(),
        torch=version_of("torch"),
        interface=route.interface if route else "",
        mtu=route.mtu if route else 0,
        script=script,
        digest=digest_of(Path(script)) if script else "",
        data=summarize_data(data) if data else None,
    )


def host_report_of(info: HostInfo) -> HostReport:
    """Return the report that a run's coordinator sends to a doctor."""
    return HostReport(info.host_name, __version__, info.python, info.torch, script=info.script, digest=info.digest)


def summarize_data(path: str) -> DataSummary:
    """Summarize names and sizes below a path; of a single file its ends. Contents of folders are not read: it may take hours."""
    root = Path(path)
    digest = hashlib.sha256()
    source = _file_system(root)
    if root.is_file():
        size = root.stat().st_size
        with root.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
        return DataSummary(path, "file", 1, size, digest.hexdigest()[:16], source)
    if not root.is_dir():
        return DataSummary(path, "missing")
    count = total = 0
    for folder, folders, names in os.walk(root):
        folders.sort()  # walked in this order: the same on all machines
        for name in sorted(names):
            if count == _MAX_FILES:
                return DataSummary(path, "folder", count, total, digest.hexdigest()[:16], source, is_partial=True)
            file_path = Path(folder, name)
            try:
                size = file_path.stat().st_size
            except OSError:
                size = -1
            digest.update(f"{file_path.relative_to(root).as_posix()}\0{size}\n".encode())
            count += 1
            total += max(0, size)
    return DataSummary(path, "folder", count, total, digest.hexdigest()[:16], source)


def _file_system(place: Path) -> str:
    mount = mount_of(place)
    return "" if mount is None else f"{mount.fs_type} {mount.source}"


# The side that answers


async def answer_doctor(
    connection: Connection, report: HostReport, hello: Message, log: Callable[[str], None] = lambda line: None
) -> None:
    """Answer the requests of a doctor, whose ``hello`` has been received, until it leaves; log who connected."""
    global _num_doctors
    if _num_doctors >= _MAX_DOCTORS:
        connection.send("refuse", text="too many doctors at once; try again in a minute")
    elif hello.get("protocol") != PROTOCOL:
        version = printable(hello.get("evenload"), 50)
        connection.send(
            "refuse", text=f"Evenload {__version__} here is incompatible with {version} there: install the same version"
        )
    else:
        _num_doctors += 1
        try:
            with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):  # lost, or invalid requests
                route = route_of(connection.own_host)
                report = replace(report, interface=route.interface, mtu=route.mtu)
                async with ProbeListener(connection.own_host) as target:
                    connection.send("welcome", report=report, target=target)
                    log(f"{printable(hello.get('host_name'), 100)} ({connection.peer.host}) examines this machine")
                    await _answer_requests(connection)
        finally:
            _num_doctors -= 1


async def _answer_requests(connection: Connection) -> None:
    while True:
        async with asyncio.timeout(_IDLE_S):
            message = await connection.receive()
        if message is None or message["kind"] == "bye":
            return
        num_bytes = min(_MAX_BYTES, max(0, int(message.get("num_bytes", 0))))
        match message["kind"]:
            case "ping":
                connection.send("pong", time_s=time.time())
            case "sink":
                connection.send("ready")  # bytes sent earlier would be read as messages
                count = await connection.receive_bytes(num_bytes, _ANSWER_S)
                connection.send("sunk", num_bytes=count)
            case "source":
                await connection.send_bytes(num_bytes, _ANSWER_S)
            case "exchange":
                connection.send("ready")
                count = (await _send_and_receive(connection, num_bytes))[1]
                connection.send("exchanged", num_bytes=count)
            case "probe":
                # Only the doctor's own address, so that nobody can send us to a third machine.
                target = ProbeTarget(connection.peer.host, int(message["port"]), str(message["token"]))
                connection.send("probed", failure=await probe(target, _ANSWER_S))


# The side that asks


async def call_host(address: Address, report: HostReport) -> tuple[Connection, Message] | ConnectFailure:
    """Introduce this doctor; return the connection and the welcome.

    LaunchError: another program answers, or Evenload refuses.
    """
    connection = await connect(address)
    if isinstance(connection, ConnectFailure):
        return connection
    connection.send("hello", what="doctor", protocol=PROTOCOL, evenload=__version__, host_name=report.host_name)
    message = await _receive(connection)
    if message is None or message["kind"] not in ("welcome", "refuse"):
        seen = connection.lost or f"it sent nothing within {_ANSWER_S:.0f} s"
        connection.close()
        raise LaunchError(f"the program that listens at {address} is not Evenload ({seen})")
    if message["kind"] == "refuse":
        connection.close()
        raise LaunchError(printable(message.get("text")))
    return connection, message


async def measure_host(connection: Connection, welcome: Message) -> HostMeasurement:
    """Measure everything, in a few seconds; LaunchError if the connection is lost meanwhile."""
    remote = _read_report(welcome.get("report"))
    trips, offsets = [], []
    for _ in range(_NUM_PINGS):
        began_s, sent_s = time.monotonic(), time.time()
        connection.send("ping")
        pong = await _receive(connection)
        if pong is None or pong["kind"] != "pong":
            raise LaunchError(f"the other machine stopped answering: {connection.lost or 'no answer'}")
        trips.append(time.monotonic() - began_s)
        offsets.append((trips[-1], float(pong["time_s"]) - (sent_s + time.time()) / 2))
    facts = {**await _probe_both_ways(connection, welcome), **await _measure_bandwidth(connection)}
    if not facts.get("stalled"):
        connection.send("bye")
        await connection.finish(0.5)
    connection.close()
    return HostMeasurement(
        remote=remote,
        round_trip_s=statistics.median(trips),
        clock_offset_s=min(offsets)[1],  # the fastest answer is the least disturbed
        **facts,
    )


async def _probe_both_ways(connection: Connection, welcome: Message) -> dict[str, ConnectFailure | None]:
    target = welcome["target"]
    there = ProbeTarget(connection.peer.host, int(target["port"]), str(target["token"]))
    outward = await probe(there, _ANSWER_S - 0.5)
    async with ProbeListener(connection.own_host) as own:
        connection.send("probe", port=own.port, token=own.token)
        answer = await _receive(connection, _ANSWER_S + 1.0)
    inward = ConnectFailure("silent", _ANSWER_S) if answer is None else failure_from_message(answer.get("failure"))
    return {"outward_failure": outward, "inward_failure": inward}


async def _measure_bandwidth(connection: Connection) -> dict[str, Any]:
    """Measure each way, and both at once; a small trial determines how much to send."""
    found: dict[str, Any] = {}
    for key, way, transfer in (
        ("sent_bytes_per_s", "from here to there", _send_bulk),
        ("received_bytes_per_s", "from there to here", _receive_bulk),
    ):
        trial_s = await transfer(connection, _TRIAL_BYTES)
        if trial_s is None:
            found["stalled"] = f"{_TRIAL_BYTES // 1024} KiB {way} did not arrive within {_ANSWER_S:.0f} s"
            return found
        speed = _TRIAL_BYTES / trial_s
        # Twice: the first 64 KiB fit into the buffers on the way, so that their speed is not the link's.
        for part in (0.2, 1.0) if trial_s < _SLOW_TRIAL_S else ():
            num_bytes = int(min(_MAX_BYTES // 4, max(_TRIAL_BYTES, speed * _TRANSFER_S * part)))
            seconds = await transfer(connection, num_bytes)
            if seconds is None:
                found["stalled"] = f"{num_bytes / 1e6:.1f} MB {way} did not arrive"
                return found
            speed = num_bytes / seconds
        found[key] = speed
    num_bytes = int(min(_MAX_BYTES // 4, max(_TRIAL_BYTES, min(found.values()) * _TRANSFER_S)))
    if (seconds := await _exchange_bulk(connection, num_bytes)) is not None:
        found["both_bytes_per_s"] = num_bytes / seconds
    return found


async def _send_bulk(connection: Connection, num_bytes: int) -> float | None:
    connection.send("sink", num_bytes=num_bytes)
    ready = await _receive(connection)
    if ready is None or ready["kind"] != "ready":
        return None
    began_s = time.monotonic()
    if await connection.send_bytes(num_bytes, _ANSWER_S) < num_bytes:
        return None
    answer = await _receive(connection, _ANSWER_S + 1.0)
    if answer is None or answer["kind"] != "sunk" or int(answer["num_bytes"]) < num_bytes:
        return None
    return max(1e-6, time.monotonic() - began_s)


async def _receive_bulk(connection: Connection, num_bytes: int) -> float | None:
    began_s = time.monotonic()
    connection.send("source", num_bytes=num_bytes)
    if await connection.receive_bytes(num_bytes, _ANSWER_S) < num_bytes:
        return None
    return max(1e-6, time.monotonic() - began_s)


async def _exchange_bulk(connection: Connection, num_bytes: int) -> float | None:
    connection.send("exchange", num_bytes=num_bytes)
    ready = await _receive(connection)
    if ready is None or ready["kind"] != "ready":
        return None  # an earlier version, which does not answer
    began_s = time.monotonic()
    if min(await _send_and_receive(connection, num_bytes)) < num_bytes:
        return None
    answer = await _receive(connection, _ANSWER_S + 1.0)
    if answer is None or answer["kind"] != "exchanged" or int(answer["num_bytes"]) < num_bytes:
        return None
    return max(1e-6, time.monotonic() - began_s)


async def _send_and_receive(connection: Connection, num_bytes: int) -> tuple[int, int]:
    """Return how many bytes left and came."""
    return await asyncio.gather(
        connection.send_bytes(num_bytes, _ANSWER_S), connection.receive_bytes(num_bytes, _ANSWER_S)
    )


async def _receive(connection: Connection, limit_s: float = _ANSWER_S) -> Message | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            return await connection.receive()
    return None


def _read_report(raw: Any) -> HostReport:
    try:
        data = raw["data"]
        texts = {
            key: printable(raw[key], 500)
            for key in ("host_name", "evenload", "python", "torch", "interface", "script", "digest")
        }
        return HostReport(**texts, mtu=int(raw["mtu"]), data=None if data is None else DataSummary(**data))
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"the other machine's report is invalid: {error!r}") from None
