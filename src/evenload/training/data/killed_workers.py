"""Loader workers that end: why, and noticed while the rank waits for them.

Torch raises an error from its handler of SIGCHLD, wherever the rank is then: in a collective, or in the script's own code. Here a
worker that was killed is an error only of the read that needs it (prefetch.py starts the workers again).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

from evenload.errors import DataError

_awaited: list[Any] = []
"""The iterators whose workers the main thread waits for."""


class WorkerKilledError(DataError):
    """A loader worker was killed by a signal; what it was reading can be read again."""


def iterate(loader: Any) -> Any:
    """Return the iterator of a DataLoader, without torch's handler of SIGCHLD."""
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    if _is_torchs(signal.getsignal(signal.SIGCHLD)):  # also one of a plain loader that the script read before
        signal.signal(signal.SIGCHLD, lambda number, frame: _on_child(before, number, frame))
    return iterator


def _on_child(before: Any, number: int, frame: Any) -> None:
    if callable(before):
        with contextlib.suppress(RuntimeError) if _is_torchs(before) else contextlib.nullcontext():
            before(number, frame)
    if _awaited:
        _check(_awaited[-1])


def _is_torchs(handler: Any) -> bool:
    return getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"


@contextlib.contextmanager
def await_workers(iterator: Any) -> Iterator[None]:
    """Raise WorkerKilledError as soon as a worker of the iterator is found to be killed, before or while the body runs."""
    _awaited.append(iterator)
    try:
        _check(iterator)
        yield
    finally:
        _awaited.remove(iterator)


def _check(iterator: Any) -> None:
    for index, worker in enumerate(getattr(iterator, "_workers", ())):
        if worker.exitcode is not None and worker.exitcode < 0:
            raise WorkerKilledError(_describe(index, worker))


def find_dead_worker(iterator: Any, error: Exception) -> DataError | None:
    """Return the error of a worker that ended, if one did; torch may only report a closed socket."""
    workers = getattr(iterator, "_workers", ())
    if workers and isinstance(error, OSError | EOFError):
        exited = connection.wait([worker.sentinel for worker in workers], timeout=5.0)
        for worker in workers:
            if worker.sentinel in exited:
                worker.join(timeout=5.0)  # its files close a moment before its exit code is set
    for index, worker in enumerate(workers):
        if worker.exitcode is not None:
            text = _describe(index, worker)
            return WorkerKilledError(text) if worker.exitcode < 0 else DataError(text)
    return None


def _describe(index: int, worker: Any) -> str:
    where = f"DataLoader worker {index} of this rank (pid {worker.pid})"
    if worker.exitcode >= 0:
        return f"{where} exited with code {worker.exitcode}; look for a call of exit in the dataset"
    return (
        f"{where} was killed by {signal.Signals(-worker.exitcode).name}: SIGKILL usually means that memory ran out, SIGBUS that "
        "/dev/shm is full; use fewer loader workers or a smaller prefetch_factor"
    )
