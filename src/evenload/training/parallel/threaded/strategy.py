"""Strategy ``dp``: the replicas of one process compute a step side by side, each in its thread.

Note [Differences to ranks]
  Nothing is exchanged between processes: this module makes all reports. A replica without samples does nothing at all, not
  even in BatchNorm. Out of memory in one replica wakes those that wait for it, so the step can be redone with BatchNorm too.
  Optimizer, data and the user's loop belong to the process: they count for the first replica, while the others wait.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenload.balance.values import StepPlan
from evenload.errors import ConfigError, StepError
from evenload.training.comm.clock import Segment, StepClock
from evenload.training.comm.groups import Groups
from evenload.training.compute import batchnorm
from evenload.training.compute.coupled_steps import exchange_rows, run_steps
from evenload.training.compute.device_state import memory_bytes, slow_down
from evenload.training.compute.label_watch import LabelWatch
from evenload.training.compute.micro_steps import LossFn, LossSums, StepContext
from evenload.training.compute.out_of_memory import is_out_of_memory
from evenload.training.compute.precision import Precision
from evenload.training.compute.replicated_state import replicated_state
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.replicas import ReplicaDevice
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.parallel.call_gradients import Expectation
from evenload.training.parallel.strategy import (
    LATE_GRADIENT,
    OK,
    OUT_OF_MEMORY,
    UNWANTED,
    BackwardCall,
    LocalResult,
    StepResult,
)
from evenload.training.parallel.threaded.generators import ReplicaGenerators, seed_replica
from evenload.training.parallel.threaded.replica_gradients import ReplicaGradients
from evenload.training.parallel.threaded.replica_threads import (
    ReplicaCancelledError,
    ReplicaExchange,
    ReplicaThread,
    ReplicaThreads,
    TurnLock,
    current_replica,
    this_replica,
)


class ReplicaStatistics(batchnorm.Statistics):
    """BatchNorm statistics over the replicas of one process that have samples of the micro-batch."""

    def __init__(self, threads: ReplicaThreads) -> None:
        self._threads = threads
        self._exchanges: list[ReplicaExchange] = []
        self.in_use = False

    @property
    def idle(self) -> bool:
        """True where the calling replica's part of the micro-batch does not count."""
        thread = current_replica()
        return thread is not None and thread.idle

    @idle.setter
    def idle(self, idle: bool) -> None:
        thread = current_replica()
        if thread is not None:
            thread.idle = idle

    @property
    def world_size(self) -> int:
        """Replicas that share the statistics of the calling replica's micro-batch; in other threads all replicas."""
        thread = current_replica()
        if thread is None:
            return len(self._threads)
        return 1 if thread.stage is None else len(self._exchanges[thread.stage].members)

    def begin_attempt(self, stages: Sequence[Sequence[int]]) -> None:
        """`stages`: for each stage in which replicas exchange (a micro-batch), the samples of each."""
        hint = '; batch_norm="local" leaves them alone'
        self._exchanges = [ReplicaExchange([r for r, share in enumerate(row) if share], hint) for row in stages]

    def cancel(self) -> None:
        for exchange in self._exchanges:
            exchange.cancel()

    def begin(self, stage: int | None, *, idle: bool) -> None:
        thread = this_replica()
        thread.stage, thread.idle = stage, idle

    def end(self, stage: int) -> None:
        self._exchanges[stage].leave(this_replica().index)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return all replicas' vectors, shape ``(replicas, len(own))``, on the calling replica's device."""
        return torch.stack([value.to(own.device) for value in self._exchange(own)])

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        first, *others = self._exchange(own)
        total: torch.Tensor = first.to(own.device, copy=True)
        for value in others:
            total += value.to(own.device)
        return total

    def _exchange(self, own: torch.Tensor) -> list[torch.Tensor]:
        thread = this_replica()
        with thread.clock.segment("comm"), contextlib.nullcontext() if thread.turn is None else thread.turn.released():
            return self._exchanges[thread.stage or 0].gather(thread.index, own)


@dataclass
class _ReplicaResult:
    sums: LossSums = field(default_factory=LossSums)
    status: int = OK
    touched_key: float = 0.0
    seconds: Mapping[Segment, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0


class ThreadedStrategy:
    """Data parallelism with all replicas of this process; see the note above."""

    def __init__(
        self,
        threads: ReplicaThreads,
        precision: Precision,
        clock: StepClock,
        seed: int,
        throttles: Sequence[ComputeThrottle],
    ) -> None:
        self.threads = threads
        self._gradients = ReplicaGradients(threads)
        self._statistics = ReplicaStatistics(threads)
        self._precision = precision
        self._clock = clock
        self._seed = seed
        self._throttles = list(throttles)
        self._generators = ReplicaGenerators(threads.all)
        self._precisions = [Precision(precision.name, thread.device) for thread in threads.all]
        self._models: list[nn.Module] = []
        watch = LabelWatch()
        self._context = [
            StepContext(
                thread.device,
                seed,
                self._statistics,
                own_precision,
                watch.check,
                computes_idle=False,
                reseed=functools.partial(seed_replica, thread),
                check=threads.check,
            )
            for thread, own_precision in zip(threads.all, self._precisions, strict=True)
        ]

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        self._models = list(models)
        self._context = [replace(context, models=self._models) for context in self._context]
        self._gradients.attach(models)
        self._statistics.in_use = any(batchnorm.has_global_statistics(model) for model in models)

    def detach(self) -> None:
        self._gradients.detach()
        self.threads.close()

    def run(self, plan: StepPlan, batch: GlobalBatch, loss_fn: LossFn, call: BackwardCall) -> StepResult:
        """Compute all parts side by side, or in turns where the planner asks for it."""
        batch.read_all()
        active = [index for index, share in enumerate(plan.shares) if share]
        in_turns = call.in_turns and len(active) > 1
        if call.begins_update:
            self._gradients.clear_skip()
        self._gradients.begin(call.index, expect=call.may_expect)
        process_s = dict(self._clock.take())
        self._clock.switch("wait")
        with _gpu_generators_kept(self.threads.all[1:]), batchnorm.Active(self._statistics):
            parts = self._side_by_side(batch, loss_fn, call, active, TurnLock() if in_turns else None)
        self._clock.take()  # this thread waits while the replicas compute; their own clocks count that
        began_s = min(part.began_s for part in parts.values())
        together_s = max(part.ended_s for part in parts.values()) - began_s
        own_s, cpu_s = [0.0] * len(self.threads), [0.0] * len(self.threads)
        for index, part in parts.items():
            own_s[index], cpu_s[index] = part.seconds["compute"], part.cpu_s
        call.add_replica_times(own_s, cpu_s, together_s, in_turns)
        totals = call.exchange(self._local_results(parts, process_s, together_s))
        first = parts[active[0]]
        self._gradients.resolve()
        nominal = first.sums.nominal
        finite = self._gradients.finish(nominal / (totals.units * self._precision.scale))
        if not (finite and math.isfinite(totals.loss)):
            self._gradients.clear()
        is_wide = any(part.sums.dtype == torch.float64 for part in parts.values())
        loss = torch.tensor(totals.loss, dtype=torch.float64 if is_wide else first.sums.dtype)
        return StepResult(totals.units, loss, finite, nominal)

    def rollback(self, *, together: bool) -> None:
        self._gradients.abort()

    def state_dict(self) -> Mapping[int, Expectation]:
        return self._gradients.state_dict()

    def load_state_dict(self, state: Mapping[int, Expectation]) -> None:
        self._gradients.load_state_dict(state)

    def fingerprint(self) -> Mapping[str, torch.Tensor]:
        return replicated_state(self._models)

    def _side_by_side(
        self, batch: GlobalBatch, loss_fn: LossFn, call: BackwardCall, active: Sequence[int], turn: TurnLock | None
    ) -> dict[int, _ReplicaResult]:
        plan = batch.plan
        parts = {index: _ReplicaResult() for index in active}
        for index in active:
            self._precisions[index].scale = self._precision.scale
            self.threads.all[index].turn = turn
        self._statistics.begin_attempt(exchange_rows(plan, loss_fn))
        self._generators.begin(self._seed, batch.global_step, call.index)
        works = {
            index: functools.partial(self._work, index, batch, loss_fn, call, part) for index, part in parts.items()
        }
        buffer_owner = max(active, key=lambda index: (plan.shares[index], -index))
        with self._gradients.active_replicas(active, buffer_owner), self._generators.active(), _uncompiled():
            self.threads.run(works, on_failure=self._statistics.cancel)
        if all(part.status == OK for part in parts.values()) and self._generators.must_separate():
            for part in parts.values():
                part.status = UNWANTED
        return parts

    def _work(self, index: int, batch: GlobalBatch, loss_fn: LossFn, call: BackwardCall, part: _ReplicaResult) -> None:
        thread = self.threads.all[index]
        part.began_s = time.perf_counter()
        clock = thread.clock = StepClock(thread.device)
        with contextlib.nullcontext() if thread.turn is None else thread.turn.held(clock):
            clock.switch("compute")
            started_s, cpu_s = time.perf_counter(), _runnable_s()
            try:
                with self._generators.mode_of(thread):
                    run_steps(
                        self._context[index],
                        batch,
                        loss_fn,
                        part.sums,
                        self._gradients.backward,
                        column=index,
                        call_index=call.index,
                        last_units=call.last_units,
                    )
                slow_down(self._throttles[index], thread.device, started_s)
            except ReplicaCancelledError:
                part.status = UNWANTED
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                part.status = OUT_OF_MEMORY
                self.threads.cancel()
                self._statistics.cancel()
            part.touched_key, late = self._gradients.report()
            if late and part.status == OK:
                part.status = LATE_GRADIENT
            if thread.device.type == "cuda":
                torch.cuda.current_stream(thread.device).synchronize()
            part.cpu_s = _runnable_s() - cpu_s
            clock.switch("other")
        part.seconds = clock.take()
        part.ended_s = time.perf_counter()

    def _local_results(
        self, parts: Mapping[int, _ReplicaResult], process_s: Mapping[Segment, float], together_s: float
    ) -> list[LocalResult]:
        done = [part for part in parts.values() if part.status == OK]
        names = {tuple(sorted(part.sums.metrics)) for part in done}
        if len(names) > 1:
            raise StepError(
                f"loss_fn returned different metrics on different replicas: {' and '.join(map(_listed, sorted(names)))}"
            )
        known = sorted(next(iter(names), ()))
        pattern = next(iter(parts.values()))
        results = []
        for index, thread in enumerate(self.threads.all):
            part = parts.get(index)
            sums = part.sums if part is not None else LossSums(weighted=pattern.sums.weighted)
            own = dict(part.seconds) if part is not None else dict.fromkeys(process_s, 0.0)
            results.append(
                LocalResult(
                    status=part.status if part is not None else OK,
                    weighted=sums.weighted,
                    units=float(sums.units),
                    loss_sum=float(sums.loss_sum),
                    metrics={name: float(sums.metrics.get(name, 0.0)) for name in known},
                    touched_key=part.touched_key if part is not None else pattern.touched_key,
                    seconds=_reported_seconds(own, process_s, together_s, is_first=index == 0),
                    memory_bytes=memory_bytes(thread.device),
                )
            )
        return results


def _reported_seconds(
    own: Mapping[Segment, float], process_s: Mapping[Segment, float], together_s: float, *, is_first: bool
) -> dict[Segment, float]:
    """Return one replica's seconds, with its part in those that the process spent outside the replicas."""
    seconds = dict(process_s)
    waited_s = max(0.0, together_s - own["compute"] - own["comm"])
    seconds["wait"] += seconds["compute"] + waited_s
    seconds["compute"], seconds["comm"] = own["compute"], own["comm"]
    if not is_first:
        seconds["wait"] += seconds["optimizer"]
        seconds["optimizer"] = 0.0
    return seconds


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Run compiled functions in loss_fn eagerly: their graphs would hold one replica's parameters."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes long
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


@contextlib.contextmanager
def _gpu_generators_kept(threads: Sequence[ReplicaThread]) -> Iterator[None]:
    generators = [
        torch.cuda.default_generators[thread.device.index or 0] for thread in threads if thread.device.type == "cuda"
    ]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _runnable_s() -> float:
    try:
        running_ns, waiting_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(running_ns) + int(waiting_ns)) / 1e9


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def open_threaded_strategy(
    places: Sequence[ReplicaDevice], spec: WorkerSpec, precision: Precision, clock: StepClock, seed: int
) -> ThreadedStrategy:
    """Open the replicas of this process, one per place; ConfigError if torch doesn't see one of the GPUs."""
    for place in places:
        device = torch.device(place.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {device} was requested, but torch sees {torch.cuda.device_count()} GPUs; run `evenload doctor`"
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
    return ThreadedStrategy(ReplicaThreads.on(places), precision, clock, seed, throttles)
