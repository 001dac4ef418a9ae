"""Start of a Ray cluster: by one command on the first machine, and the line that it prints on the others."""

from __future__ import annotations

import os
import subprocess
import sys

from evenload.errors import ConfigError, QueueError

PORT = 6379
_COMMAND = (sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats")
_START_S = 180.0


def start_head(port: int = PORT) -> str:
    """Start Ray with its head on this machine, and return the address that other machines join.

    Raises:
        ConfigError: Ray is not installed.
        QueueError: it doesn't start; the message has what Ray printed.
    """
    try:
        from ray.util import get_node_ip_address
    except ImportError as error:
        raise ConfigError("--ray: Ray is not installed; pip install 'evenload[ray]'") from error
    host = str(get_node_ip_address())
    _start("--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false")
    return f"{host}:{port}"


def join(address: str) -> None:
    """Add this machine to the cluster at an address; `QueueError` if that fails."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ConfigError(
            f"--ray {address}: expected the address that the first machine printed, such as 10.0.0.1:{PORT}"
        )
    _start(f"--address={address}")


def _start(*options: str) -> None:
    try:
        done = subprocess.run(
            [*_COMMAND, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            timeout=_START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise QueueError(f"Ray didn't start within {_START_S:g} s: ray start {' '.join(options)}") from None
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        raise QueueError("\n  ".join([f"ray start {' '.join(options)} failed:", *lines[-8:]]))
