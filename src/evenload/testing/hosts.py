"""Machines for tests: network namespaces of this machine, connected by a switch of a chosen speed.

Each has its own interfaces, addresses, ports and host name; they share files, clock, cores and memory. Requires root and Linux
with `ip` and `tc` (package iproute2).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.testing.relay import open_tun

_TOOLS = ("ip", "tc", "nsenter", "unshare", "mount")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_numbers = itertools.count(1)


@dataclass(frozen=True)
class VirtualHost:
    """One machine with its own network, host name and ``/etc/hosts``."""

    name: str
    address: str
    """IPv4 address of ``eth0``."""
    address6: str
    """IPv6 address of ``eth0``."""
    hosts_file: Path
    """Its ``/etc/hosts``, for processes that are started later."""
    namespace: str

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this machine with `subprocess.Popen`; the process id is the command's."""
        inside = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname && shift 2 && exec "$@"'
        enter = [_tool("nsenter"), f"--net=/run/netns/{self.namespace}", _tool("unshare"), "--mount", "--uts"]
        shell = ["sh", "-c", inside, "sh", str(self.hosts_file), self.name]
        return subprocess.Popen([*enter, *shell, *command], **options)

    def limit(self, mbit_per_s: float) -> None:
        """Limit the sending speed of this machine, in Mbit/s."""
        # Enough for 10 ms, and for a few of the kernel's large segments.
        burst = max(64_000, int(mbit_per_s * 1e6 / 8 * 0.01))
        _call("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{mbit_per_s:g}mbit",
              "burst", f"{burst}b", "latency", "100ms")  # fmt: skip

    def set_mtu(self, num_bytes: int) -> None:
        """Set the largest packet that this machine sends; the switch drops packets over 1500 bytes."""
        # Without segmentation offload: the kernel would split segments behind the interface, where nothing is dropped.
        self._ip("link", "set", "eth0", "mtu", str(num_bytes), "gso_max_segs", "1")

    def drop_port(self, port: int) -> None:
        """Silently drop what this machine sends from a TCP port, like a firewall."""
        for family in ("-4", "-6"):
            self._ip(family, "rule", "add", "priority", "10", "ipproto", "tcp", "sport", str(port), "blackhole")

    def drop_picked_ports(self) -> None:
        """Drop connections between ports that the system assigned, like a firewall that admits only configured ports."""
        picked = "32768-60999"  # assigned by Linux to clients and to listeners on port 0
        for family in ("-4", "-6"):
            self._ip(
                family, "rule", "add", "priority", "10", "ipproto", "tcp", "sport", picked, "dport", picked, "blackhole"
            )

    def unplug(self) -> None:
        """Disconnect the network until `plug`."""
        self._ip("link", "set", "eth0", "down")

    def plug(self) -> None:
        """Reconnect the network."""
        self._ip("link", "set", "eth0", "up")

    def _ip(self, *arguments: str) -> None:
        _call("ip", "-n", self.namespace, *arguments)


def why_not() -> str:
    """Return why machines can't be created on this system; empty if they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root to create network namespaces"
    name = f"evenload-{os.getpid()}-try"
    try:
        _call("ip", "netns", "add", name)
        _call("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
    except ConfigError as error:
        return f"network namespaces can't be created: {error}"
    finally:
        with contextlib.suppress(ConfigError):
            _call("ip", "netns", "del", name)
    return ""


@contextlib.contextmanager
def machines(
    num_machines: int = 2, mbit_per_s: float | None = None, *, delay_ms: float = 0.0
) -> Iterator[tuple[VirtualHost, ...]]:
    """Create machines ``box1``, ``box2``, ... on one switch, and remove them with everything that runs on them afterwards.

    Args:
        num_machines: number of machines.
        mbit_per_s: sending speed of each, in Mbit/s; None: unlimited.
        delay_ms: time that each packet is on its way, which a process adds; a round trip takes twice as long.

    Raises:
        ConfigError: they can't be created.
    """
    _sweep()
    stem = f"evenload-{os.getpid()}-{next(_numbers)}"
    switch = f"{stem}-switch"
    with tempfile.TemporaryDirectory(prefix="evenload-hosts-") as folder:
        boxes = tuple(
            VirtualHost(f"box{n}", f"10.77.0.{n}", f"fd77::{n}", Path(folder, f"hosts-box{n}"), f"{stem}-box{n}")
            for n in range(1, num_machines + 1)
        )
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        lines += [f"{box.address} {box.name}\n{box.address6} {box.name}-v6" for box in boxes]
        for box in boxes:
            box.hosts_file.write_text("\n".join(lines) + "\n")
        names = [switch, *(box.namespace for box in boxes)]
        relay: subprocess.Popen[bytes] | None = None
        try:
            for name in names:
                _call("ip", "netns", "add", name)
            _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _call("ip", "-n", switch, "link", "set", "br0", "up")
            fds = [open_tun(box.namespace, "eth0") for box in boxes] if delay_ms else []
            for number, box in enumerate(boxes, start=1):
                _connect(box, number, switch, is_there=bool(fds))
                if mbit_per_s is not None:
                    box.limit(mbit_per_s)
            if fds:
                relay = _start_relay(boxes, fds, delay_ms)
            yield boxes
        finally:
            if relay is not None:
                relay.kill()
                relay.wait()
            for name in names:
                _remove(name)


def _start_relay(boxes: Sequence[VirtualHost], fds: Sequence[int], delay_ms: float) -> subprocess.Popen[bytes]:
    devices = [f"{address}={fd}" for box, fd in zip(boxes, fds, strict=True) for address in (box.address, box.address6)]
    command = [sys.executable, "-m", "evenload.testing.relay", str(delay_ms), *devices]
    started = subprocess.Popen(command, pass_fds=list(fds))
    for fd in fds:
        os.close(fd)
    return started


def _connect(box: VirtualHost, number: int, switch: str, *, is_there: bool) -> None:
    """Give a machine its addresses; `is_there`: it has an interface."""
    if not is_there:
        port = f"port{number}"
        _call(
            "ip", "link", "add", "eth0", "netns", box.namespace, "type", "veth", "peer", "name", port, "netns", switch
        )
        _call("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    _call("ip", "-n", box.namespace, "link", "set", "lo", "up")
    _call("ip", "-n", box.namespace, "addr", "add", f"{box.address}/24", "dev", "eth0")
    _call("ip", "-n", box.namespace, "addr", "add", f"{box.address6}/64", "dev", "eth0", "nodad")
    _call("ip", "-n", box.namespace, "link", "set", "eth0", "up")


def _remove(name: str) -> None:
    """Kill the processes in a namespace and remove it."""
    with contextlib.suppress(ConfigError):
        for pid in _call("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(ConfigError):
        _call("ip", "netns", "del", name)


def _sweep() -> None:
    """Remove namespaces of killed tests."""
    for line in _call("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        parts = name.split("-")
        if len(parts) > 2 and parts[0] == "evenload" and parts[1].isdigit() and not Path("/proc", parts[1]).exists():
            _remove(name)


def _call(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise ConfigError(f"{tool} {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _tool(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise ConfigError(f"{name} is not installed (packages iproute2, util-linux)")
    return found
