"""`PartWorker`: a worker's side of strategy ``async``: it asks the server for parts and sends their gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed import rpc

from evenload.errors import PeerLostError
from evenload.training.parallel.asynchronous import server
from evenload.training.parallel.asynchronous.messages import Handout, PartGradient

Value = TypeVar("Value")

_POLL_S = 0.2
_PING_EVERY_S = 5.0
_LOST = "rank 0, which holds the parameters (strategy async), is gone or unreachable"

_watched: torch.futures.Future[None] | None = None


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def watch_worker() -> torch.futures.Future[None]:
    """Run on a worker: return when its run has ended. The call fails as soon as the worker's connection ends."""
    global _watched
    if _watched is None:
        _watched = torch.futures.Future()
    return _watched


def end_watch() -> None:
    """End the server's watch on this process."""
    global _watched
    if _watched is not None and not _watched.done():
        _watched.set_result(None)
    _watched = None


class PartWorker:
    def __init__(self, rank: int, timeout_s: float) -> None:
        """`rank` is that of RPC: it stays when ranks are counted anew without those that are gone."""
        self.rank = rank
        self._timeout_s = timeout_s
        self._sending: torch.futures.Future[None] | None = None
        self.on_wait: Callable[[], None] = lambda: None
        """Called now and then while there is no part; it may end the script."""

    def push(self, gradient: PartGradient) -> None:
        """Begin to send a gradient."""
        self.flush()
        self._sending = rpc.rpc_async("rank0", server.push_gradient, (gradient,), timeout=self._timeout_s)

    def flush(self) -> None:
        """Wait until the server has received the last gradient."""
        sending, self._sending = self._sending, None
        if sending is not None:
            _wait(sending)

    def take(self, *, reads_ahead: bool) -> Handout:
        """Wait for the next part. The server may hold it back while the bound on staleness requires it.

        Raises:
            PeerLostError: the server is gone, or does not answer for `timeout_s`.
        """
        self.flush()  # so the server knows this rank's last gradient when it decides
        answer = rpc.rpc_async("rank0", server.take_part, (self.rank, reads_ahead), timeout=0)
        handout: Handout = _wait(answer, self._ping, self.on_wait)
        return handout

    def leave(self, reason: str) -> None:
        """Tell the server that this rank has left its loop."""
        _wait(rpc.rpc_async("rank0", server.leave_loop, (self.rank, reason), timeout=self._timeout_s))

    def _ping(self) -> torch.futures.Future[bool]:
        answer: torch.futures.Future[bool] = rpc.rpc_async("rank0", server.answer_ping, timeout=self._timeout_s)
        return answer


def _wait(
    future: torch.futures.Future[Value],
    ping: Callable[[], torch.futures.Future[bool]] | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> Value:
    """Return a future's value; the wait lets signals through, and ends when a ping of the server fails."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    asked_s = time.monotonic()
    pinging: torch.futures.Future[bool] | None = None
    while not done.wait(_POLL_S):
        on_wait()
        if pinging is not None and pinging.done():
            if not _value(pinging):
                raise PeerLostError(f"{_LOST} (its run has ended)")
            pinging, asked_s = None, time.monotonic()
        elif ping is not None and pinging is None and time.monotonic() - asked_s > _PING_EVERY_S:
            pinging = ping()
    try:
        return _value(future)
    except PeerLostError:
        on_wait()  # the server may have stopped on a request to all
        raise


def _value(future: torch.futures.Future[Value]) -> Value:
    try:
        value = future.value()
        if isinstance(value, PeerLostError):  # an error that the server sets arrives as a value
            raise value
        return value
    except RuntimeError as error:
        raise PeerLostError(f"{_LOST} ({str(error).splitlines()[0]})") from error
