"""An asyncio event loop in a thread, for the supervisor, which is synchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_POLL_S = 0.05


class EventLoopThread:
    """Runs coroutines for synchronous callers, and the tasks that these leave behind until `close`."""

    def __init__(self) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._closed = asyncio.Event()

        async def stay() -> None:
            started.set_result(asyncio.get_running_loop())
            await self._closed.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(stay()), name="evenload-rendezvous", daemon=True)
        self._thread.start()
        self._loop = started.result()

    def run(self, coroutine: Coroutine[Any, Any, T], should_stop: Callable[[], bool] = lambda: False) -> T | None:
        """Run a coroutine to its end and return its value; None if it was cancelled because of ``should_stop``."""

        async def supervise() -> T | None:
            task = asyncio.ensure_future(coroutine)
            while not task.done() and not should_stop():
                await asyncio.wait([task], timeout=_POLL_S)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            return None if task.cancelled() else task.result()

        return asyncio.run_coroutine_threadsafe(supervise(), self._loop).result()

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the loop's thread, soon, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel all tasks and end the thread; a second call does nothing."""
        if self._thread.is_alive():
            self.call_soon(self._closed.set)
            self._thread.join()
