"""The schedulers that a job can be submitted to: the local queue, Slurm, Ray and Kubernetes, behind one interface.

`get` imports a backend by name; nothing is imported before. `SchedulerBackend` defines what each can do.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from evenload.errors import ConfigError
from evenload.scheduler.backends.interface import BackendRequest, JobStatus, SchedulerBackend, resolved

_MODULES = {
    "slurm": "evenload.scheduler.backends.slurm.backend",
    "ray": "evenload.scheduler.backends.ray.backend",
    "kubernetes": "evenload.scheduler.backends.kubernetes",
}

NAMES = ("local", *_MODULES)

__all__ = ["NAMES", "BackendRequest", "JobStatus", "SchedulerBackend", "get", "resolved"]


def get(name: str, queue: Path | None = None) -> SchedulerBackend:
    """Return the backend of this name, with the local queue in `queue` (None: the default queue).

    Raises:
        ConfigError: the name is unknown, or the backend needs a package that is not installed.
    """
    if name == "local":
        from evenload.scheduler import paths
        from evenload.scheduler.backends.local import LocalBackend

        return LocalBackend(paths.default_folder() if queue is None else queue)
    if name not in _MODULES:
        raise ConfigError(f"backend={name!r} is unknown; available backends: {', '.join(NAMES)}")
    backend: SchedulerBackend = import_module(_MODULES[name]).BACKEND
    return backend
