"""Does this machine know itself by name, and is the port free?"""

from __future__ import annotations

import errno
import os
import shlex
import socket
from pathlib import Path

from evenload import hardware
from evenload.doctor.finding import Finding, Options

HOST_NAME, PORT = "host name", "port"
LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def host_name(options: Options) -> Finding:
    """Resolves the host name, to find the interface that gloo and NCCL will choose by it."""
    del options
    return examine_host_name(socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", ""))


def examine_host_name(name: str, gloo_interfaces: str = "") -> Finding:
    """What a host name, and the interfaces named to gloo, are worth on this machine."""
    known = _interfaces()
    names = [interface.name for interface in known] or [name for _, name in socket.if_nameindex()]
    for wanted in filter(None, gloo_interfaces.split(",")):
        if wanted not in names:
            found = f"GLOO_SOCKET_IFNAME={gloo_interfaces}, but there is no interface {wanted}"
            return Finding(HOST_NAME, "fail", found, f"one of {', '.join(names)}", "unset GLOO_SOCKET_IFNAME")
    outside = [
        (interface.name, interface.addresses[0])
        for interface in known
        if interface.is_up and interface.addresses and not interface.is_loopback
    ]
    expected = f"{name} resolves to an address of this machine, so that others can reach its ranks"
    entry = f"{outside[0][1] if outside else '127.0.1.1'} {name}"
    mend = f"echo {shlex.quote(entry)} | sudo tee -a /etc/hosts"
    try:
        answers = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return Finding(HOST_NAME, "warn", f"{name} does not resolve: {error.strerror}", expected, mend)
    addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    own = [address for address in addresses if _is_own(address)]
    if not own:
        found = f"{name} resolves to {', '.join(addresses)}, which no interface here has"
        return Finding(HOST_NAME, "warn", found, expected, mend)
    by_address = {address: interface.name for interface in known for address in interface.addresses}
    found = f"{name} is " + ", ".join(f"{address} ({by_address.get(address, 'loopback')})" for address in own)
    if all(address.startswith("127.") or address == "::1" for address in own):
        found += "; enough for this machine alone" + (
            f", several machines meet at {outside[0][1]} ({outside[0][0]})" if outside else ""
        )
    return Finding(HOST_NAME, "ok", found, expected)


def port(options: Options) -> Finding:
    """Binds the port of the rendezvous, or any."""
    if options.port == 0:
        return Finding(PORT, "ok", f"any: {hardware.free_port()} is free, for one")
    expected = f"port {options.port} is free"
    try:
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as the store does: the last run's is no hindrance
            probe.bind(("", options.port))
            probe.listen()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            found = f"port {options.port} can't be used: {error.strerror}"
            return Finding(PORT, "fail", found, expected, f"evenload doctor --port {hardware.free_port()}")
        holder = port_holder(options.port, options.root_path)
        if holder is None:
            found, mend = f"port {options.port} is in use", f"sudo ss -ltnp 'sport = :{options.port}'"
        else:
            pid, command = holder[0], "another program" if options.private else holder[1]
            found, mend = f"port {options.port} is held by process {pid} ({command})", f"kill {pid}"
        return Finding(PORT, "fail", found, expected, mend)
    return Finding(PORT, "ok", expected, expected)


def port_holder(number: int, root: Path = hardware.ROOT) -> tuple[int, str] | None:
    """The process that listens on a TCP port, as far as this user may see: its id and command."""
    sockets = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        try:
            rows = (root / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if len(fields) > 9 and fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == number:
                sockets.add(f"socket:[{fields[9]}]")
    for process in (root / "proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return int(process.name), command[:60]
        except OSError:
            continue  # gone meanwhile, or another user's
    return None


def _interfaces() -> tuple[hardware.Interface, ...]:
    try:
        return hardware.interfaces()
    except ImportError:
        return ()  # psutil is missing, which is told elsewhere


def _is_own(address: str) -> bool:
    """Whether an address belongs to this machine: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
