"""Messages between the supervisor and its workers about who takes part, as JSON lines over a socket of each worker.

A worker has an id for its whole life, which no later worker gets; its rank is the index of the id in the newest membership.
The first line of each class's docstring names the direction.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from evenload.errors import LaunchError

_CHUNK_BYTES = 65536


@dataclass(frozen=True)
class LostWorker:
    """Part of `MembershipChange`: a worker that died or stalled."""

    worker: str
    reason: str
    """For people, such as ``rank 1 (cpu) was killed by SIGKILL``."""
    time_s: float
    """Seconds since the epoch at which the supervisor noticed it."""


@dataclass(frozen=True)
class MembershipChange:
    """Supervisor to worker: the members of the next generation.

    It replaces an older one that has not taken effect.
    """

    number: int
    """Number of the membership; grows with each change."""
    workers: tuple[str, ...]
    """Members by rank: those that stay in their old order, then those that join."""
    joined: tuple[str, ...]
    """The members that were not in the membership that took effect last."""
    lost: tuple[LostWorker, ...]
    """The workers of that membership that died or stalled."""
    left: tuple[str, ...]
    """The workers of that membership that leave on request: they end with exit code 0 after their last step."""
    store: str
    """``host:port`` of the store."""
    urgent: bool
    """True: members are gone, so collectives in progress never end and are aborted. False: all switch at the end of a step."""
    device_names: tuple[str, ...] = ()
    """`WorkerSpec.device_names` of the members."""
    backend: str = "auto"
    """`WorkerSpec.backend` of the members."""

    def text(self, where: Callable[[str], str], next_step: int) -> str:
        """Return the line for the user once it is in effect; `where` returns the device of a worker."""
        num_ranks = len(self.workers)
        texts = [f"rank {self.workers.index(name)} ({where(name)}) has joined" for name in self.joined]
        texts += [f"{where(name)} has left" for name in self.left]
        if self.lost:
            took_s = time.time() - max(loss.time_s for loss in self.lost)
            texts.append(f"training goes on {took_s:.1f} s after the loss")
        texts = texts or ["training goes on"]
        return f"{'; '.join(texts)}: {num_ranks} rank{'s' if num_ranks > 1 else ''} from step {next_step}"


@dataclass(frozen=True)
class Capable:
    """Worker to supervisor: from here on this worker can go on when others are lost, join or leave, or `why_not`.

    Until all workers have sent it, a lost worker ends the run.
    """

    worker: str
    why_not: str = ""
    """Such as ``run.resume was not called``; empty: it can."""


@dataclass(frozen=True)
class Ready:
    """Worker to supervisor: a joiner stands at its first step and can be admitted."""

    worker: str


@dataclass(frozen=True)
class Switched:
    """Worker to supervisor: this worker trains in the generation of membership `number`."""

    worker: str
    number: int
    seconds_s: float
    """Seconds from the receipt of the change to the first collective of the new generation."""
    step: int
    """The step that this worker computes next."""


@dataclass(frozen=True)
class Activity:
    """Worker to supervisor, once a second: what the worker's main thread does."""

    worker: str
    segment: str
    """Segment of the `StepClock`."""
    seconds: float
    """Since the segment began."""
    position: str = ""
    """The line of the user's code, such as ``train.py:31 in __getitem__``; empty if there is none."""
    excuse: str = ""
    """Why a long segment is no stall, such as ``it compiles``."""
    stuck_s: float = 0.0
    """Seconds for which it has waited for other ranks while nothing moved, if nothing else ends that; 0 for a short time."""


@dataclass(frozen=True)
class Waits:
    """Worker to supervisor, twice a second: it waits for other ranks, in a step past the learned deadline."""

    worker: str
    seconds: float
    in_step: bool = True
    """In a backward, or to read an iterable dataset; False: wherever the script calls all ranks."""
    limit_s: float = math.inf
    """Time after which the run ends if they wait for a rank that stalls, and can't go on without it."""


@dataclass(frozen=True)
class Leaving:
    """Worker to supervisor: this worker has done its last step and ends with exit code 0."""

    worker: str


@dataclass(frozen=True)
class Finished:
    """Worker to supervisor: the script's training loop has ended here; nobody can join any more, and an end is no loss."""

    worker: str


Message = MembershipChange | Capable | Ready | Switched | Activity | Waits | Leaving | Finished
_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_NAMES = ("workers", "joined", "left", "device_names")


def to_line(message: Message) -> str:
    return json.dumps({"type": type(message).__name__, **dataclasses.asdict(message)}) + "\n"


def from_line(line: str) -> Message:
    """Return the message of a line; LaunchError if it holds none."""
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("type")]
        if kind is MembershipChange:
            values |= {name: tuple(values[name]) for name in _NAMES}
            values["lost"] = tuple(LostWorker(**lost) for lost in values["lost"])
        message: Message = kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LaunchError(f"a message about the membership can't be read: {line!r} ({error!r})") from error
    return message


_taken: set[int] = set()
"""Descriptors that a session of this process has used and closed; their numbers may belong to other files now."""


class MessageChannel:
    """One end of a worker's socket; `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket, blocking: bool) -> None:
        """`blocking`: `receive` waits for a message (the worker's end); otherwise nothing waits (the supervisor's)."""
        self._socket = connection
        self._socket.setblocking(blocking)
        self._lock = threading.Lock()
        self._unsent = b""
        self._unread = b""
        self.ended = False
        """The other end is closed."""

    @classmethod
    def of_descriptor(cls, descriptor: int) -> MessageChannel:
        """Return the worker's end, from `WorkerSpec.channel`; only the first session of a process can take it."""
        _taken.add(descriptor)
        return cls(socket.socket(fileno=descriptor), blocking=True)

    @staticmethod
    def is_free(descriptor: int) -> bool:
        """Return whether there is a channel that no session of this process has taken."""
        return descriptor >= 0 and descriptor not in _taken

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message; what a peer that does not read leaves over is sent by the next call, or by `flush`."""
        with self._lock:
            self._unsent += to_line(message).encode()
        self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self._unsent:
                    self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:  # a peer that has ended; its death is noticed elsewhere
                self._unsent, self.ended = b"", True

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; in the worker, wait for at least one. Empty at the end, with `ended`."""
        lines: list[bytes] = []
        while not lines and not self.ended:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            self.ended = self.ended or not chunk
            *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [from_line(line.decode()) for line in lines if line]

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in `receive`
        self._socket.close()
