"""The TCPStore of the ranks, served by the supervisor of one machine."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from evenload.errors import LaunchError


def listen(port: int) -> socket.socket:
    """Open the store's port on the loopback interface, or LaunchError; the store follows when torch is imported."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"--port {port} can't be opened ({error.strerror}); choose another, or leave --port out for a free one"
        ) from None
    return listener


class StoreServer:
    """Serves a TCPStore, which a thread creates."""

    def __init__(self, listener: socket.socket, world_size: int) -> None:
        self.error: Exception | None = None
        self._store: Any = None
        host, self._port = listener.getsockname()[:2]
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._descriptor = listener.detach()
        self._lock = threading.Lock()
        self._closed = False
        # Importing torch takes seconds, in which the supervisor must notice a failing worker.
        self._thread = threading.Thread(target=self._serve, args=(world_size,), name="evenload-store")
        self._thread.start()

    @property
    def is_starting(self) -> bool:
        """The thread still runs, perhaps in the import of torch; the interpreter waits for it when it exits."""
        return self._thread.is_alive()

    def _serve(self, world_size: int) -> None:
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            with self._lock:
                if self._closed:
                    return
                self._store = TCPStore(
                    self._host,
                    self._port,
                    world_size,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=self._descriptor,
                )
        except Exception as error:
            self.error = error

    def close(self) -> None:
        """Stop serving, after the workers have ended; does not wait for an import of torch."""
        with self._lock:
            if self._store is None and self.error is None and not self._closed:
                os.close(self._descriptor)
            self._closed, self._store = True, None
