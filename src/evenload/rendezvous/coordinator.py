"""The coordinator: the machine whose address is HOST accepts the members, compares them with itself, and numbers the ranks."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenload.errors import ConfigError, LaunchError
from evenload.rendezvous import PROTOCOL, host_info, world
from evenload.rendezvous.address import chosen_interface, gloo_address
from evenload.rendezvous.connection import MAX_MESSAGE_BYTES, Connection, Message, printable
from evenload.rendezvous.elsewhere import raise_if_elsewhere
from evenload.rendezvous.host_info import HostInfo
from evenload.rendezvous.peer_monitor import Peer
from evenload.rendezvous.probe import answer_doctor, host_report_of
from evenload.rendezvous.reachability import (
    ProbeListener,
    ProbeTarget,
    failure_from_message,
    probe_all,
)
from evenload.rendezvous.settings import Endpoint, RendezvousConfig
from evenload.rendezvous.world import World
from evenload.version import __version__

STATUS_S = 5.0
"""Time between two messages about the machines that are here and those that are missing."""
_HELLO_S = 5.0
_REPORT_S = 8.0
"""Time in which the machines probe each other."""


@dataclass(eq=False)
class _Member:
    connection: Connection
    info: HostInfo
    target: ProbeTarget
    launch_id: str
    """The same when a machine connects again after the network was down."""
    clock_offset_s: float = 0.0
    """Its clock minus ours."""
    failures: list[Any] | None = None
    """The outcomes of its probes, by node rank; None until it has reported."""


@dataclass(frozen=True)
class LateMember:
    """A machine that connects to a run in progress; it was compared with the coordinator's."""

    connection: Connection
    info: HostInfo
    target: ProbeTarget
    clock_offset_s: float
    launch_id: str


def closed_reason(config: RendezvousConfig, built: World) -> str:
    """Return the text with which machines are refused that can't join a run in progress."""
    names = ", ".join(machine.name for machine in built.machines if machine.name)
    return (
        f"the run at {config.endpoint} began at {time.strftime('%H:%M:%S')} with {names}, and no machine can join it now; wait "
        "for its end, or choose another port"
    )


class Coordinator:
    """Accepts members from `start` until `close`; `gather` waits for them and `assign` numbers them.

    Later ones join the run that is in progress (`join_later`), as long as fewer than the largest number of machines take part.
    """

    def __init__(
        self, config: RendezvousConfig, info: HostInfo, listeners: Sequence[socket.socket], log: Callable[[str], None]
    ) -> None:
        self._config = config
        self._info = info
        self._listeners = listeners
        self._log = log
        self._servers: list[asyncio.Server] = []
        self._handlers: dict[Connection, asyncio.Task[Any]] = {}
        """The tasks that receive from members."""
        self._doctors: set[asyncio.Task[Any]] = set()
        self._members: list[_Member] = []
        self._error: LaunchError | None = None
        self._changed = asyncio.Event()
        self._early: list[_Member] = []
        self._in_run = set[Connection]()
        """Connections of machines that joined later, which the monitor has."""
        self._why_closed: Callable[[], str] = str
        """Returns the text with which connections are refused; empty: they are not."""
        self.join_later: Callable[[LateMember], Awaitable[str]] | None = None
        """Set once a run is in progress that machines may join: takes one in, or returns why it can't join."""

    async def start(self) -> None:
        for listener in self._listeners:
            self._servers.append(await asyncio.start_server(self._accept, sock=listener, limit=MAX_MESSAGE_BYTES))

    async def gather(self) -> None:
        """Wait until enough machines are here; LaunchError if too few connect in time or one of them can't take part."""
        config = self._config
        left_s = config.gather_wait_s
        while left_s > 0 and not await self._wait_until(self._is_full, min(STATUS_S, left_s)):
            left_s -= STATUS_S
            if left_s > 0:
                self._send_status(left_s)
        if len(self._members) + 1 < config.min_nodes:
            names = self._names()
            raise LaunchError(
                f"only {len(names)} of {config.nodes} machines connected within {config.gather_wait_s:g} s: "
                f"{', '.join(names)}; type on each of the others: {config.command} (--wait SECONDS waits longer). If that was "
                f"done, type there: {self._doctor()}"
            )

    async def assign(self, settings: Mapping[str, Any], store_port: int) -> tuple[World, list[Peer]]:
        """Let all machines probe each other, and send them their ranks.

        ``store_port`` is that of the store that this machine will serve. LaunchError: a machine can't reach another one, or
        disconnects meanwhile.
        """
        members = self._members[: self._config.max_nodes - 1]
        self._info = self._info_towards(members)
        infos = [self._info, *(member.info for member in members)]
        try:
            indices = world.order(infos, self._config.max_nodes)
            built = world.build_world([infos[index] for index in indices], settings)
        except ConfigError as error:
            raise LaunchError(str(error)) from None
        members = [members[index - 1] for index in indices[1:]]
        if members:
            await self._check_reachability(members, built)
        self._why_closed = lambda: "the run begins now; start the same command again to join it"
        kept = {member.connection for member in members}
        self._early = [member for member in self._members if member.connection not in kept]
        kept |= {member.connection for member in self._early}
        others = [connection for connection in self._handlers if connection not in kept]
        await self._stop_handlers()
        for connection in others:
            connection.send("refuse", text="the run has begun")
        await asyncio.gather(*(connection.finish(0.2) for connection in others))
        peers = []
        for node_rank, member in enumerate(members, start=1):
            member.connection.send("start", node_rank=node_rank, world=built, store_port=store_port)
            name, ranks = built.machines[node_rank].name, built.describe_ranks(node_rank)
            peers.append(Peer(member.connection, name, ranks, member.clock_offset_s, member.launch_id))
        self._members.clear()
        return built, peers

    def run_in_progress(
        self, why_closed: Callable[[], str], join_later: Callable[[LateMember], Awaitable[str]] | None
    ) -> None:
        """Let later machines join the run by `join_later`; None: refuse them, as doctors are, by what `why_closed` returns."""
        self.join_later, self._why_closed = join_later, why_closed
        for member in self._early:  # it came after the machines were counted
            self._handlers[member.connection] = asyncio.create_task(self._join_late(member))

    async def refuse_all(self, text: str) -> None:
        """End the rendezvous with the same text on all machines."""
        self._why_closed = lambda: text
        connections = list(self._handlers)
        await self._stop_handlers()
        for connection in connections:
            connection.send("refuse", text=text)
        await asyncio.gather(*(connection.finish() for connection in connections))
        await self.close()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for listener in self._listeners:
            listener.close()

    # connections

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._handlers[connection] = asyncio.create_task(self._handle(connection))

    async def _handle(self, connection: Connection) -> None:
        """Serve one connection: that of a member until its ranks are assigned, that of a doctor to its end."""
        try:
            await self._serve(connection)
        except LaunchError as error:
            if self.join_later is not None:
                connection.send("refuse", text=str(error))
                self._handlers.pop(connection, None)
                await connection.finish(0.2)
                return
            self._error = error
            self._changed.set()
        else:
            self._handlers.pop(connection, None)
            if connection not in self._in_run:
                await connection.finish(0.2)

    async def _serve(self, connection: Connection) -> None:
        member = None
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = await connection.receive()
                if hello is None or hello["kind"] != "hello":
                    return
                if (what := hello.get("what")) == "takeover" or (what == "gone_on" and self.join_later is not None):
                    connection.send("refuse", text="the other machines have gone on without this one")
                    return
                if what in ("run_elsewhere", "gone_on"):
                    if what == "run_elsewhere" and self.join_later is None and not self._why_closed():
                        raise_if_elsewhere(hello, self._info)
                    return
                is_doctor = what == "doctor"
                if (is_doctor or self.join_later is None) and (reason := self._why_closed()):
                    connection.send("refuse", text=reason)
                elif is_doctor:
                    self._doctors.add(self._handlers.pop(connection))
                else:
                    member = await self._introduce(connection, hello)
        except TimeoutError:
            if not self._why_closed():
                text = (
                    f"{connection.peer.host} connected, but its introduction did not arrive whole within {_HELLO_S:.0f} s: it "
                    f"is another program, or large packets are lost on the way (MTU); type there: {self._doctor()}"
                )
                self._log(text)
                connection.send("refuse", text=text)
            return
        if member is not None and self.join_later is not None:
            self._compare(member)
            await self._join_late(member)
        elif member is not None:
            self._admit(member)
            await self._follow(member)
        elif connection not in self._handlers:
            await answer_doctor(connection, host_report_of(self._info), hello)

    async def _introduce(self, connection: Connection, hello: Message) -> _Member | None:
        host = connection.peer.host
        version = printable(hello.get("evenload"), 50)
        if hello.get("protocol") != PROTOCOL or version != __version__:
            raise LaunchError(host_info.version_difference(self._info.label, host, "evenload", (__version__, version)))
        try:
            info = host_info.from_message(hello.get("info"))
            target = ProbeTarget(info.address, int(hello["probe_port"]), str(hello["probe_token"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            self._log(f"{host} connected, but its introduction is invalid; it is ignored")
            return None
        if info.job_id != self._info.job_id:
            connection.send(
                "refuse",
                text=f"--rdzv-id {info.job_id or '(none)'}: the job at {self._config.endpoint} has another one "
                f"(--rdzv-id {self._info.job_id or '(none)'}); give the same, or another port",
            )
            return None
        connection.start_heartbeats()
        sent_s = time.time()
        connection.send("welcome", host_name=self._info.host_name)
        reply = await connection.receive()
        if reply is None or reply["kind"] != "clock":
            self._log_left(connection, info, is_stopped=reply is not None)
            return None
        member = _Member(connection, info, target, printable(hello.get("launch_id", ""), 50))
        with suppress(KeyError, TypeError, ValueError):
            member.clock_offset_s = float(reply["time_s"]) - (sent_s + time.time()) / 2
        return member

    async def _join_late(self, member: _Member) -> None:
        """Let a machine join the run in progress, or refuse it."""
        connection = member.connection
        self._handlers.pop(connection, None)
        late = LateMember(connection, member.info, member.target, member.clock_offset_s, member.launch_id)
        reason = await self.join_later(late) if self.join_later is not None else self._why_closed()
        if reason:
            self._log(f"{member.info.label} can't join the run: {reason}")
            connection.send("refuse", text=reason)
            await connection.finish(0.2)
        else:
            self._in_run.add(connection)

    def _admit(self, member: _Member) -> None:
        self._compare(member)
        self._members.append(member)
        self._changed.set()

    def _compare(self, member: _Member) -> None:
        """Compare a machine with this one; LaunchError if they can't train together."""
        info = member.info
        differences = host_info.compare(self._info_towards([member]), info, member.clock_offset_s)
        if differences.errors:
            raise LaunchError("\n  ".join(differences.errors))
        devices = ", ".join(slot.name for slot in info.slots)
        self._log(f"{info.label} is here over {info.interface or 'an unknown interface'}: {devices}")
        for note in differences.notes:
            self._log(f"note: {note}")
            member.connection.send("note", text=f"note: {note}")

    async def _follow(self, member: _Member) -> None:
        """Receive from a member until it leaves, or its ranks are assigned."""
        message = None
        async for message in member.connection.messages():
            if message["kind"] == "left":
                break
            if message["kind"] == "reachability":
                failures = message.get("failures")
                member.failures = failures if isinstance(failures, list) else []
                self._changed.set()
        self._members.remove(member)
        self._changed.set()
        self._log_left(member.connection, member.info, is_stopped=not member.connection.lost)

    def _log_left(self, connection: Connection, info: HostInfo, is_stopped: bool) -> None:
        self._log(f"{info.label} left: {'it was stopped there' if is_stopped else connection.lost}")

    async def _stop_handlers(self) -> None:
        tasks = tuple(self._handlers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._handlers.clear()

    async def _wait_until(self, is_over: Callable[[], bool], limit_s: float) -> bool:
        """Return False if a condition does not hold in time; LaunchError if a machine connects that can't take part."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._error is None and not is_over():
                    self._changed.clear()
                    await self._changed.wait()
        if self._error is not None:
            raise self._error
        return is_over()

    # all machines are here

    def _info_towards(self, members: Sequence[_Member]) -> HostInfo:
        """Our facts; with the address at which members reached us, if we listen at all addresses."""
        if self._info.address or not members:
            return self._info
        own = members[0].connection.own_host
        interface = chosen_interface(own)
        endpoint = str(Endpoint(own, int(self._listeners[0].getsockname()[1])))
        return replace(self._info, address=gloo_address(interface, own), interface=interface, endpoint=endpoint)

    async def _check_reachability(self, members: Sequence[_Member], built: World) -> None:
        try:
            async with ProbeListener(self._info.address) as own_target:
                own_failures = await self._probe_all(members, built, own_target)
        except OSError as error:
            raise LaunchError(
                f"no port can be opened at {self._info.address} on {self._info.host_name}: {error.strerror}"
            ) from None
        reports = [own_failures, *(member.failures for member in members)]
        if problem := _unreachable(built, reports):
            raise LaunchError(problem)

    async def _probe_all(self, members: Sequence[_Member], built: World, own_target: ProbeTarget) -> list[Any]:
        targets = [own_target, *(member.target for member in members)]
        for node_rank, member in enumerate(members, start=1):
            member.connection.send("targets", targets=targets, node_rank=node_rank)

        def is_over() -> bool:
            return any(m not in self._members for m in members) or all(m.failures is not None for m in members)

        failures, _ = await asyncio.gather(probe_all(targets[1:]), self._wait_until(is_over, _REPORT_S))
        for node_rank, member in enumerate(members, start=1):
            if member not in self._members:
                raise LaunchError(f"{built.machines[node_rank].name} left while the machines probed each other")
        return [None, *(failure and asdict(failure) for failure in failures)]

    # texts

    def _is_full(self) -> bool:
        return len(self._members) + 1 >= self._config.max_nodes

    def _names(self) -> list[str]:
        return [self._info.host_name, *(member.info.label for member in self._members)]

    def _send_status(self, left_s: float) -> None:
        config, names = self._config, self._names()
        need = config.nodes if config.min_nodes == config.max_nodes else f"{config.min_nodes} to {config.max_nodes}"
        enough = len(names) >= config.min_nodes
        text = (
            f"{len(names)} of {need} machines {'is' if len(names) == 1 else 'are'} here: {', '.join(names)}; "
            + (f"the run begins in {left_s:.0f} s with the machines that are here then. " if enough else "")
            + f"type on each of the others: {config.command}"
            + ("" if enough else f" (waiting {left_s:.0f} s more; if that was done, type there: {self._doctor()})")
        )
        self._log(text)
        for member in self._members:
            member.connection.send("status", text=text)

    def _doctor(self) -> str:
        return f"evenload doctor --host {self._config.endpoint}"


def _unreachable(built: World, reports: Sequence[Sequence[Any] | None]) -> str:
    """Return the error about machines that can't reach each other; empty if all can.

    ``reports``: by node rank, the outcomes of a machine's probes, by node rank; None if it did not report.
    """
    problems = []
    for source, failures in zip(built.machines, reports, strict=True):
        if failures is None or len(failures) != len(built.machines):
            problems.append(f"{source.name} did not report which machines it can reach")
            continue
        for target, raw in zip(built.machines, failures, strict=True):
            with suppress(ValueError):
                if (failure := failure_from_message(raw)) is not None:
                    problems.append(
                        f"{source.name} can't reach {target.name} at {target.address}: {failure.describe()}"
                    )
    if not problems:
        return ""
    return (
        "the machines reach the coordinator, but not each other at the ports that gloo and NCCL pick (any from 1024 up):\n  "
        + "\n  ".join(problems)
        + "\n  open all ports between these machines, on each: sudo ufw allow from ADDRESS-OF-THE-OTHER, or sudo firewall-cmd "
        "--zone=trusted --add-source=ADDRESS-OF-THE-OTHER; `evenload doctor --host` shows more"
    )
