"""A member: connects to the coordinator, introduces itself, probes the other machines, and receives its node rank."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from evenload.errors import LaunchError
from evenload.rendezvous import PROTOCOL, world
from evenload.rendezvous.address import Address, own_addresses
from evenload.rendezvous.connection import CONNECT_S, ConnectFailure, Connection, Message, connect, printable
from evenload.rendezvous.elsewhere import CoordinatorElsewhereError
from evenload.rendezvous.host_info import HostInfo
from evenload.rendezvous.reachability import ProbeListener, ProbeTarget, probe_all
from evenload.rendezvous.settings import RendezvousConfig, parse_endpoint
from evenload.rendezvous.world import World
from evenload.version import __version__

LAUNCH_ID = secrets.token_hex(8)
"""By it the coordinator knows a machine that connects again after the network was down."""
_RETRY_S = 0.5
_STATUS_S = 3.0
_ANSWER_S = 5.0
"""Time in which the coordinator must answer the introduction."""


@dataclass(frozen=True)
class MemberAssignment:
    node_rank: int
    world: World
    store_port: int
    coordinator_name: str
    is_late: bool
    """The run is in progress: the coordinator says which ranks begin."""


async def connect_to_coordinator(
    config: RendezvousConfig, addresses: Sequence[Address], log: Callable[[str], None]
) -> Connection:
    """Connect to the coordinator, which may start later than this machine.

    LaunchError: it can't be reached in time; the message distinguishes a refusal, silence and a missing route.
    """
    began_s = time.monotonic()
    deadline_s, next_status_s = began_s + config.connect_wait_s, began_s + _STATUS_S
    failures: dict[Address, ConnectFailure] = {}
    while True:
        for address in addresses:
            found = await connect(address, max(0.1, min(CONNECT_S, deadline_s - time.monotonic())))
            if isinstance(found, Connection):
                return found
            failures[address] = found
            if next_status_s <= time.monotonic() < deadline_s:
                next_status_s = time.monotonic() + _STATUS_S
                log(f"{address}: {found.describe()}; trying for {deadline_s - time.monotonic():.0f} s more")
        if time.monotonic() >= deadline_s:
            _give_up(config, failures)
        await asyncio.sleep(_RETRY_S)


def _give_up(config: RendezvousConfig, failures: dict[Address, ConnectFailure]) -> NoReturn:
    endpoint = config.endpoint
    seen = "; ".join(f"{address}: {failure.describe()}" for address, failure in failures.items())
    kinds = {failure.kind for failure in failures.values()}
    advice = []
    if "refused" in kinds:
        advice.append(f"on {endpoint.host} type: {config.command}")
    if kinds & {"silent", "unreachable"}:
        advice.append(
            f"on {endpoint.host} open the port: sudo ufw allow {endpoint.port}/tcp, or sudo firewall-cmd "
            f"--add-port={endpoint.port}/tcp"
        )
    advice.append(
        "HOST must be the name or address of one of the machines on which the command is typed (this one has "
        f"{', '.join(own_addresses()) or 'none'}); `evenload doctor --host {endpoint}` on this machine shows more"
    )
    raise LaunchError(
        f"--host {endpoint}: no connection to the coordinator within {config.connect_wait_s:g} s (--wait SECONDS tries "
        f"longer): {seen}.\n  " + "\n  ".join(advice)
    )


async def join(
    config: RendezvousConfig, connection: Connection, info: HostInfo, log: Callable[[str], None]
) -> MemberAssignment:
    """Take part in the rendezvous until the coordinator assigns the ranks; when cancelled, report it and disconnect.

    LaunchError: the coordinator refuses or is lost, or another program answers in its place.
    """
    try:
        async with ProbeListener(info.address) as target:
            return await _Join(config, connection, info, log).run(target)
    except asyncio.CancelledError:
        connection.send("left")
        await connection.finish()
        raise
    except OSError as error:
        raise LaunchError(
            f"no port can be opened at {info.address}, an address of this machine: {error.strerror}"
        ) from None


class _Join:
    def __init__(
        self, config: RendezvousConfig, connection: Connection, info: HostInfo, log: Callable[[str], None]
    ) -> None:
        self._endpoint = config.endpoint
        self._connection = connection
        self._info = info
        self._log = log
        self._coordinator_name = config.endpoint.host
        self._probing: asyncio.Task[None] | None = None

    async def run(self, target: ProbeTarget) -> MemberAssignment:
        self._connection.send(
            "hello",
            what="run",
            protocol=PROTOCOL,
            evenload=__version__,
            info=self._info,
            probe_port=target.port,
            probe_token=target.token,
            launch_id=LAUNCH_ID,
        )
        self._connection.start_heartbeats()
        try:
            async with asyncio.timeout(_ANSWER_S):
                message = await self._connection.receive()
        except TimeoutError:
            raise LaunchError(
                f"--host {self._place()}: connected, but no answer came within {_ANSWER_S:.0f} s: another program listens "
                "there (choose another port, the same on all machines), or large packets are lost on the way (MTU); "
                f"`evenload doctor --host {self._endpoint}` shows which"
            ) from None
        if message is None:
            raise LaunchError(
                f"--host {self._place()}: the program that listens there is not Evenload ({self._connection.lost}); choose "
                "another port, the same on all machines"
            )
        try:
            while message is not None:
                if message["kind"] == "start":
                    return self._assignment(message)
                self._handle(message)
                message = await self._connection.receive()
        finally:
            if self._probing is not None:
                self._probing.cancel()
        raise LaunchError(
            f"{self._coordinator_name}, the coordinator at {self._place()}, is gone: {self._connection.lost}; start again on "
            "all machines"
        )

    def _place(self) -> str:
        return f"{self._endpoint} ({self._connection.peer})"

    def _handle(self, message: Message) -> None:
        match message["kind"]:
            case "welcome":
                self._coordinator_name = printable(message.get("host_name") or self._coordinator_name, 200)
                self._connection.send("clock", time_s=time.time())
                interface = self._info.interface or "an unknown interface"
                self._log(
                    f"connected to {self._coordinator_name} at {self._connection.peer}, over {interface} "
                    f"({self._info.address}), which gloo and NCCL will use"
                )
            case "status" | "note":
                self._log(printable(message.get("text")))
            case "refuse":
                self._connection.close()
                raise LaunchError(printable(message.get("text")))
            case "elsewhere":
                raise CoordinatorElsewhereError(parse_endpoint(printable(message.get("endpoint"), 200)))
            case "targets":
                self._probing = asyncio.create_task(self._probe(message))

    async def _probe(self, message: Message) -> None:
        node_rank = int(message["node_rank"])
        targets = [ProbeTarget(**target) for target in message["targets"]]
        failures = await probe_all(targets[:node_rank] + targets[node_rank + 1 :])
        failures.insert(node_rank, None)
        self._connection.send("reachability", failures=failures)

    def _assignment(self, message: Message) -> MemberAssignment:
        return MemberAssignment(
            int(message["node_rank"]),
            world.from_message(message["world"]),
            int(message["store_port"]),
            self._coordinator_name,
            bool(message.get("is_late")),
        )
