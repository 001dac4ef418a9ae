"""One attempt of a job on Ray: a placement group on the very nodes that the core chose, a runner in each bundle.

`Gang.look` asks Ray without waiting and says what is new; the controller calls it a few times a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenload.job.protocol import Report, Terms
from evenload.scheduler.backends.attempt import AttemptOutcome, outcome_of
from evenload.scheduler.backends.node_command import Place, spread
from evenload.scheduler.backends.ray.devices import NODE_LABEL, Bundle
from evenload.scheduler.backends.ray.runner import Runner, Task
from evenload.scheduler.core.states import Verb

GROUPS = "evenload-"
"""How the names of our placement groups begin."""
_PLACE_S = 60.0
"""What Ray gets to give the devices; longer means that somebody else holds them."""
_EVERY_S = 0.5
_OTHERS_S = 15.0
"""When the program has failed on one node, those on the others get so long to see it themselves."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an attempt runs."""

    job: str
    attempt: int
    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    grace_s: float
    goes_on: bool
    root: Path

    def task(self, place: Place) -> Task:
        """One node's part of it."""
        command, variables = spread(self.command, place)
        folder = self.root / self.job / f"{self.attempt}-{place.node_rank}"
        terms = Terms(self.job, self.attempt, str(folder / "report.json"), str(folder / "stop"), self.grace_s)
        log = log_file(self.root, self.job, place.node_rank)
        return Task(terms, command, self.folder, {**self.environment, **variables}, str(log), self.goes_on)


@dataclass(frozen=True, slots=True)
class News:
    """What `Gang.look` saw."""

    has_begun: bool = False
    report: Report | None = None
    outcome: AttemptOutcome | None = None
    lost: str = ""
    """Why its processes are gone through no fault of its own."""
    blocked: str = ""
    """Why Ray doesn't give the devices."""


def log_file(root: Path, job: str, node_rank: int = 0) -> Path:
    """Where the program's output goes; nodes after the first have files of their own."""
    return root / (f"{job}.log" if node_rank == 0 else f"{job}.node{node_rank}.log")


class Gang:
    """The placement group and the runners of one attempt."""

    def __init__(self, work: Work, bundles: Sequence[Bundle]) -> None:
        """Asks Ray for the devices."""
        import ray

        self._ray: Any = ray
        self._work, self._bundles = work, tuple(bundles)
        self._group = ray.util.placement_group(
            [bundle.resources() for bundle in bundles],
            strategy="PACK",
            name=f"{GROUPS}{work.job}.{work.attempt}",
            bundle_label_selector=[{NODE_LABEL: bundle.node} for bundle in bundles],
        )
        self._ready: Any = self._group.ready()
        self._asked_s = time.monotonic()
        self._runners: list[Any] = []
        self._meeting: Any = None
        self._looks: list[Any] = []
        self._looked_s = 0.0
        self._failed_s: float | None = None
        self._stop_reason = ""
        self.has_begun = False

    def look(self) -> News:
        """What is new; nothing in it while all goes on."""
        try:
            return self._look()
        except self._ray.exceptions.RayError as error:
            text = str(error).strip()
            return News(lost=f"its runner on Ray is gone: {text.splitlines()[0] if text else type(error).__name__}")

    def stop(self, reason: str) -> None:
        """Asks the program on each node to save and stop; a second time ends it at once."""
        self._stop_reason = reason
        for runner in self._runners if self.has_begun else ():
            runner.stop.remote(reason)

    def close(self) -> None:
        """Leaves nothing of it in Ray; the runners' programs end with them."""
        for runner in self._runners:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(runner)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)

    def _look(self) -> News:
        if not self._runners:
            return self._look_at_placement()
        if not self.has_begun:
            return self._look_at_meeting()
        if time.monotonic() - self._looked_s < _EVERY_S:
            return News()
        if not self._looks:
            self._looks = [runner.look.remote() for runner in self._runners]
        done, _ = self._ray.wait(self._looks, num_returns=len(self._looks), timeout=0)
        if len(done) < len(self._looks):
            return News()
        seen = self._ray.get(self._looks)
        self._looks, self._looked_s = [], time.monotonic()
        return News(report=seen[0][1], outcome=self._outcome([code for code, _ in seen]))

    def _look_at_placement(self) -> News:
        if self._stop_reason:
            return News(outcome=AttemptOutcome(Verb.YIELD, 0, self._stop_reason))
        if not self._ray.wait([self._ready], timeout=0)[0]:
            if time.monotonic() - self._asked_s > _PLACE_S:
                return News(blocked=f"Ray doesn't give its devices within {_PLACE_S:g} s: somebody else holds them")
            return News()
        self._ray.get(self._ready)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._runners = [
            self._ray.remote(Runner)
            .options(
                num_cpus=bundle.num_cpus,
                num_gpus=bundle.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            )
            .remote()
            for index, bundle in enumerate(self._bundles)
        ]
        self._meeting = self._runners[0].meet.remote()
        return News()

    def _look_at_meeting(self) -> News:
        if not self._ray.wait([self._meeting], timeout=0)[0]:
            return News()
        host, port = self._ray.get(self._meeting)
        for rank, runner in enumerate(self._runners):
            runner.start.remote(self._work.task(Place(len(self._runners), rank, host, port)))
        self.has_begun = True
        if self._stop_reason:
            self.stop(self._stop_reason)
        return News(has_begun=True)

    def _outcome(self, codes: Sequence[int | None]) -> AttemptOutcome | None:
        """How all nodes together ended: a failure counts before a stop, a stop before success."""
        ended = [outcome_of(code, "", True) for code in codes if code is not None]
        failed = [outcome for outcome in ended if outcome.verb is Verb.FAIL]
        if len(ended) < len(codes):
            if failed and self._failed_s is None:
                self._failed_s = time.monotonic()
                self.stop("it failed on another node")
            if self._failed_s is None or time.monotonic() - self._failed_s < _OTHERS_S:
                return None
        stopped = [outcome for outcome in ended if outcome.verb is Verb.YIELD]
        first = (failed or stopped or ended)[0]
        if first.verb is Verb.YIELD and self._stop_reason:
            return replace(first, reason=f"saved and stopped: {self._stop_reason}")
        return first
