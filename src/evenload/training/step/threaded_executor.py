"""The replicas of one process compute an attempt side by side (strategy ``dp``), each in its lane.

Note [What is different from ranks]
  Nothing is exchanged: all reports are made here. A replica without samples does nothing at all, in BatchNorm either. Out of
  memory in one replica wakes those that wait for it, so the step is done again with BatchNorm too. Optimizer, data and the
  user's frame are the process's: they are told as the first replica's, the others wait meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenload.errors import ConfigError, StepError
from evenload.job import stop_requested
from evenload.training.comm.clock import Segment, StepClock
from evenload.training.compute import batchnorm
from evenload.training.compute.micro_steps import StepContext, Sums, run_micro_steps
from evenload.training.compute.precision import Precision
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.replicas import ReplicaDevice
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.parallel.threaded.dp import LaneStrategy
from evenload.training.parallel.threaded.random_draws import Draws, seed_lane
from evenload.training.parallel.threaded.replica_threads import Lane, Lanes, LaneStoppedError, Meeting, Turn, here
from evenload.training.step.executor import (
    AttemptResult,
    BackwardAttempt,
    LabelWatch,
    is_out_of_memory,
    memory_bytes,
    slow_down,
)
from evenload.training.step.report import LATE_GRADIENT, OK, OUT_OF_MEMORY, UNWANTED, RankReport


class LaneStatistics(batchnorm.Statistics):
    """BatchNorm over the lanes of one process: those that have samples of the micro-batch."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._meetings: list[Meeting] = []
        self.in_use = False

    @property
    def idle(self) -> bool:
        """Whether the calling lane's part of the micro-batch doesn't count."""
        lane = here()
        return lane is not None and lane.idle

    @idle.setter
    def idle(self, idle: bool) -> None:
        lane = here()
        if lane is not None:
            lane.idle = idle

    @property
    def world_size(self) -> int:
        """Lanes that share the statistics of the calling lane's micro-batch; elsewhere all lanes."""
        lane = here()
        return len(self._lanes) if lane is None else len(self._meetings[lane.micro_index].members)

    def meet(self, micro: Sequence[Sequence[int]]) -> None:
        """An attempt begins; ``micro[m][lane]`` samples."""
        hint = '; batch_norm="local" leaves them alone'
        self._meetings = [Meeting([lane for lane, share in enumerate(row) if share], hint) for row in micro]

    def stop(self) -> None:
        """Wakes everyone who waits for another lane."""
        for meeting in self._meetings:
            meeting.stop()

    def begin(self, micro_index: int, *, idle: bool) -> None:
        """The calling lane begins a micro-batch."""
        lane = _lane()
        lane.micro_index, lane.idle = micro_index, idle

    def end(self, micro_index: int) -> None:
        """The calling lane has done its part of a micro-batch."""
        self._meetings[micro_index].leave(_lane().index)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """All lanes' vectors, shape ``(lanes, len(own))``, on the calling lane's device."""
        return torch.stack([value.to(own.device) for value in self._exchange(own)])

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over lanes, in their order."""
        first, *others = self._exchange(own)
        total: torch.Tensor = first.to(own.device, copy=True)
        for value in others:
            total += value.to(own.device)
        return total

    def _exchange(self, own: torch.Tensor) -> list[torch.Tensor]:
        lane = _lane()
        with lane.clock.segment("comm"), contextlib.nullcontext() if lane.turn is None else lane.turn.given_on():
            return self._meetings[lane.micro_index].exchange(lane.index, own)


@dataclass
class _Part:
    """What one replica did of an attempt."""

    sums: Sums = field(default_factory=Sums)
    status: int = OK
    touched_key: float = 0.0
    seconds: Mapping[Segment, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0


class ThreadedExecutor:
    """All replicas of this process: each computes its part of the batch in its lane."""

    def __init__(
        self,
        lanes: Lanes,
        strategy: LaneStrategy,
        statistics: LaneStatistics,
        precision: Precision,
        clock: StepClock,
        seed: int,
        throttles: Sequence[ComputeThrottle],
    ) -> None:
        """Args:
        lanes: one for each replica.
        strategy: whose replicas they are.
        statistics: of BatchNorm over the lanes.
        precision: the run's; the lanes follow its scale.
        clock: of this thread.
        seed: of all keyed randomness.
        throttles: which slow a replica down, one for each.
        """
        self._lanes = lanes
        self._strategy = strategy
        self._statistics = statistics
        self._precision = precision
        self._clock = clock
        self._seed = seed
        self._throttles = list(throttles)
        self._draws = Draws(lanes.all)
        self._precisions = [Precision(precision.name, lane.device) for lane in lanes.all]
        self._started = time.monotonic()
        watch = LabelWatch()
        self._context = [
            StepContext(
                lane.index,
                lane.device,
                seed,
                strategy,
                statistics,
                own_precision,
                watch.look,
                computes_idle=False,
                reseed=functools.partial(seed_lane, lane),
                check=lanes.check,
            )
            for lane, own_precision in zip(lanes.all, self._precisions, strict=True)
        ]

    def attach(self, models: Sequence[nn.Module]) -> None:
        """The strategy has them."""

    @property
    def num_ranks(self) -> int:
        """This process alone takes part."""
        return 1

    def attempt(self, attempt: BackwardAttempt) -> AttemptResult:
        """Computes all parts side by side; in turns where the planner asks for it."""
        batch, plan = attempt.batch, attempt.batch.plan
        batch.read_all()
        active = [lane for lane, share in enumerate(plan.shares) if share]
        in_turns = attempt.planner.takes_turns and len(active) > 1
        process_s = dict(self._clock.take())
        self._clock.switch("wait")
        with _gpu_generators_kept(self._lanes.all[1:]):
            parts = self._side_by_side(attempt, active, Turn() if in_turns else None)
        self._clock.take()  # this thread's waiting is the lanes' computing, which they tell themselves
        began_s = min(part.began_s for part in parts.values())
        together_s = max(part.ended_s for part in parts.values()) - began_s
        self._tell_planner(attempt, parts, together_s, in_turns)
        reports = self._reports(attempt, parts, process_s, together_s)
        first = parts[active[0]]
        wide = any(part.sums.dtype == torch.float64 for part in parts.values())
        return AttemptResult(reports, first.sums.nominal, torch.float64 if wide else first.sums.dtype)

    def _side_by_side(self, attempt: BackwardAttempt, active: Sequence[int], turn: Turn | None) -> dict[int, _Part]:
        plan = attempt.batch.plan
        parts = {index: _Part() for index in active}
        for index in active:
            self._precisions[index].scale = self._precision.scale
            self._lanes.all[index].turn = turn
        self._statistics.meet(plan.micro)
        self._draws.begin(self._seed, attempt.batch.global_step, attempt.stats.calls)
        works = {index: functools.partial(self._work, index, attempt, part) for index, part in parts.items()}
        keeper = max(active, key=lambda index: (plan.shares[index], -index))
        with self._strategy.taking_part(active, keeper), self._draws.active(), _uncompiled():
            self._lanes.run(works, on_failure=self._statistics.stop)
        if all(part.status == OK for part in parts.values()) and self._draws.were_shared():
            for part in parts.values():
                part.status = UNWANTED
        return parts

    def _work(self, index: int, attempt: BackwardAttempt, part: _Part) -> None:
        """One replica's part, in its own thread."""
        lane = self._lanes.all[index]
        part.began_s = time.perf_counter()
        clock = lane.clock = StepClock(lane.device)
        with contextlib.nullcontext() if lane.turn is None else lane.turn.held(clock):
            clock.switch("compute")
            started_s, cpu_s = time.perf_counter(), _runnable_s()
            try:
                with self._draws.of(lane):
                    run_micro_steps(
                        self._context[index],
                        attempt.batch,
                        attempt.loss_fn,
                        attempt.stats.calls,
                        attempt.last_units,
                        part.sums,
                    )
                slow_down(self._throttles[index], lane.device, started_s)
            except LaneStoppedError:
                part.status = UNWANTED
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                part.status = OUT_OF_MEMORY
                self._lanes.stop()
                self._statistics.stop()
            part.touched_key, late = self._strategy.report()
            if late and part.status == OK:
                part.status = LATE_GRADIENT
            if lane.device.type == "cuda":
                torch.cuda.current_stream(lane.device).synchronize()
            part.cpu_s = _runnable_s() - cpu_s
            clock.switch("other")
        part.seconds = clock.take()
        part.ended_s = time.perf_counter()

    def _tell_planner(
        self, attempt: BackwardAttempt, parts: Mapping[int, _Part], together_s: float, in_turns: bool
    ) -> None:
        own_s, cpu_s = [0.0] * len(self._lanes), [0.0] * len(self._lanes)
        for index, part in parts.items():
            own_s[index], cpu_s[index] = part.seconds["compute"], part.cpu_s
        attempt.planner.watch(own_s, cpu_s, together_s, in_turns)

    def _reports(
        self,
        attempt: BackwardAttempt,
        parts: Mapping[int, _Part],
        process_s: Mapping[Segment, float],
        together_s: float,
    ) -> list[RankReport]:
        done = [part for part in parts.values() if part.status == OK]
        names = {tuple(sorted(part.sums.metrics)) for part in done}
        if len(names) > 1:
            raise StepError(
                f"loss_fn returned other metrics on other replicas: {' and '.join(map(_listed, sorted(names)))}"
            )
        known = sorted(next(iter(names), ()))
        pattern = next(iter(parts.values()))
        reports = []
        for index, lane in enumerate(self._lanes.all):
            part = parts.get(index)
            sums = part.sums if part is not None else Sums(weighted=pattern.sums.weighted)
            own = dict(part.seconds) if part is not None else dict.fromkeys(process_s, 0.0)
            reports.append(
                RankReport(
                    status=part.status if part is not None else OK,
                    weighted=sums.weighted,
                    units=sums.units,
                    loss_sum=float(sums.loss_sum),
                    touched_key=part.touched_key if part is not None else pattern.touched_key,
                    has_decision=attempt.planner.has_decision,
                    elapsed_s=time.monotonic() - self._started,
                    memory_bytes=float(memory_bytes(lane.device)),
                    state_key=0.0,
                    reading=attempt.batch.reading.code(),
                    asked=stop_requested(),
                    seconds=_told_seconds(own, process_s, together_s, is_first=index == 0),
                    metrics={name: float(sums.metrics.get(name, 0.0)) for name in known},
                )
            )
        return reports


def _told_seconds(
    own: Mapping[Segment, float], process_s: Mapping[Segment, float], together_s: float, *, is_first: bool
) -> dict[Segment, float]:
    """One replica's seconds with its part in what the process did beside the lanes."""
    told = dict(process_s)
    waited_s = max(0.0, together_s - own["compute"] - own["comm"])
    told["wait"] += told["compute"] + waited_s
    told["compute"], told["comm"] = own["compute"], own["comm"]
    if not is_first:
        told["wait"] += told["optimizer"]
        told["optimizer"] = 0.0
    return told


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A compiled function in loss_fn would hold one replica's parameters; it runs as it was written."""
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything, and importing it takes long
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


@contextlib.contextmanager
def _gpu_generators_kept(lanes: Sequence[Lane]) -> Iterator[None]:
    """GPUs of lanes other than the first: their generators are afterwards as they were."""
    generators = [torch.cuda.default_generators[lane.device.index or 0] for lane in lanes if lane.device.type == "cuda"]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _runnable_s() -> float:
    """How long this thread was on a processor so far, or waited for one that another thread had (where Linux tells)."""
    try:
        running_ns, waiting_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(running_ns) + int(waiting_ns)) / 1e9


def _lane() -> Lane:
    lane = here()
    if lane is None:
        raise RuntimeError("this thread computes for no replica")
    return lane


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def open_threaded_executor(
    places: Sequence[ReplicaDevice], spec: WorkerSpec, precision: Precision, clock: StepClock, seed: int
) -> tuple[LaneStrategy, LaneStatistics, ThreadedExecutor]:
    """The replicas of this process, one a place: their strategy, their statistics, and who computes.

    Raises:
        ConfigError: torch doesn't see one of the GPUs.
    """
    for place in places:
        device = torch.device(place.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {device} was asked for; torch sees {torch.cuda.device_count()} GPUs. `evenload doctor` tells why"
            )
    lanes = Lanes(
        [Lane(index, torch.device(place.device), place.cores, place.num_threads) for index, place in enumerate(places)]
    )
    throttles = [
        ComputeThrottle(
            replace(
                spec,
                local_rank=index,  # a replica counts as a rank of this machine
                device=place.device,
                throttle={"factor": place.factor, "means": "compute"} if spec.throttle else {},
            )
        )
        for index, place in enumerate(places)
    ]
    strategy, statistics = LaneStrategy(lanes), LaneStatistics(lanes)
    return strategy, statistics, ThreadedExecutor(lanes, strategy, statistics, precision, clock, seed, throttles)
