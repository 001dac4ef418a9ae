"""Ranks that may die: processes with a channel each, and the supervisor's part played by the test with the same messages."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from evenload.testing.ranks import forkserver
from evenload.training.launch.environment import WORKER_VARIABLE, WorkerSpec, write_spec
from evenload.training.launch.membership_messages import (
    LostWorker,
    MembershipChange,
    Message,
    MessageChannel,
    Ready,
    Switched,
)


@dataclass
class _Worker:
    id: str
    process: Any
    result: Connection
    channel: MessageChannel
    messages: list[Message] = field(default_factory=list)
    value: Any = None
    ended: bool = False


class Supervised:
    """Starts workers, reports deaths to the others at once, admits joiners, and collects results by worker."""

    def __init__(self, folder: Path, fn: Callable[..., Any], *args: Any) -> None:
        self._folder, self._call = folder, pickle.dumps((fn, args))
        self._context = forkserver()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._number = 0
        self._switched: dict[str, int] = {}
        self._asked: MembershipChange | None = None
        self.members: list[str] = []
        self.workers: dict[str, _Worker] = {}
        self.lost: list[str] = []
        self.noticed_s: list[float] = []
        self.leaves: dict[int, str] = {}
        """Workers that leave on request, by the number of the membership after which they are asked."""
        self.leave_after: Path | None = None
        """A file before which none is asked."""

    def start(self, num_ranks: int) -> None:
        self.members = [f"w{index}" for index in range(num_ranks)]
        for rank, worker in enumerate(self.members):
            self._start(
                WorkerSpec(
                    rank=rank,
                    local_rank=rank,
                    world_size=num_ranks,
                    workers=tuple(self.members),
                    device_names=tuple(self.members),
                    **self._common(),
                )
            )
            self._switched[worker] = 0

    def start_joiner(self, worker: str) -> None:
        members = (*self.members, worker)
        self._start(
            WorkerSpec(rank=len(self.members), world_size=len(members), workers=members, joining=True, **self._common())
        )

    def _common(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "backend": "gloo",
            "store": f"127.0.0.1:{self._store.port}",
            "num_threads": 1,
            "origin": "evenload",
        }

    def _start(self, spec: WorkerSpec) -> None:
        ours, theirs = socket.socketpair()
        receiver, sender = self._context.Pipe(duplex=False)
        path = self._folder / f"{spec.worker}.json"
        process = self._context.Process(target=_run, args=(sender, theirs, self._call, spec, str(path)))
        process.start()
        theirs.close()
        sender.close()
        self.workers[spec.worker] = _Worker(spec.worker, process, receiver, MessageChannel(ours, blocking=False))

    def run(self, timeout_s: float, joiners: dict[int, str] | None = None) -> dict[str, Any]:
        """Wait until all have ended; `joiners` start after so many losses. Return the results of those that finished."""
        joiners = dict(joiners or {})
        deadline_s = time.monotonic() + timeout_s
        try:
            while any(not worker.ended for worker in self.workers.values()):
                if time.monotonic() > deadline_s:
                    for worker in self.workers.values():
                        if not worker.ended:
                            os.kill(worker.process.pid, signal.SIGUSR1)
                    time.sleep(0.5)
                    raise TimeoutError({w.id: w.messages[-3:] for w in self.workers.values() if not w.ended})
                self._poll()
                if len(self.lost) in joiners and not any(self._pending()):
                    self.start_joiner(joiners.pop(len(self.lost)))
        finally:
            for worker in self.workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.join()
                worker.process.close()
                worker.channel.close()
                worker.result.close()
        return {worker.id: worker.value for worker in self.workers.values() if worker.value is not None}

    def _pending(self) -> list[str]:
        return [one for one in self.members if self._switched.get(one, -1) < self._number]

    def _poll(self) -> None:
        alive = {worker.process.sentinel: worker for worker in self.workers.values() if not worker.ended}
        readers = {worker.channel.fileno(): worker for worker in alive.values()}
        results = {worker.result: worker for worker in alive.values()}
        ready = wait([*alive, *readers, *results], 0.2)
        for key in ready:
            if key in results and results[key].value is None:  # type: ignore[index]
                with contextlib.suppress(EOFError):
                    results[key].value = pickle.loads(results[key].result.recv_bytes())  # type: ignore[index]
        for worker in list(readers.values()):
            for message in worker.channel.receive():
                worker.messages.append(message)
                self._handle(worker, message)
        gone = [alive[key] for key in ready if key in alive]  # type: ignore[index]
        for worker in gone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # its loader's workers
            worker.process.join()
            worker.ended = True
        lost = [worker for worker in gone if worker.process.exitcode and worker.id in self.members]
        if lost and all(worker.process.exitcode == -signal.SIGKILL for worker in lost):
            self.lost += [worker.id for worker in lost]
            self.noticed_s.append(time.monotonic())
            self.members = [one for one in self.members if one not in self.lost]
            reasons = tuple(LostWorker(w.id, f"{w.id} was killed by SIGKILL", time.time()) for w in lost)
            self._change((), reasons, (), urgent=True)
        elif lost:
            raise RuntimeError({w.id: (w.process.exitcode, w.value) for w in lost})
        may_leave = self.leave_after is None or self.leave_after.exists()
        if may_leave and not self._pending() and self._number in self.leaves:
            leaver = self.leaves.pop(self._number)
            self.members.remove(leaver)
            self._change((), (), (leaver,), urgent=False, to=[leaver])

    def _handle(self, worker: _Worker, message: Message) -> None:
        if isinstance(message, Switched):
            self._switched[worker.id] = message.number
        if isinstance(message, Ready):
            self.members.append(worker.id)
            self._change((worker.id,), (), (), urgent=False)

    def _change(
        self,
        joined: tuple[str, ...],
        lost: tuple[LostWorker, ...],
        left: tuple[str, ...],
        *,
        urgent: bool,
        to: Any = (),
    ) -> None:
        self._number += 1
        change = MembershipChange(
            self._number,
            tuple(self.members),
            joined,
            lost,
            left,
            f"127.0.0.1:{self._store.port}",
            urgent,
            tuple(self.members),
            "gloo",
        )
        for member in [*self.members, *to]:
            self.workers[member].channel.send(change)
        (self._folder / f"change-{self._number}").touch()


def _run(pipe: Connection, channel: socket.socket, call: bytes, spec: WorkerSpec, path: str) -> None:
    import faulthandler
    import sys
    import traceback

    os.setsid()
    gc.freeze()  # what the server imported stays shared memory, and no collection searches it
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    write_spec(replace(spec, channel=channel.detach()), Path(path))
    os.environ[WORKER_VARIABLE] = path
    torch.set_num_threads(1)
    fn, args = pickle.loads(call)
    try:
        value = fn(*args)
    except SystemExit as left:
        value = {"exit": left.code}
    except BaseException as error:
        traceback.print_exc()
        value = {"error": f"{type(error).__name__}: {error}"}
        pipe.send_bytes(pickle.dumps(value))
        sys.stderr.flush()
        os._exit(1)
    pipe.send_bytes(pickle.dumps(value))
    sys.stdout.flush()
    os._exit(0)
