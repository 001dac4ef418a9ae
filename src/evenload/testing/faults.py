"""Faults on purpose: what happens to ranks in practice, at a moment that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenload.errors import ConfigError
from evenload.training.launch import throttle
from evenload.training.launch.environment import detect


def set_throttle(factors: Sequence[float], launch_dir: Path | None = None, timeout_s: float = 5.0) -> None:
    """Changes the relative speeds of all ranks while they run, and returns when the new ones hold.

    The launch must have been started with ``--throttle`` (or ``run_ranks(..., throttle=[1, 1])``).

    Args:
        factors: one speed in (0, 1] for each rank, relative to its own full speed.
        launch_dir: the folder of the launch; by default that of the worker that calls.
        timeout_s: seconds to wait for the supervisor.

    Raises:
        ConfigError: called outside a worker without ``launch_dir``, the launch isn't throttled, or wrong speeds.
        LaunchError: the supervisor did not answer in time.
    """
    if launch_dir is None:
        told = detect().launch_dir
        if not told:
            raise ConfigError("set_throttle() outside a worker of `evenload run` needs launch_dir=...")
        launch_dir = Path(told)
    throttle.request(launch_dir, factors, timeout_s)
