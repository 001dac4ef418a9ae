"""A real Jupyter kernel: runs cells, tells what they print, can be interrupted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.system.starts.ways import LIMIT_S, environment

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class CellError(Exception):
    """A cell raised; the text is its traceback."""


class Kernel:
    """One kernel; see `open_kernel`."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def run(self, code: str) -> str:
        """Runs a cell to its end; what it printed. A kernel drops cells that arrive just after an error: those run again.

        Raises:
            CellError: it raised.
        """
        printed: list[str] = []

        def heard(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        while True:
            reply = self.client.execute_interactive(code, timeout=LIMIT_S, output_hook=heard, allow_stdin=False)
            if reply["content"]["status"] != "aborted":
                break
        return self._checked(reply, "".join(printed))

    def begin(self, code: str) -> str:
        """Starts a cell; `end` waits for it."""
        message: str = self.client.execute(code, allow_stdin=False)
        return message

    def end(self, message: str) -> str:
        """Waits for a cell that was begun."""
        while True:
            reply = self.client.get_shell_msg(timeout=LIMIT_S)
            if reply["parent_header"].get("msg_id") == message:
                return self._checked(reply, "")

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    @staticmethod
    def _checked(reply: dict[str, Any], printed: str) -> str:
        if reply["content"]["status"] == "error":
            raise CellError(_COLOURS.sub("", "\n".join(reply["content"]["traceback"])) + printed)
        return printed


@contextmanager
def open_kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel that works in `folder` and writes nothing elsewhere."""
    own = {name: str(folder / ".jupyter") for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    manager = KernelManager(connection_file=str(folder / "kernel.json"))
    manager.start_kernel(cwd=str(folder), env=environment(**own))
    client: BlockingKernelClient = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT_S)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
