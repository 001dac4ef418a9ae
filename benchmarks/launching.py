"""Starts a script as `evenload run` does, and reads what it left."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenload import stored_names
from evenload.hardware import gpus
from evenload.records.measurement import MeasurementResult, blocks_from_rows, evaluate
from evenload.records.reader import read_events
from evenload.training.launch.request import LaunchRequest
from evenload.training.launch.supervisor import launch

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"


class Silent:
    """A view that shows nothing."""

    def follow(self, folder: Path) -> None:
        """Nothing."""

    def poll(self) -> None:
        """Nothing."""

    def print(self, text: str) -> None:
        """A worker's lines, where this is a terminal."""
        print(text, end="")

    def close(self) -> None:
        """Nothing."""


def default_devices() -> tuple[str, bool]:
    """Two ranks, and whether they can be held to a speed: two GPUs, one GPU twice (over gloo), or two CPU ranks."""
    count = len(gpus())
    return ("0,1", True) if count > 1 else ("0,0", True) if count == 1 else ("cpu:2", True)


def run_script(
    script: Path,
    arguments: Sequence[str],
    *,
    throttle: tuple[float, ...] = (),
    options: dict[str, Any] | None = None,
    devices: str | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Runs a script on two ranks and returns its run folder; with `options`, in the mode of alternating blocks.

    Raises:
        RuntimeError: it failed; its story has been printed.
    """
    folder = Path(tempfile.mkdtemp(prefix="evenload-bench-"))
    code = launch(
        LaunchRequest(
            arguments=(str(script), *arguments),
            devices=devices or default_devices()[0],
            settings={"project_dir": str(folder / "run"), **(settings or {})},
            throttle=throttle,
            mode="measure" if options else "train",
            options=options or {},
            view=Silent(),
        )
    )
    if code:
        raise RuntimeError(f"{script.name} ended with exit code {code}")
    return folder / "run"


def read_arms(folder: Path) -> MeasurementResult:
    """What a run measured."""
    (event,) = [event for event in read_events(folder) if event.kind == stored_names.MEASUREMENT]
    return evaluate(blocks_from_rows(event.fields["blocks"]))
