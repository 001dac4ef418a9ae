"""What machines are to each other: `evenload doctor --host` on one, `evenload doctor --serve` on the other.

Standard library alone, as all of the doctor's parent.
"""

from __future__ import annotations

import socket
import time

from evenload.doctor.checklist import HOSTS
from evenload.doctor.finding import Options, exit_code
from evenload.doctor.report import as_json, as_text
from evenload.doctor.runner import run_checks
from evenload.errors import ConfigError, LaunchError
from evenload.rendezvous.address import is_own, listen_at, own_addresses, resolve
from evenload.rendezvous.messages import Wire
from evenload.rendezvous.probe import attend, make_sheet
from evenload.rendezvous.settings import DEFAULT_PORT, Endpoint, parse_endpoint

DEADLINE_S = 30.0
"""For all checks together; a machine that answers is looked at in about 3 s."""
_HELLO_S = 2.0


def look_at_host(host: str, port: int, script: str, data: str, *, json_: bool) -> int:
    """Looks at another machine, prints the findings, and returns the exit code.

    Raises:
        ConfigError: HOST is none, or two ports are named.
    """
    endpoint = _endpoint(host, port)
    options = Options(host=str(endpoint), script=script, data=data)
    findings = run_checks(options, deadline_s=DEADLINE_S, groups=HOSTS)
    print(as_json(findings) if json_ else as_text(findings))
    return exit_code(findings)


def serve(host: str, port: int, script: str, data: str) -> int:
    """Answers doctors of other machines until Ctrl-C; the exit code.

    Raises:
        ConfigError: HOST is no address of this machine, or the port can't be opened.
    """
    endpoint = _endpoint(host, port) if host else Endpoint("0.0.0.0", port or DEFAULT_PORT)
    sheet = make_sheet("", script, data)
    if script and not sheet.digest:
        raise ConfigError(f"--script {script}: it can't be read here")
    if sheet.data is not None and sheet.data.kind == "missing":
        raise ConfigError(f"--data {data}: there is no such file or folder here")
    listener = _listen(endpoint, bool(host))
    number = listener.getsockname()[1]
    places = ", ".join(own_addresses()) if not host else endpoint.host
    print(f"evenload doctor: answering at port {number} of {places or 'this machine'}; Ctrl-C ends it", flush=True)
    example = (own_addresses() or [socket.gethostname()])[0].partition(" ")[0] if not host else endpoint.host
    print(f"evenload doctor: on the other machine type: evenload doctor --host {Endpoint(example, number)}", flush=True)
    try:
        with listener:
            while True:
                connection, _ = listener.accept()
                wire = Wire(connection)
                message = wire.receive(_HELLO_S)
                if message is None or message["kind"] != "hello":
                    _say(f"{wire.peer.host} connected, but did not speak as Evenload does")
                    wire.close()
                elif message.get("what") != "doctor":
                    # It may run elsewhere, too, so both sides are told.
                    _say(f"{wire.peer.host} wants to train here, but this is the doctor; end it with Ctrl-C first")
                    wire.send(
                        "refuse",
                        text=f"a doctor listens at port {number} of {socket.gethostname()}, not a run: end it there (Ctrl-C) "
                        "and type the command of the run",
                    )
                    wire.finish(0.5)
                else:
                    attend(wire, sheet, message, _say)
    except KeyboardInterrupt:
        print("evenload doctor: ended", flush=True)
        return 0


def _say(text: str) -> None:
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
            here = ", ".join(own_addresses()) or "none that others reach"
            raise ConfigError(f"--host {endpoint.host} --serve: that is no address of this machine; its own are {here}")
        host = own[0].host
    try:
        return listen_at(host, endpoint.port)
    except OSError as error:
        raise ConfigError(
            f"port {endpoint.port} can't be opened here ({error.strerror}); choose another: --port N"
        ) from None


def check_options(*, host: str, serving: bool, script: str, data: str, json_: bool, alone: tuple[str, ...]) -> None:
    """Options that contradict each other, or have no effect.

    Args:
        host: ``--host``.
        serving: ``--serve``.
        script: ``--script``.
        data: ``--data``.
        json_: ``--json``.
        alone: given options that only mean something for this machine alone.

    Raises:
        ConfigError: there are such.
    """
    if not host and not serving:
        for option, value in (("--script", script), ("--data", data)):
            if value:
                raise ConfigError(f"{option} {value} compares two machines: add --host HOST, or --serve")
        return
    if alone:
        raise ConfigError(
            f"{', '.join(alone)}: without effect with {'--serve' if serving else '--host'}, which looks at two machines; leave "
            "it out"
        )
    if serving and json_:
        raise ConfigError(
            "--json has no effect with --serve, which answers until Ctrl-C; give it with --host, on the other side"
        )
