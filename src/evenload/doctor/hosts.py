"""The doctor of two machines: `evenload doctor --host` on one, `evenload doctor --serve` on the other; standard library only."""

from __future__ import annotations

import asyncio
import socket
import time

from evenload.doctor.checklist import HOSTS
from evenload.doctor.finding import Options, exit_code
from evenload.doctor.report import as_json, as_text
from evenload.doctor.runner import run_checks
from evenload.errors import ConfigError, LaunchError
from evenload.rendezvous.address import is_own, listen_at, own_addresses, resolve
from evenload.rendezvous.connection import MAX_MESSAGE_BYTES, Connection, in_tasks
from evenload.rendezvous.probe import HostReport, answer_doctor, make_host_report
from evenload.rendezvous.settings import DEFAULT_PORT, Endpoint, parse_endpoint

DEADLINE_S = 30.0
"""For all checks together; a machine that answers takes about 3 s."""
_HELLO_S = 2.0


def examine_host(host: str, port: int, script: str, data: str, *, json_: bool) -> int:
    options = Options(host=str(_endpoint(host, port)), script=script, data=data)
    findings = run_checks(options, deadline_s=DEADLINE_S, groups=HOSTS)
    print(as_json(findings) if json_ else as_text(findings))
    return exit_code(findings)


def serve(host: str, port: int, script: str, data: str) -> int:
    """Answer doctors of other machines until Ctrl-C."""
    endpoint = _endpoint(host, port) if host else Endpoint("0.0.0.0", port or DEFAULT_PORT)
    report = make_host_report("", script, data)
    if script and not report.digest:
        raise ConfigError(f"--script {script}: it can't be read here")
    if report.data is not None and report.data.kind == "missing":
        raise ConfigError(f"--data {data}: there is no such file or folder here")
    listener = _listen(endpoint, bool(host))
    number = listener.getsockname()[1]
    listed = endpoint.host if host else ", ".join(own_addresses()) or "this machine"
    print(f"evenload doctor: answering at port {number} of {listed}; Ctrl-C ends it", flush=True)
    example = endpoint.host if host else (own_addresses() or [socket.gethostname()])[0].partition(" ")[0]
    print(f"evenload doctor: on the other machine type: evenload doctor --host {Endpoint(example, number)}", flush=True)
    try:
        asyncio.run(_answer(listener, report))
    except KeyboardInterrupt:
        print("evenload doctor: ended", flush=True)
    return 0


async def _answer(listener: socket.socket, report: HostReport) -> None:
    number = listener.getsockname()[1]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            async with asyncio.timeout(_HELLO_S):
                message = await connection.receive()
        except TimeoutError:
            message = None
        if message is None or message["kind"] != "hello":
            _log(f"{connection.peer.host} connected, but it is not Evenload")
        elif message.get("what") == "doctor":
            await answer_doctor(connection, report, message, _log)
        else:
            # It may run elsewhere, so that both sides must print it.
            _log(f"{connection.peer.host} wants to train here, but this is the doctor; end it with Ctrl-C first")
            connection.send(
                "refuse",
                text=f"a doctor listens at port {number} of {socket.gethostname()}, not a run: end it there (Ctrl-C) and type "
                "the command of the run",
            )
        await connection.finish(0.5)

    async with await asyncio.start_server(in_tasks(handle), sock=listener, limit=MAX_MESSAGE_BYTES) as server:
        await server.serve_forever()


def _log(text: str) -> None:
    print(f"evenload doctor: {time.strftime('%H:%M:%S')} {text}", flush=True)


def _endpoint(host: str, port: int) -> Endpoint:
    endpoint = parse_endpoint(host)
    if port and port != endpoint.port:
        if str(parse_endpoint(host, default_port=port)) == str(endpoint):
            raise ConfigError(f"--host {host} and --port {port} name two ports; leave one out")
        endpoint = Endpoint(endpoint.host, port)
    return endpoint


def _listen(endpoint: Endpoint, is_named: bool) -> socket.socket:
    host = endpoint.host
    if is_named:
        try:
            own = [address for address in resolve(endpoint) if is_own(address)]
        except LaunchError as error:
            raise ConfigError(str(error)) from None
        if not own:
            here = ", ".join(own_addresses()) or "none that others can reach"
            raise ConfigError(f"--host {endpoint.host} --serve: this machine has no such address; its own are {here}")
        host = own[0].host
    try:
        return listen_at(host, endpoint.port)
    except OSError as error:
        raise ConfigError(
            f"port {endpoint.port} can't be opened here ({error.strerror}); choose another: --port N"
        ) from None


def check_options(*, host: str, serving: bool, script: str, data: str, json_: bool, alone: tuple[str, ...]) -> None:
    """Raise `ConfigError` for options without effect; ``alone`` are those given that need a single machine."""
    if not host and not serving:
        for option, value in (("--script", script), ("--data", data)):
            if value:
                raise ConfigError(f"{option} {value} compares two machines: add --host HOST, or --serve")
        return
    if alone:
        raise ConfigError(
            f"{', '.join(alone)}: without effect with {'--serve' if serving else '--host'}, which examines two machines; leave "
            "it out"
        )
    if serving and json_:
        raise ConfigError(
            "--json has no effect with --serve, which answers until Ctrl-C; give it with --host, on the other side"
        )
