"""``evenload demo``: train a language model on two unequal devices, and measure the gain."""

from __future__ import annotations

import importlib.resources
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import evenload
from evenload.errors import ConfigError

_STEPS, _STEPS_BEFORE = 240, 220
_GPU_SIZES = ("--width", "512", "--depth", "8", "--context", "256", "--batch-size", "96")
_CPU_SIZES = ("--width", "128", "--depth", "4", "--context", "64", "--batch-size", "60")


def demo(
    project_dir: Annotated[str, typer.Option(help="Run folder.")] = "runs/demo",
    steps: Annotated[int, typer.Option(min=20, help="Number of training steps.")] = _STEPS,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the measurement.")] = 5,
    block_s: Annotated[
        float, typer.Option("--block", metavar="SECONDS", help="Length of one block of the measurement.")
    ] = 2.0,
) -> None:
    """Train a small language model on two unequal devices, in a minute or two.

    It uses the GPUs if there are at least two, otherwise two CPU ranks, the second throttled to half its speed.
    """
    from evenload.config import Config
    from evenload.hardware import find_gpus
    from evenload.training.launch.devices import describe_workers
    from evenload.training.launch.request import LaunchRequest, plan
    from evenload.training.launch.supervisor import launch
    from evenload.views.run.progress import RunProgress

    on_gpus = len(find_gpus()[0]) >= 2
    # Measure late, so that the table appears next to the text that the model writes at the end.
    before = max(2, steps * _STEPS_BEFORE // _STEPS)
    request = LaunchRequest(
        arguments=(str(find_example("train_gpt.py")), "--steps", str(steps), *(_GPU_SIZES if on_gpus else _CPU_SIZES)),
        devices="auto" if on_gpus else "cpu:2",
        settings={"project_dir": project_dir, "fresh": True},
        throttle=() if on_gpus else (1.0, 0.5),
        mode="measure",
        options={"after_steps": before, "num_rounds": rounds, "block_s": block_s},
    )
    workers = plan(request)
    print("evenload: a small GPT learns from the Python standard library's source, one global batch for all devices:")
    for line in describe_workers(workers):
        print(f"evenload: {line}", flush=True)
    view = RunProgress(None, sys.stdout, log_every_s=Config.log_every_s, devices=workers[0].device_names)
    code = launch(replace(request, view=view))
    if code == 0:
        print(f"evenload: summary of this run: evenload show {project_dir}")
    raise typer.Exit(code)


def find_example(name: str) -> Path:
    """Return an example's file in the installed package or in the clone; ConfigError if it is in neither."""
    installed = Path(str(importlib.resources.files(evenload))) / "examples" / name
    clone = Path(evenload.__file__).parents[2] / "examples" / name
    for path in (installed, clone):
        if path.exists():
            return path
    raise ConfigError(f"the example {name} is neither at {installed} nor at {clone}; install evenload again")
