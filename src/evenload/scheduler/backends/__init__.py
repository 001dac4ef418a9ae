"""Where a job can run besides this machine's own queue: Slurm, Ray, Kubernetes, behind one interface.

`get` loads a backend by name; none is imported before. `evenload.scheduler.backends.interface` says what each can do.
"""

from __future__ import annotations

from importlib import import_module

from evenload.errors import ConfigError
from evenload.scheduler.backends.interface import Backend, Described, Request, settled

_MODULES = {
    "slurm": "evenload.scheduler.backends.slurm.backend",
    "ray": "evenload.scheduler.backends.ray.backend",
    "kubernetes": "evenload.scheduler.backends.kubernetes",
}

NAMES = tuple(_MODULES)
"""The backends, ``local`` apart: that is the daemon's (`evenload.scheduler.client`)."""

__all__ = ["NAMES", "Backend", "Described", "Request", "get", "settled"]


def get(name: str) -> Backend:
    """The backend of this name.

    Raises:
        ConfigError: there is none, or it needs a package that isn't installed.
    """
    if name not in _MODULES:
        raise ConfigError(f"backend={name!r}: there is no such backend; there are local, {', '.join(NAMES)}")
    backend: Backend = import_module(_MODULES[name]).BACKEND
    return backend
