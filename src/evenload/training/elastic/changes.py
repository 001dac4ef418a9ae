"""`MembershipChanges`: the worker's end of the channel to its supervisor, read by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from evenload.training.launch.membership_messages import MembershipChange, Message, MessageChannel

_Prepare = Callable[[MembershipChange, "MembershipChanges"], None]
_POLL_S = 0.1
"""Longest wait without a look at signals, which only the main thread handles."""


class MembershipChanges:
    """The newest change that the supervisor sent."""

    def __init__(
        self, channel: MessageChannel, worker: str, abort: Callable[[str, int], None], prepare: _Prepare
    ) -> None:
        """`abort` is called in the thread with the reason and the number of each urgent change, as soon as it arrives.
        `prepare` is called in a further thread with each other change, and does what it can while the step goes on.
        """
        self._channel = channel
        self._worker = worker
        self._abort, self._prepare = abort, prepare
        self._arrived = threading.Condition()
        self.newest: MembershipChange | None = None
        self.ready_number = -1
        """That of the newest change for which this rank is prepared."""
        self.received_s = 0.0
        """Time at which the newest change arrived, by `time.monotonic`."""
        threading.Thread(target=self._read, name="evenload-membership", daemon=True).start()

    @property
    def newest_number(self) -> int:
        return -1 if self.newest is None else self.newest.number

    @property
    def ended(self) -> bool:
        """True when the supervisor is gone."""
        return self._channel.ended

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def wait(self, after: int, timeout_s: float) -> MembershipChange | None:
        """Return the newest change with a number above `after` that concerns this worker; None if none comes in time."""
        began_s = time.monotonic()
        with self._arrived:
            while True:
                change = self.newest if self.newest_number <= self.ready_number else None
                if change is not None and change.number > after and self._worker in (*change.workers, *change.left):
                    return change
                if time.monotonic() - began_s >= timeout_s or self._channel.ended:
                    return None
                self._arrived.wait(_POLL_S)

    def _read(self) -> None:
        while not self._channel.ended:
            for message in self._channel.receive():
                if not isinstance(message, MembershipChange):
                    continue
                with self._arrived:
                    if message.number <= self.newest_number:
                        continue
                    self.newest, self.received_s = message, time.monotonic()
                    self.ready_number = message.number if message.urgent else self.ready_number
                    self._arrived.notify_all()
                if not message.urgent:
                    threading.Thread(target=self._get_ready, args=(message,), daemon=True).start()
                else:
                    self._abort("; ".join(lost.reason for lost in message.lost) or "a rank is lost", message.number)
        with self._arrived:
            self._arrived.notify_all()

    def _get_ready(self, change: MembershipChange) -> None:
        try:
            self._prepare(change, self)
        finally:
            with self._arrived:
                self.ready_number = max(self.ready_number, change.number)
                self._arrived.notify_all()

    def close(self) -> None:
        self._channel.close()
