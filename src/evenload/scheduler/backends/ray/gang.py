"""`RayGang`: one attempt of a job on Ray: a placement group on the nodes that the queue chose, and an actor per node.

`RayGang.poll` does not wait; the queue's actor calls it a few times a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenload.job.protocol import ProgressReport, RunnerContract
from evenload.scheduler.backends.attempt import AttemptOutcome, outcome_of
from evenload.scheduler.backends.node_command import NodeContext, command_on_node
from evenload.scheduler.backends.ray.devices import NODE_LABEL, NodeBundle
from evenload.scheduler.backends.ray.output import attempt_folder, output_path
from evenload.scheduler.backends.ray.runner import NodeRunner, NodeTask
from evenload.scheduler.core.states import Verb

GROUPS = "evenload-"
"""Prefix of the names of placement groups."""
_PLACEMENT_TIMEOUT_S = 60.0
"""After this time the devices are assumed to be in use outside the queue."""
_POLL_S = 0.5
_FAILURE_GRACE_S = 15.0
"""Time for the other nodes' programs to notice that the program has failed on one node."""


@dataclass(frozen=True, slots=True)
class GangProgram:
    job: str
    attempt: int
    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    grace_s: float
    goes_on: bool
    root: Path

    def task(self, node: NodeContext) -> NodeTask:
        command, variables = command_on_node(self.command, node)
        folder = attempt_folder(self.root, self.job, self.attempt, node.node_rank)
        contract = RunnerContract(
            self.job, self.attempt, str(folder / "report.json"), str(folder / "stop"), self.grace_s
        )
        log = output_path(self.root, self.job, self.attempt, node.node_rank)
        return NodeTask(contract, command, self.folder, {**self.environment, **variables}, str(log), self.goes_on)


@dataclass(frozen=True, slots=True)
class GangUpdate:
    has_begun: bool = False
    report: ProgressReport | None = None
    outcome: AttemptOutcome | None = None
    lost: str = ""
    """Reason why its processes are gone, if it is not the program's fault."""
    blocked: str = ""
    """Reason why Ray does not provide the devices."""


class RayGang:
    """The placement group and the actors of one attempt."""

    def __init__(self, program: GangProgram, bundles: Sequence[NodeBundle]) -> None:
        """Request the devices from Ray."""
        import ray

        self._ray: Any = ray
        self._program, self._bundles = program, tuple(bundles)
        self._group = ray.util.placement_group(
            [bundle.resources() for bundle in bundles],
            strategy="PACK",
            name=f"{GROUPS}{program.job}.{program.attempt}",
            bundle_label_selector=[{NODE_LABEL: bundle.node} for bundle in bundles],
        )
        self._ready: Any = self._group.ready()
        self._requested_s = time.monotonic()
        self._runners: list[Any] = []
        self._address: Any = None
        self._polls: list[Any] = []
        self._polled_s = 0.0
        self._failed_s: float | None = None
        self._stop_reason = ""
        self._num_stops = 0
        """Stop requests before the program began."""
        self.has_begun = False

    def poll(self) -> GangUpdate:
        try:
            return self._poll()
        except self._ray.exceptions.RayError as error:
            text = str(error).strip()
            return GangUpdate(
                lost=f"its actor on Ray is gone: {text.splitlines()[0] if text else type(error).__name__}"
            )

    def stop(self, reason: str) -> None:
        """Ask the program on each node to save and stop; a second call ends it at once."""
        self._stop_reason = reason
        self._num_stops += not self.has_begun
        for runner in self._runners if self.has_begun else ():
            runner.stop.remote(reason)

    def close(self) -> None:
        """Remove the actors, which end their programs, and the placement group."""
        for runner in self._runners:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(runner)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)

    def _poll(self) -> GangUpdate:
        if not self._runners:
            return self._poll_placement()
        if not self.has_begun:
            return self._poll_address()
        if time.monotonic() - self._polled_s < _POLL_S:
            return GangUpdate()
        if not self._polls:
            self._polls = [runner.poll.remote() for runner in self._runners]
        done, _ = self._ray.wait(self._polls, num_returns=len(self._polls), timeout=0)
        if len(done) < len(self._polls):
            return GangUpdate()
        results = self._ray.get(self._polls)
        self._polls, self._polled_s = [], time.monotonic()
        return GangUpdate(report=results[0][1], outcome=self._outcome([code for code, _ in results]))

    def _poll_placement(self) -> GangUpdate:
        if self._stop_reason:
            return GangUpdate(outcome=AttemptOutcome(Verb.YIELD, 0, self._stop_reason))
        if not self._ray.wait([self._ready], timeout=0)[0]:
            if time.monotonic() - self._requested_s > _PLACEMENT_TIMEOUT_S:
                return GangUpdate(
                    blocked=f"Ray did not provide the devices within {_PLACEMENT_TIMEOUT_S:g} s: they are used outside the queue"
                )
            return GangUpdate()
        self._ray.get(self._ready)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._runners = [
            self._ray.remote(NodeRunner)
            .options(
                num_cpus=bundle.num_cpus,
                num_gpus=bundle.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            )
            .remote()
            for index, bundle in enumerate(self._bundles)
        ]
        self._address = self._runners[0].find_address.remote()
        return GangUpdate()

    def _poll_address(self) -> GangUpdate:
        if not self._ray.wait([self._address], timeout=0)[0]:
            return GangUpdate()
        host, port = self._ray.get(self._address)
        for rank, runner in enumerate(self._runners):
            runner.start.remote(self._program.task(NodeContext(len(self._runners), rank, host, port)))
        self.has_begun = True
        for _ in range(self._num_stops):
            self.stop(self._stop_reason)
        return GangUpdate(has_begun=True)

    def _outcome(self, codes: Sequence[int | None]) -> AttemptOutcome | None:
        """The outcome of all nodes: a failure takes precedence over a stop, a stop over success."""
        ended = [outcome_of(code, "", True) for code in codes if code is not None]
        failed = [outcome for outcome in ended if outcome.verb is Verb.FAIL]
        if len(ended) < len(codes):
            if failed and self._failed_s is None:
                self._failed_s = time.monotonic()
                self.stop("it failed on another node")
            if self._failed_s is None or time.monotonic() - self._failed_s < _FAILURE_GRACE_S:
                return None
        stopped = [outcome for outcome in ended if outcome.verb is Verb.YIELD]
        first = (failed or stopped or ended)[0]
        if first.verb is Verb.YIELD and self._stop_reason:
            return replace(first, reason=f"stopped: {self._stop_reason}")
        return first
