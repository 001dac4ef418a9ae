"""What is trained: tasks written once, in plain PyTorch, and run by the reference and by Evenload."""

from __future__ import annotations

from tests.ranks.exact.tasks import (
    base,
    batches,
    coupled,
    failures,
    gans,
    gradients,
    modules,
    norms,
    optimizers,
    tuples,
)
from tests.ranks.exact.tasks.base import Recorder, Task

__all__ = ["TASKS", "Recorder", "Task"]

TASKS: dict[str, type[Task]] = {
    task.__name__: task
    for room in (base, norms, batches, gans, modules, failures, optimizers, gradients, tuples, coupled)
    for task in vars(room).values()
    if isinstance(task, type) and issubclass(task, Task) and task is not tuples.Paired
}
"""By name."""
