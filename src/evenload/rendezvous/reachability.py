"""Probes of ports: each machine connects to every other one at a port of the kind that gloo and NCCL use.

gloo and NCCL listen at ports that the system picks. A firewall that lets only the coordinator's port through, an address that
is valid on one machine only, or packets that are too large for the network would make the ranks hang for minutes in their
first collective. The probes find that within seconds.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from evenload.rendezvous.address import numeric
from evenload.rendezvous.connection import ConnectFailure, FailureKind, in_tasks, open_stream, printable

PROBE_S = 5.0
_BULK_BYTES = 1 << 16
"""More than any packet, so that a network that passes only small ones is found too."""


@dataclass(frozen=True)
class ProbeTarget:
    """Address and token of a `ProbeListener`."""

    host: str
    port: int
    token: str


class ProbeListener:
    """Answers probes at a port that the system picked: sends a token, reads 64 KiB, confirms them."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._token = secrets.token_hex(8)

    async def __aenter__(self) -> ProbeTarget:
        self._server = await asyncio.start_server(in_tasks(self._answer), self._host, 0)
        return ProbeTarget(self._host, int(self._server.sockets[0].getsockname()[1]), self._token)

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(2 * PROBE_S):
                writer.write(self._token.encode())
                await reader.readexactly(_BULK_BYTES)
                writer.write(b".")
                await reader.read()


async def probe(target: ProbeTarget, limit_s: float = PROBE_S) -> ConnectFailure | None:
    """Connect to another machine's listener and send it 64 KiB; None if all of it arrived, else why not."""
    began_s = time.monotonic()
    token, received = target.token.encode(), b""
    kind: FailureKind = "other_program"
    try:
        address = numeric(target.host, target.port)
    except OSError as error:
        return ConnectFailure("failed", 0.0, error.strerror or str(error))
    opened = await open_stream(address, limit_s)
    if isinstance(opened, ConnectFailure):
        return opened
    reader, writer = opened
    try:
        with closing(writer):
            async with asyncio.timeout(began_s + limit_s - time.monotonic()):
                while len(received) < len(token):
                    data = await reader.read(len(token) - len(received))
                    received += data
                    if not data or not token.startswith(received):
                        return ConnectFailure("other_program", time.monotonic() - began_s)
                writer.write(bytes(_BULK_BYTES))
                if await reader.read(1) == b".":
                    return None
    except TimeoutError:
        kind = "stalled" if received == token else "silent"
    except OSError:
        pass
    return ConnectFailure(kind, time.monotonic() - began_s)


async def probe_all(targets: Sequence[ProbeTarget]) -> list[ConnectFailure | None]:
    return await asyncio.gather(*map(probe, targets))


def failure_from_message(raw: Any) -> ConnectFailure | None:
    """Read the outcome of a probe from a message; ValueError if it is invalid."""
    try:
        return raw and ConnectFailure(raw["kind"], float(raw["seconds"]), printable(raw["detail"], 200))
    except (KeyError, TypeError) as error:
        raise ValueError(f"invalid outcome of a probe: {error!r}") from None
