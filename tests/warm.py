"""`Command` and `run`: python with a command line, forked from a server that has imported torch (warm_server.py)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from evenload.testing.hosts import VirtualHost
from tests.paths import TESTS

_starting = threading.Lock()


def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    with _starting:
        return _started()


@cache
def _started() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A server that ends with this process, and the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", str(TESTS / "warm_server.py"), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**variables, "OPENBLAS_NUM_THREADS": "1"},  # no threads before a fork
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours, process


class Command:
    """A process, with the parts of `subprocess.Popen` that tests need; its output is text."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        host: VirtualHost | None = None,
        output: Path | None = None,
    ) -> None:
        """Start ``python ARGUMENTS`` in a folder; `host`: on that machine; `output`: a file for all that it writes."""
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self._reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "environment": dict(environment),
            "host": [f"/run/netns/{host.namespace}", str(host.hosts_file), host.name] if host else [],
        }
        pipes = [os.pipe(), os.pipe()] if output is None else []
        writers = [writer for _, writer in pipes]
        if output is not None:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            writers = [descriptor, os.dup(descriptor)]
        nothing = os.open(os.devnull, os.O_RDONLY)
        with theirs:
            files = [theirs.fileno(), nothing, *writers]
            socket.send_fds(_server()[0], [json.dumps(request).encode()], files)
        for descriptor in files[1:]:
            os.close(descriptor)
        self._outputs: list[bytes] = [b"", b""]
        self._readers = [
            threading.Thread(target=self._read, args=(index, reader), daemon=True)
            for index, (reader, _) in enumerate(pipes)
        ]
        for thread in self._readers:
            thread.start()
        self.pid = int(self._reply.recv(32))

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _read(self, index: int, descriptor: int) -> None:
        with open(descriptor, "rb") as file:
            self._outputs[index] = file.read()

    def poll(self) -> int | None:
        """The exit code once it has ended."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._reply.settimeout(timeout)
            try:
                self.returncode = int(self._reply.recv(32))
            except (BlockingIOError, TimeoutError):
                return None
            self._reply.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; what it wrote."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        for thread in self._readers:
            thread.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline_s is None else max(0.01, deadline_s - time.monotonic()))
        stdout, stderr = (output.decode() for output in self._outputs)
        return stdout, stderr

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(arguments: Sequence[str], folder: Path, timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in a folder to its end, with further environment variables."""
    with Command(arguments, folder, {**os.environ, **variables}) as process:
        try:
            stdout, stderr = process.communicate(timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), stdout, stderr)
