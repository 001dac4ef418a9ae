"""Machines for tests: network namespaces of this one, joined by a switch, at a speed that the test chooses.

Each has its own interfaces, addresses, ports and host name; files, clock, cores and memory are shared. Root is needed, and
Linux with `ip` and `tc` (the package iproute2).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError

_TOOLS = ("ip", "tc", "nsenter", "unshare", "mount")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Box:
    """One machine: its network, its host name, its own ``/etc/hosts``."""

    name: str
    address: str
    """IPv4, on ``eth0``."""
    address6: str
    """IPv6, on ``eth0``."""
    hosts_file: Path
    """What stands for ``/etc/hosts``; what is started later sees what is written here."""
    namespace: str

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on this machine, as `subprocess.Popen` does; its id is the command's own."""
        inside = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname && shift 2 && exec "$@"'
        enter = [_tool("nsenter"), f"--net=/run/netns/{self.namespace}", _tool("unshare"), "--mount", "--uts"]
        shell = ["sh", "-c", inside, "sh", str(self.hosts_file), self.name]
        return subprocess.Popen([*enter, *shell, *command], **options)

    def limit(self, mbit_per_s: float) -> None:
        """Holds what this machine sends at a speed, in Mbit/s."""
        # Enough for 10 ms, and for a few of the large packets that the kernel hands over in one piece.
        burst = max(64_000, int(mbit_per_s * 1e6 / 8 * 0.01))
        _call("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{mbit_per_s:g}mbit",
              "burst", f"{burst}b", "latency", "100ms")  # fmt: skip

    def set_mtu(self, num_bytes: int) -> None:
        """The largest packet that this machine sends; the switch carries 1500 bytes and drops larger ones."""
        # One packet at a time: the kernel would cut larger pieces behind the interface, where nothing is lost.
        self._ip("link", "set", "eth0", "mtu", str(num_bytes), "gso_max_segs", "1")

    def drop_port(self, port: int) -> None:
        """What is sent from a TCP port of this machine is lost without a word, as behind a firewall that drops."""
        for family in ("-4", "-6"):
            self._ip(family, "rule", "add", "priority", "10", "ipproto", "tcp", "sport", str(port), "blackhole")

    def drop_picked_ports(self) -> None:
        """Only named ports get an answer from this machine, as behind a firewall that lets those through and no others."""
        picked = "32768-60999"  # as Linux picks them for who listens at no port in particular, and for who connects
        for family in ("-4", "-6"):
            self._ip(
                family, "rule", "add", "priority", "10", "ipproto", "tcp", "sport", picked, "dport", picked, "blackhole"
            )

    def unplug(self) -> None:
        """Takes the network away; `plug` brings it back."""
        self._ip("link", "set", "eth0", "down")

    def plug(self) -> None:
        """Brings the network back."""
        self._ip("link", "set", "eth0", "up")

    def _ip(self, *arguments: str) -> None:
        _call("ip", "-n", self.namespace, *arguments)


def why_not() -> str:
    """Why machines can't be made here; an empty text where they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"evenload-{os.getpid()}-try"
    try:
        _call("ip", "netns", "add", name)
        _call("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
    except ConfigError as error:
        return f"network namespaces can't be made here: {error}"
    finally:
        with contextlib.suppress(ConfigError):
            _call("ip", "netns", "del", name)
    return ""


@contextlib.contextmanager
def machines(num_machines: int = 2, mbit_per_s: float | None = None) -> Iterator[tuple[Box, ...]]:
    """Machines ``box1``, ``box2``, ... at one switch; whatever runs on them, and they themselves, are gone afterwards.

    Args:
        num_machines: how many.
        mbit_per_s: what each can send, in Mbit/s; None: as fast as this machine copies.

    Raises:
        ConfigError: they can't be made here.
    """
    _sweep()
    stem = f"evenload-{os.getpid()}-{next(_numbers)}"
    switch = f"{stem}-switch"
    with tempfile.TemporaryDirectory(prefix="evenload-hosts-") as folder:
        boxes = tuple(
            Box(f"box{n}", f"10.77.0.{n}", f"fd77::{n}", Path(folder, f"hosts-box{n}"), f"{stem}-box{n}")
            for n in range(1, num_machines + 1)
        )
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        lines += [f"{box.address} {box.name}\n{box.address6} {box.name}-v6" for box in boxes]
        for box in boxes:
            box.hosts_file.write_text("\n".join(lines) + "\n")
        names = [switch, *(box.namespace for box in boxes)]
        try:
            for name in names:
                _call("ip", "netns", "add", name)
            _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _call("ip", "-n", switch, "link", "set", "br0", "up")
            for number, box in enumerate(boxes, start=1):
                _connect(box, number, switch)
                if mbit_per_s is not None:
                    box.limit(mbit_per_s)
            yield boxes
        finally:
            for name in names:
                _remove(name)


def _connect(box: Box, number: int, switch: str) -> None:
    port = f"port{number}"
    _call("ip", "link", "add", "eth0", "netns", box.namespace, "type", "veth", "peer", "name", port, "netns", switch)
    _call("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    _call("ip", "-n", box.namespace, "link", "set", "lo", "up")
    _call("ip", "-n", box.namespace, "addr", "add", f"{box.address}/24", "dev", "eth0")
    _call("ip", "-n", box.namespace, "addr", "add", f"{box.address6}/64", "dev", "eth0", "nodad")
    _call("ip", "-n", box.namespace, "link", "set", "eth0", "up")


def _remove(name: str) -> None:
    """Ends what runs in a namespace, and takes it away."""
    with contextlib.suppress(ConfigError):
        for pid in _call("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(ConfigError):
        _call("ip", "netns", "del", name)


def _sweep() -> None:
    """Takes away what a test left that was killed."""
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
        raise ConfigError(f"there is no {name} here (packages iproute2, util-linux)")
    return found
