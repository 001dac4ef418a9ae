"""Faults for tests, at a moment that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenload.errors import ConfigError
from evenload.training.launch import throttle
from evenload.training.launch.environment import detect


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
