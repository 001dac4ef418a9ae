"""`OutsideWorkers`: the workers of a run that are no members: they prepare to join, or have left and still run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from evenload.job import EXIT_CODE
from evenload.training.launch.failure import describe_end
from evenload.training.launch.membership_decider import Instruction, MembershipDecider
from evenload.training.launch.membership_messages import LostWorker
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.remote_workers import RemoteWorker


class OutsideWorkers:
    def __init__(
        self,
        workers: Mapping[str, WorkerProcess | RemoteWorker],
        forget: Callable[[str], None],
        act: Callable[[Sequence[Instruction]], None],
        where: Callable[[str], str],
        print_line: Callable[[str], None],
    ) -> None:
        """`workers`: all of the run; `forget` kills one whose end is dealt with; `where` returns a worker's device."""
        self._workers = workers
        self._forget, self._act, self._where, self._print = forget, act, where, print_line

    def poll(self, decider: MembershipDecider, names: Iterable[str]) -> None:
        """Deal with the ends of those of these workers that are no members."""
        for name in names:
            process, joins = self._workers[name], name in decider.joiners
            report, code = process.read_failure(), process.poll()
            if (code is None and not (joins and report)) or (name in decider.members and not decider.leaves(name)):
                continue
            report = report or process.read_failure()  # it may have written it and exited after the first look
            failure = report or describe_end(decider.rank_of(name), code or 1, process.ended_s)
            if joins and report is None and code in (0, EXIT_CODE):
                self._lose(decider, name, f"{self._where(name)} ended before its first step", restart=False)
            elif joins:
                self._lose(decider, name, failure.sentence(f"the joining {self._where(name)}"), failure.lost)
            elif name not in decider.expected or not (code or report):  # else it is a member that is lost
                self._forget(name)
                self._act(decider.ended(name))
                if code:
                    self._print(failure.sentence(f"{self._where(name)}, which had left,"))

    def end(self, decider: MembershipDecider, name: str, reason: str) -> None:
        """Kill a worker that does not respond."""
        if name in decider.joiners:
            self._lose(decider, name, f"the joining {self._where(name)} does not respond: {reason}")
            return
        self._forget(name)
        self._act(decider.ended(name))
        self._print(f"{self._where(name)}, which had left, does not end: {reason}; it is killed")

    def _lose(self, decider: MembershipDecider, name: str, text: str, restart: bool = True) -> None:
        self._forget(name)
        self._act(decider.lost([LostWorker(name, text, time.time())], restart))
