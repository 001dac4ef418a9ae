"""`PartServer`: rank 0's side of strategy ``async``. It holds the ledger and answers the workers over RPC.

    worker: push (gradient) -> inbox          server: next_arrival -> the user's loop body -> next_arrival -> ...
    worker: take (next part) -> inbox                  hands out parts with its parameters between two bodies

Threads of RPC only put messages into the inbox; everything else happens in the thread of the user's loop. So parameters are
never read while an optimizer steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import rpc

from evenload.errors import PeerLostError
from evenload.training.parallel.asynchronous.ledger import PartJob, PartLedger, ends_sooner_without
from evenload.training.parallel.asynchronous.messages import Handout, PartGradient

_POLL_S = 0.2
"""Time between two looks at requests to stop and at workers that hang."""
_LEAST_HANG_S, _HANG_PARTS = 300.0, 20
"""A worker hangs if it computes a part for so long, and so many times as long as the one before; or for `timeout_s`."""


@dataclass(frozen=True)
class PartArrival:
    """A gradient that the loop body applies now."""

    job: PartJob
    gradient: PartGradient
    staleness: int
    """Updates between the parameters that it was computed with and this update."""
    indices: Sequence[int]
    """Of the parameters and buffers that were sent with it."""
    snapshot: Sequence[torch.Tensor]
    """Their values then, joined."""


@dataclass(frozen=True)
class _Take:
    worker: int
    reads_ahead: bool
    answer: torch.futures.Future[Handout]


@dataclass(frozen=True)
class _Leave:
    """A worker that computes nothing any more."""

    worker: int
    reason: str
    is_dead: bool
    hangs: bool = False
    """It neither computes nor ends, as far as the server knows."""


class PartServer:
    """One for a run; `begin` starts an epoch."""

    def __init__(
        self,
        workers: Sequence[int],
        *,
        staleness: int,
        timeout_s: float,
        report_lost: Callable[[int, str, Sequence[int], bool], None],
    ) -> None:
        """`report_lost(worker, reason, parts, hangs)`: a worker is gone, or hangs, and others take these parts."""
        self.alive = list(workers)
        self.staleness = staleness
        self.max_staleness = 0
        """The largest that an update had: counted from the version in each gradient's message."""
        self.ledger = PartLedger((), staleness)
        self._timeout_s = timeout_s
        self._report_lost = report_lost
        self._inbox: deque[PartGradient | _Take | _Leave] = deque()
        self._changed = threading.Condition()
        self._waiting: dict[int, _Take] = {}
        self._gradients: dict[int, PartGradient] = {}
        self._snapshots: dict[int, tuple[Sequence[int], list[torch.Tensor]]] = {}
        """By version, the state that was sent."""
        self._given_s: dict[int, float] = {}
        self._part_s: dict[int, float] = {}
        """By worker, seconds from the part that it received last to its gradient."""
        self._left: set[int] = set()
        """Workers that have left the loop of this epoch by themselves."""
        self.read_state: Callable[[], tuple[Sequence[int], list[torch.Tensor]]] = lambda: ((), [])
        """Returns the indices of the parameters and buffers to send, and copies of them, joined."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called now and then while no gradient may be applied; it may end the script."""
        self.read_lost: Callable[[], Collection[int]] = tuple
        """Returns workers whose machines are lost: their connections may never end."""
        self.allow_losses: Callable[[bool], None] = lambda allowed: None
        """Called at the begin and the end of each loop: only in it the others go on without a worker."""

    # -- from threads of RPC ---------------------------------------------------------------------------------------------

    def put(self, message: PartGradient | _Take | _Leave) -> None:
        with self._changed:
            self._inbox.append(message)
            self._changed.notify()

    def take(self, worker: int, *, reads_ahead: bool) -> torch.futures.Future[Handout]:
        answer: torch.futures.Future[Handout] = torch.futures.Future()
        self.put(_Take(worker, reads_ahead, answer))
        return answer

    def leave(self, worker: int, reason: str, *, is_dead: bool) -> None:
        self.put(_Leave(worker, reason, is_dead))

    # -- from the user's loop --------------------------------------------------------------------------------------------

    def begin(self, parts: Sequence[int]) -> None:
        """Begin an epoch with these parts left."""
        self.allow_losses(True)
        self.ledger = PartLedger(parts, self.staleness)
        self._gradients.clear()
        self._snapshots.clear()
        self._given_s.clear()
        self._left.clear()

    def next_arrival(self) -> PartArrival | None:
        """Wait for a gradient that may be applied; None at the end of the epoch, or where all workers have left the loop.

        Raises:
            PeerLostError: no worker is left.
        """
        while True:
            self._receive()
            # Updates first: each one that waits would use up a part of the staleness of what is handed out now.
            job = self.ledger.next_update()
            if job is not None:
                return self._arrival(job)
            self._hand_out()
            if self.ledger.is_done or (not self._can_continue() and not self.ledger.computing()):
                return None
            with self._changed:
                if not self._inbox:
                    self._changed.wait(_POLL_S)
            self._give_up()
            self.on_wait()

    def finish(self) -> list[int]:
        """Wait until no worker computes any more, send the parameters to all, and return those alive.

        Gradients that still come are dropped.
        """
        self.ledger.stop()
        waits_for, began_s = set(self.alive), time.monotonic()
        while missing := waits_for - self._waiting.keys():
            if time.monotonic() - began_s > self._timeout_s:
                reason = f"it did not come to the end of its loop within {self._timeout_s:g} s (timeout_s)"
                self._lose(_Leave(min(missing), reason, is_dead=True, hangs=True))
            with self._changed:
                if not self._inbox:
                    self._changed.wait(_POLL_S)
            self._receive(drops=True)
            self._give_up()
            waits_for &= set(self.alive)
        self.allow_losses(False)
        self._give_up()
        answers, self._waiting = self._waiting, {}
        indices, state = self.read_state()
        for worker in self.alive:
            answers[worker].answer.set_result(Handout(None, None, indices, state, tuple(self.alive)))
        return self.alive

    def _receive(self, *, drops: bool = False) -> None:
        while True:
            with self._changed:
                if not self._inbox:
                    return
                message = self._inbox.popleft()
            if isinstance(message, _Take):
                if message.worker in self.alive:
                    self._waiting[message.worker] = message
                else:
                    message.answer.set_exception(PeerLostError(f"worker {message.worker} was given up"))  # type: ignore[arg-type]
            elif isinstance(message, _Leave):
                self._lose(message)
            elif not drops and self.ledger.arrive(message.job):
                self._gradients[message.job] = message
                worker = self.ledger.job(message.job).worker
                self._part_s[worker] = time.monotonic() - self._given_s[message.job]

    def _lose(self, message: _Leave) -> None:
        worker = message.worker
        if worker not in self.alive:
            return
        parts = self.ledger.lose(worker)
        if not message.is_dead:
            # It left its loop by `break`: the others finish what they compute, and leave too.
            self._left.add(worker)
            self.ledger.stop()
            return
        self.alive.remove(worker)
        self._waiting.pop(worker, None)
        self._report_lost(worker, message.reason, parts, message.hangs)
        if not self.alive:
            self.on_wait()  # all may have stopped on request
            raise PeerLostError(f"no worker is left; the last one, rank {worker}, is gone: {message.reason}")

    def _can_continue(self) -> bool:
        return any(worker not in self._left for worker in self.alive)

    def _hand_out(self) -> None:
        """Hand out parts to all workers that wait, as far as the bound allows."""
        for worker in list(self._waiting):
            if worker in self._left:
                continue
            if self._is_too_slow(worker):
                self.ledger.give_back(worker)
                continue
            job = self.ledger.hand_out(worker, reserve=self._waiting[worker].reads_ahead)
            if job is None:
                return
            if job.version not in self._snapshots:
                self._snapshots[job.version] = self.read_state()
            self._given_s[job.number] = time.monotonic()
            handout = Handout(job, self.ledger.reserved_for(worker), *self._snapshots[job.version])
            self._waiting.pop(worker).answer.set_result(handout)

    def _is_too_slow(self, worker: int) -> bool:
        """Return whether a part that the worker took now would end after all others; it then takes none."""
        now_s = time.monotonic()
        since_s = {job.worker: now_s - self._given_s[job.number] for job in self.ledger.computing()}
        others_s = [
            seconds
            for other, seconds in self._part_s.items()
            if other != worker
            and other in self.alive
            and other not in self._left
            and since_s.get(other, 0.0) < 2 * seconds
        ]
        own_s = self._part_s.get(worker)
        return own_s is not None and ends_sooner_without(own_s, others_s, self.ledger.num_left)

    def _arrival(self, job: PartJob) -> PartArrival:
        gradient = self._gradients.pop(job.number)
        indices, snapshot = self._snapshots[job.version]
        used = {other.version for other in (*self.ledger.computing(), *map(self.ledger.job, self._gradients))}
        for version in [v for v in self._snapshots if v < self.ledger.updates - 1 and v not in used]:
            del self._snapshots[version]
        self._given_s.pop(job.number, None)
        staleness = self.ledger.updates - 1 - gradient.version
        self.max_staleness = max(self.max_staleness, staleness)
        return PartArrival(job, gradient, staleness, indices, snapshot)

    def _give_up(self) -> None:
        """Give up workers that hang, or whose machines are lost."""
        for worker in self.read_lost():
            self._lose(_Leave(worker, "its machine is lost", is_dead=True))
        now_s = time.monotonic()
        for job in self.ledger.computing():
            usual_s = self._part_s.get(job.worker, self._timeout_s)
            limit_s = min(self._timeout_s, max(_LEAST_HANG_S, _HANG_PARTS * usual_s))
            if now_s - self._given_s[job.number] > limit_s:
                reason = f"it has computed part {job.part} for more than {limit_s:g} s"
                self._lose(_Leave(job.worker, reason, is_dead=True, hangs=True))


_server: PartServer | None = None


def serve(server: PartServer | None) -> None:
    """Answer the calls of workers by this server from now on."""
    global _server
    _server = server


_ENDED = "the server's run has ended"


def push_gradient(gradient: PartGradient) -> None:
    """Run on the server: take a gradient."""
    if _server is not None:
        _server.put(gradient)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def take_part(worker: int, reads_ahead: bool) -> torch.futures.Future[Handout]:
    """Run on the server: return the next part once there is one."""
    if _server is not None:
        return _server.take(worker, reads_ahead=reads_ahead)
    answer: torch.futures.Future[Handout] = torch.futures.Future()
    answer.set_exception(PeerLostError(_ENDED))  # type: ignore[arg-type]
    return answer


def leave_loop(worker: int, reason: str) -> None:
    """Run on the server: a worker has left its loop."""
    if _server is not None:
        _server.leave(worker, reason, is_dead=False)


def answer_ping() -> bool:
    """Run on the server, which thereby shows that it is reachable; False once its run has ended."""
    return _server is not None
