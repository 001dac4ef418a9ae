"""Faults for tests: data that say who, what and when (`Fault`), seeded random ones, and their injection into a run.

    faults = random_faults(seed=1, num_faults=5, num_ranks=3, num_steps=20, kinds=("out_of_memory", "slow"))
    injector = FaultInjector(run, faults)          # on each rank, after run.prepare
    loader = DataLoader(data, collate_fn=injector.collate(default_collate))

A fault happens once. The points are public places: hooks of modules, tensors and optimizers, the script's own functions, and the
write of a checkpoint. Production code contains none of it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenload.errors import ConfigError
from evenload.training.checkpoint import files
from evenload.training.launch import throttle
from evenload.training.launch.environment import detect
from evenload.training.run import Run

KINDS = ("kill", "stop", "exception", "out_of_memory", "slow")
"""SIGKILL; SIGSTOP, and SIGCONT after `seconds`; a RuntimeError; torch.OutOfMemoryError; a computation of `seconds`."""
POINTS = ("forward", "backward", "reduced", "applied", "collate", "checkpoint")
"""In a forward of a prepared model inside `step.backward`; in its backward; between the reduction and `optimizer.step()`; after
that and before the next step; in collate_fn; in the write of a checkpoint."""


@dataclass(frozen=True)
class Fault:
    """One fault: who, what, when."""

    rank: int
    kind: str
    """One of `KINDS`."""
    point: str
    """One of `POINTS`, or the name that the script gives to `FaultInjector.at`."""
    step: int
    """The first step, by its global index, in which the rank comes to the point. A collate_fn may run before its step."""
    seconds: float = 0.0
    """Of ``stop`` and ``slow``."""


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
    """Lets the faults of this rank happen in a run, each once."""

    def __init__(self, run: Run, faults: Sequence[Fault]) -> None:
        """Hook into the models that were prepared so far, into all optimizers and the write of checkpoints."""
        self._run = run
        self._waiting = [fault for fault in faults if fault.rank == run.rank]
        self.happened: list[Fault] = []
        """Those of this rank, in their order."""
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(lambda *_: self.at("reduced")),
            register_optimizer_step_post_hook(lambda *_: self.at("applied")),
        ]
        self._write = files.write
        files.write = self._write_checkpoint  # type: ignore[assignment]
        for model in run._models:
            self._hooks += [
                model.register_forward_pre_hook(lambda *_: self.at("forward")),
                model.register_forward_hook(self._watch_backward),
            ]

    def at(self, point: str) -> None:
        """Let the next fault of this point happen, if its step has come."""
        loop = self._run._context.loop
        if point in ("forward", "backward") and not loop.in_backward:
            return  # an evaluation, or a check between two steps
        index = loop.steps_done if loop.step is None else loop.step.index
        for fault in self._waiting:
            if fault.point == point and fault.step <= index:
                self._waiting.remove(fault)
                self.happened.append(fault)
                _happen(fault)
                return

    def collate(self, collate_fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a collate_fn in which faults happen; for a loader without workers."""

        def collate(samples: list[Any]) -> Any:
            self.at("collate")
            return collate_fn(samples)

        return collate

    def close(self) -> None:
        """Remove the hooks."""
        files.write = self._write
        for hook in self._hooks:
            hook.remove()

    def _write_checkpoint(self, *arguments: Any) -> int:
        self.at("checkpoint")
        return self._write(*arguments)

    def _watch_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, list | tuple) else (output,)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self.at("backward"))  # type: ignore[no-untyped-call]


def _happen(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
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
