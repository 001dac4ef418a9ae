"""The balancer of many ranks, in a process of its own: rank 0 sends what a step cost and goes on with the next.

Of a thousand ranks a `Balancer` computes for ten milliseconds in a usual step, and for a hundred where it decides. All ranks
wait for rank 0, so that would be their time. The process has one step at a time; steps that end meanwhile are left out. What it
decides is returned by a later call, and travels to all ranks as every decision does: it makes no difference to them when rank 0
found it. The process ends when its connection closes, however rank 0 ended.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from evenload.balance.decision import Decision, Observation, expected_gains
from evenload.balance.fixed_shares import FixedShares
from evenload.balance.rebalance import Balancer
from evenload.balance.replicas import ReplicaBalancer
from evenload.balance.split import Caps

_NICE = 10
"""The process computes beside the training of rank 0, which comes first."""
_MOST_LOST = 3
_NOTHING: tuple[None, None, dict[str, float]] = (None, None, {})
_CODE = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({descriptor})"


class BalancerProcess:
    """A `Balancer` for a planner, whose answers come one or more steps later."""

    def __init__(
        self,
        num_samples: int,
        world_size: int,
        caps: Caps,
        *,
        shares: tuple[int, ...],
        num_micro_batches: int | None = None,
    ) -> None:
        """Take the arguments of `Balancer`. The process starts with the first step."""
        self._batch = num_samples, world_size
        self._caps = caps
        self._split = shares, num_micro_batches
        self._may_leave: Sequence[bool] = ()
        self._quantum = 1
        self._changes: list[tuple[str, Any]] = []
        """Settings that changed since the last message."""
        self.pid: int | None = None
        """The process, once one was started."""
        self._connection: Connection | None = None
        self._poll = select.poll()  # Connection.poll makes one for each call
        self._end: Callable[[], object] = lambda: None
        self._is_waiting = False
        self._gains: dict[str, float] = {}
        self._note: tuple[str, str] | None = None
        self._num_lost = 0
        self._sent_shares: tuple[int, ...] = ()
        """Those of the last step that was sent; they are sent where they change."""

    def observe(self, observation: Observation) -> Decision | None:
        """Send a step, unless the one before is still looked at; return what was decided since the last call.

        Raises what `Balancer.observe` raises.
        """
        decision = None if self.is_busy else self._receive()
        if not self._is_waiting and self._num_lost <= _MOST_LOST:
            self._send(observation)
        return decision

    @property
    def is_busy(self) -> bool:
        """True if the process has not answered yet."""
        return self._is_waiting and not self._poll.poll(0)

    @property
    def quantum(self) -> int:
        return self._quantum

    @quantum.setter
    def quantum(self, samples: int) -> None:
        if samples != self._quantum:
            self._quantum = samples
            self._changes.append(("quantum", samples))

    @property
    def may_leave(self) -> Sequence[bool]:
        return self._may_leave

    @may_leave.setter
    def may_leave(self, flags: Sequence[bool]) -> None:
        if flags is not self._may_leave and flags != self._may_leave:
            self._may_leave = flags
            self._changes.append(("may_leave", flags))

    def set_caps(self, caps: Caps) -> None:
        """Set new limits of memory; shares that keep them follow with a later answer, and K rises until then."""
        self._caps = caps
        self._changes.append(("caps", caps))

    def paid(self, seconds: float) -> None:
        """Take what a return of a rank cost; see `LeftOut.paid`."""
        self._changes.append(("price", seconds))

    def take_note(self) -> tuple[str, str] | None:
        """Return the kind and the text of a note for people, once."""
        note, self._note = self._note, None
        return note

    def outlook(self) -> dict[str, float]:
        """Return what the last decision is expected to gain; see `expected_gains`."""
        return self._gains

    def close(self) -> None:
        """End the process at once; a later step starts another one, which measures anew."""
        self._end()
        self._connection, self._is_waiting = None, False

    def _receive(self) -> Decision | None:
        if not self._is_waiting or self._connection is None:
            return None
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._lose()
            return None
        self._is_waiting = False
        if not message:
            return None  # nothing to say, as after most steps
        answer = pickle.loads(message)
        if isinstance(answer, Exception):
            self.close()
            raise answer
        decision: Decision | None
        decision, note, gains = answer
        self._note = note or self._note
        if decision is not None:
            self._split, self._gains = (decision.shares, decision.num_micro), gains
        return decision

    def _send(self, observation: Observation) -> None:
        try:
            if self._connection is None:
                self._start()
            if self._connection is not None:
                shares = observation.shares
                fields = {**vars(observation), "shares": () if shares == self._sent_shares else shares}
                self._connection.send_bytes(pickle.dumps((self._changes, fields)))
                self._changes, self._sent_shares = [], shares
                self._is_waiting = True
        except OSError:
            self._lose()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = _CODE.format(path=sys.path, module=__name__, descriptor=theirs.fileno())
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the ranks alone
            )
        self.pid = process.pid
        connection = Connection(ours.detach())
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._connection, self._end = connection, weakref.finalize(self, _end, process, connection, os.getpid())
        shares, count = self._split
        self._sent_shares = ()
        connection.send({"args": (*self._batch, self._caps), "shares": shares, "num_micro_batches": count})
        self._changes = [("quantum", self._quantum), ("may_leave", self._may_leave or None)]

    def _lose(self) -> None:
        self.close()
        self._num_lost += 1
        goes_on = "another one measures anew" if self._num_lost <= _MOST_LOST else "the shares stay as they are"
        self._note = "process_lost", f"the process that decides the shares of {self._batch[1]} ranks ended: {goes_on}"


def serve(descriptor: int) -> None:
    """Answer the messages of a `BalancerProcess` until its connection closes."""
    os.nice(_NICE)
    connection = Connection(descriptor)
    try:
        start = connection.recv()
        balancer = Balancer(*start["args"], shares=start["shares"], num_micro_batches=start["num_micro_batches"])
        shares: tuple[int, ...] = ()
        while True:
            changes, fields = connection.recv()
            shares = fields["shares"] = fields["shares"] or shares
            try:
                answer: Any = _answer(balancer, changes, Observation(**fields))
            except Exception as error:  # raised where the step is
                answer = error
            connection.send_bytes(pickle.dumps(answer) if answer != _NOTHING else b"")
    except (EOFError, OSError):
        return  # rank 0 has ended, or needs no decisions any more


def _answer(
    balancer: Balancer, changes: Sequence[tuple[str, Any]], observation: Observation
) -> tuple[Decision | None, tuple[str, str] | None, dict[str, float]]:
    decision = None
    for name, value in changes:
        if name == "caps":
            decision = balancer.set_caps(value) or decision
        elif name == "price":
            balancer.left_out.paid(value)
        elif name == "quantum":
            balancer.quantum = value
        elif value is not None:
            balancer.may_leave = value
    decision = balancer.observe(observation) or decision
    gains = expected_gains(decision, balancer.costs, balancer.rest_s) if decision and balancer.foresees else {}
    return decision, take_note(balancer), gains


AnyBalancer = Balancer | BalancerProcess | ReplicaBalancer | FixedShares
"""What decides for a planner."""


def take_note(balancer: AnyBalancer) -> tuple[str, str] | None:
    """Return the kind and the text of a note for people, once."""
    if isinstance(balancer, BalancerProcess):
        return balancer.take_note()
    text = balancer.take_note()
    return None if text is None else ("too_short", text)


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked process that ends
    connection.close()
    process.kill()
    process.wait()
