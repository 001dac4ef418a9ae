"""Faults for tests: data that say who, what and when (`Fault`), seeded random ones, and their injection into a run.

    faults = random_faults(seed=1, num_faults=5, num_ranks=3, num_steps=20, kinds=("out_of_memory", "slow"))
    injector = FaultInjector(run, faults)          # on each rank, after run.prepare
    loader = DataLoader(data, collate_fn=injector.collate(default_collate))

A fault happens once: in one process, or with a folder in all processes and sessions of a run, whose ranks may be replaced. The
points are hooks of modules, tensors and optimizers, the script's own functions, the write of a checkpoint, and Evenload's own
collectives, which are wrapped here. Production code contains none of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenload.errors import ConfigError, UnwritableError
from evenload.training.checkpoint import files
from evenload.training.comm import store
from evenload.training.comm.groups import Groups
from evenload.training.launch import throttle
from evenload.training.launch.environment import detect
from evenload.training.run import Run
from evenload.training.step.exchange import ReportExchange

KINDS = ("kill", "stop", "exception", "out_of_memory", "slow")
"""SIGKILL; SIGSTOP, and SIGCONT after `seconds`, or never; a RuntimeError; torch.OutOfMemoryError; a computation of `seconds`."""
REQUESTS = ("leave", "join")
"""Kinds that somebody outside carries out: the rank only notes in the folder of `FaultInjector` that it has come to the point."""
POINTS = ("forward", "backward", "reduced", "applied", "collate", "checkpoint")
"""In a forward of a prepared model inside `step.backward`; in its backward; between the reduction and `optimizer.step()`; after
that and before the next step; in collate_fn; in the write of a checkpoint."""
COLLECTIVES = ("bucket", "statistics", "exchange", "rebuild")
"""After a bucket of gradients was sent; before statistics of BatchNorm are summed; after the ranks exchanged reports; in the
beginning of a generation, when the others connect to this rank."""


@dataclass(frozen=True)
class Fault:
    """One fault: who, what, when."""

    rank: int
    kind: str
    """One of `KINDS` or `REQUESTS`."""
    point: str
    """One of `POINTS` or `COLLECTIVES`, or the name that the script gives to `FaultInjector.at`."""
    step: int
    """The first step, by its global index, in which the rank comes to the point. A collate_fn may run before its step."""
    seconds: float = 0.0
    """Of ``stop`` (0: until somebody continues or kills it) and ``slow``."""
    least_ranks: int = 1
    """It waits until so many ranks are members."""


def random_faults(
    seed: int,
    num_faults: int,
    num_ranks: int,
    num_steps: int,
    *,
    kinds: Sequence[str] = KINDS,
    points: Sequence[str] = POINTS,
    seconds: float = 0.1,
) -> tuple[Fault, ...]:
    """Return random faults in the order of their steps; the same for a seed. ConfigError if a kind is unknown."""
    if unknown := set(kinds) - set(KINDS):
        raise ConfigError(
            f"random_faults(kinds=...): unknown {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}"
        )
    choose = random.Random(seed)
    drawn = [
        Fault(
            choose.randrange(num_ranks),
            choose.choice(kinds),
            choose.choice(points),
            choose.randrange(num_steps),
            seconds,
        )
        for _ in range(num_faults)
    ]
    return tuple(sorted(drawn, key=lambda fault: fault.step))


class FaultInjector:
    """Lets faults happen on this rank, each once."""

    def __init__(self, run: Run, faults: Sequence[Fault], folder: Path | None = None) -> None:
        """Hook into the models that were prepared so far, into all optimizers, collectives and the write of checkpoints.

        With `folder` each fault happens once in all processes that share it: a file there holds when and where. A rank is the one
        that a process has when it comes to the point.
        """
        self._run = run
        self._folder = folder
        self._waiting = dict(enumerate(faults))
        self.happened: list[Fault] = []
        """Those of this process, in their order."""
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(lambda *_: self.at("reduced")),
            register_optimizer_step_post_hook(lambda *_: self.at("applied")),
        ]
        self._write = files.write
        files.write = self._write_checkpoint  # type: ignore[assignment]
        self._num_sums = 0
        self._collectives = (Groups.sum_async, Groups.sum_statistics, ReportExchange.run, store.wait_for_members)
        if any(fault.point in COLLECTIVES for fault in faults):
            self._wrap_collectives()
        for model in run._models:
            self._hooks += [
                model.register_forward_pre_hook(lambda *_: self.at("forward")),
                model.register_forward_hook(self._watch_backward),
            ]

    def at(self, point: str, step: int | None = None) -> None:
        """Let the next fault of this point happen, if its step has come; `step`: the one that the script works for."""
        loop = self._run._context.loop
        if point in ("forward", "backward") and not loop.in_backward:
            return  # an evaluation, or a check between two steps
        if step is None:
            step = loop.steps_done if loop.step is None else loop.step.index
        for index, fault in self._waiting.items():
            if fault.point != point or fault.step > step or fault.rank != self._run.rank:
                continue
            if self._run.world_size < fault.least_ranks:
                continue
            del self._waiting[index]
            if self._claim(index, fault, step):
                self.happened.append(fault)
                _happen(fault)
            return

    def _claim(self, index: int, fault: Fault, step: int) -> bool:
        """Note that a fault happens now; return False if it has happened in another process."""
        if self._folder is None:
            return True
        here = {"at_step": step, "world_size": self._run.world_size, "time_s": time.time(), "pid": os.getpid()}
        text = json.dumps({**asdict(fault), **here, "worker": self._run._context.spec.worker})
        own = self._folder / f".{index}-{os.getpid()}"
        own.write_text(text)
        try:
            os.link(own, self._folder / f"{index}.json")  # complete at once, and only for the first
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def collate(self, collate_fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a collate_fn in which faults happen; for a loader without workers."""

        def collate(samples: list[Any]) -> Any:
            self.at("collate")
            return collate_fn(samples)

        return collate

    def close(self) -> None:
        """Remove the hooks."""
        files.write = self._write
        self._set_collectives(*self._collectives)
        for hook in self._hooks:
            hook.remove()

    def _write_checkpoint(self, *arguments: Any) -> int:
        try:
            self.at("checkpoint")
        except RuntimeError as error:
            raise UnwritableError(f"the checkpoint can't be written: {error}") from None  # as a disk that fails
        return self._write(*arguments)

    def _wrap_collectives(self) -> None:
        sum_async, sum_statistics, exchange, wait_for_members = self._collectives

        def sum_bucket(own: Groups, tensor: torch.Tensor, *, on_host: bool = False) -> Any:
            pending = sum_async(own, tensor, on_host=on_host)
            self._num_sums += not on_host
            if self._num_sums % 2 and not on_host:
                self.at("bucket")
            return pending

        def sum_vector(own: Groups, tensor: torch.Tensor) -> None:
            self.at("statistics")
            sum_statistics(own, tensor)

        def exchange_reports(own: ReportExchange, *args: Any, **options: Any) -> Any:
            reports = exchange(own, *args, **options)
            self.at("exchange")
            return reports

        def wait_to_connect(*args: Any) -> None:
            wait_for_members(*args)
            self.at("rebuild")

        self._set_collectives(sum_bucket, sum_vector, exchange_reports, wait_to_connect)

    @staticmethod
    def _set_collectives(sum_async: Any, sum_statistics: Any, exchange: Any, wait_for_members: Any) -> None:
        Groups.sum_async, Groups.sum_statistics = sum_async, sum_statistics  # type: ignore[method-assign]
        ReportExchange.run = exchange  # type: ignore[method-assign]
        store.wait_for_members = wait_for_members

    def _watch_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, list | tuple) else (output,)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self.at("backward"))  # type: ignore[no-untyped-call]


def _happen(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop" and not fault.seconds:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "stop":
        # Another process stops this one, too: if this one were late, it would stop itself after it was continued.
        own = os.getpid()
        subprocess.run(["sh", "-c", f"kill -STOP {own}; sleep {fault.seconds}; kill -CONT {own}"], check=True)
    elif fault.kind == "exception":
        raise RuntimeError(f"injected: {fault}")
    elif fault.kind == "out_of_memory":
        raise torch.OutOfMemoryError(f"injected: {fault}")
    elif fault.kind == "slow":
        until_s = time.thread_time() + fault.seconds
        while time.thread_time() < until_s:
            pass


def read_happened(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return by index the faults that have happened: fields, ``at_step``, ``world_size``, ``time_s``, ``pid`` and ``worker``."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")}


def set_throttle(factors: Sequence[float], launch_dir: Path | None = None, timeout_s: float = 5.0) -> None:
    """Change the relative speeds of all running ranks, and return when they apply.

    The launch must have been started with ``--throttle`` (or ``run_ranks(..., throttle=[1, 1])``).

    Args:
        factors: one speed in (0, 1] for each rank, relative to its own full speed.
        launch_dir: folder of the launch; by default that of the calling worker.
        timeout_s: seconds to wait for the supervisor.

    Raises:
        ConfigError: called outside a worker without ``launch_dir``, the launch is not throttled, or the speeds are wrong.
        LaunchError: the supervisor did not apply them in time.
    """
    if launch_dir is None:
        own_launch_dir = detect().launch_dir
        if not own_launch_dir:
            raise ConfigError("set_throttle() outside a worker of `evenload run` needs launch_dir=...")
        launch_dir = Path(own_launch_dir)
    throttle.request_speeds(launch_dir, factors, timeout_s)
