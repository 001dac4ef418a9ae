"""Checks of the host name and of the port of the rendezvous."""

from __future__ import annotations

import errno
import os
import shlex
import socket
from pathlib import Path

from evenload import hardware
from evenload.doctor.finding import Finding, Options, fail, ok, warn

LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def host_name(options: Options) -> Finding:
    """Check that the host name resolves to this machine: gloo and NCCL choose their interface by it."""
    return evaluate_host_name(socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", ""))


def evaluate_host_name(name: str, gloo_interfaces: str = "") -> Finding:
    known = _interfaces()
    names = [interface.name for interface in known] or [name for _, name in socket.if_nameindex()]
    for wanted in filter(None, gloo_interfaces.split(",")):
        if wanted not in names:
            found = f"GLOO_SOCKET_IFNAME={gloo_interfaces}, but there is no interface {wanted}"
            return fail(found, f"one of {', '.join(names)}", "unset GLOO_SOCKET_IFNAME")
    outside = [
        (interface.name, interface.addresses[0])
        for interface in known
        if interface.is_up and interface.addresses and not interface.is_loopback
    ]
    expected = f"{name} resolves to an address of this machine, so that others can reach its ranks"
    entry = f"{outside[0][1] if outside else '127.0.1.1'} {name}"
    fix = f"echo {shlex.quote(entry)} | sudo tee -a /etc/hosts"
    try:
        answers = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return warn(f"{name} does not resolve: {error.strerror}", expected, fix)
    addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    own = [address for address in addresses if _is_own(address)]
    if not own:
        return warn(f"{name} resolves to {', '.join(addresses)}, which no interface of this machine has", expected, fix)
    by_address = {address: interface.name for interface in known for address in interface.addresses}
    found = f"{name} is " + ", ".join(f"{address} ({by_address.get(address, 'loopback')})" for address in own)
    if all(address.startswith("127.") or address == "::1" for address in own):
        found += "; sufficient for this machine alone"
        found += f", several machines use {outside[0][1]} ({outside[0][0]})" if outside else ""
    return ok(found, expected)


def port(options: Options) -> Finding:
    if options.port == 0:
        return ok(f"any free port, such as {hardware.free_port()}")
    expected = f"port {options.port} is free"
    try:
        with socket.socket() as probe:
            # As the store does, so that connections of the previous run do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", options.port))
            probe.listen()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            found = f"port {options.port} cannot be used: {error.strerror}"
            return fail(found, expected, f"evenload doctor --port {hardware.free_port()}")
        owner = port_owner(options.port, options.root_path)
        if owner is None:
            return fail(f"port {options.port} is in use", expected, f"sudo ss -ltnp 'sport = :{options.port}'")
        pid, command = owner[0], "another program" if options.private else owner[1]
        return fail(f"port {options.port} is used by process {pid} ({command})", expected, f"kill {pid}")
    return ok(expected, expected)


def port_owner(number: int, root: Path = hardware.ROOT) -> tuple[int, str] | None:
    """Return pid and command of the process that listens on a TCP port; None if this user cannot see it."""
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
            continue  # it has ended, or belongs to another user
    return None


def _interfaces() -> tuple[hardware.Interface, ...]:
    try:
        return hardware.interfaces()
    except ImportError:
        return ()  # psutil is missing, which the check of the packages reports


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
