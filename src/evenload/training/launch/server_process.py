"""Strategy ``async`` in the launcher: a process for the server beside the devices, and workers that may die."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.config import Config
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import FailureReport
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.remote_workers import RemoteWorker

_MAY_LOSE_FILE = "may_lose_workers"
"""File in the launch folder while the server's loop runs: the ranks go on without one that was killed."""
_GIVEN_UP_FILE, _HANGING_FILE = "given_up_workers", "hanging_workers"
"""Files in the launch folder: ranks that the server has given up, and those of them that hang."""
_LOST_FILE = "lost_workers"
"""File in the launch folder: ranks of machines that are lost; their connections do not end."""


def with_server(workers: Sequence[WorkerSpec], settings: Mapping[str, Any]) -> tuple[WorkerSpec, ...]:
    """Return the workers with one more, rank 0, if the command line sets strategy ``async``: it takes no device."""
    if settings.get("strategy") != "async" or not settings.get("staleness", Config.staleness):
        return tuple(workers)
    names = ("CPU (server)", *workers[0].device_names)
    ids = tuple(f"worker-{index}" for index in range(len(names)))
    everywhere: dict[str, Any] = {
        "world_size": len(names),
        "workers": ids,
        "device_names": names,
        # Nothing is summed over ranks.
        "backend": "gloo",
        "inner_backend": "",
        "has_server": True,
    }
    alone: dict[str, Any] = {"device": "cpu", "devices": (), "visible_devices": "", "cores": (), "num_threads": 1}
    server = replace(workers[0], rank=0, local_rank=0, throttle={}, **everywhere, **alone)
    moved = (replace(w, rank=w.rank + 1, local_rank=w.local_rank + 1, **everywhere) for w in workers)
    return (server, *moved)


def with_servers_speed(factors: Sequence[float], workers: Sequence[WorkerSpec]) -> tuple[float, ...]:
    """Return the relative speeds of all processes; those given are of the devices."""
    return (1.0, *factors) if workers[0].has_server else tuple(factors)


def allow_losses(launch_dir: str, allowed: bool) -> None:
    """Let the supervisor go on without a worker that was killed, or no longer: between two loops the ranks need each other."""
    if launch_dir and allowed:
        Path(launch_dir, _MAY_LOSE_FILE).touch()
    elif launch_dir:
        Path(launch_dir, _MAY_LOSE_FILE).unlink(missing_ok=True)


def give_up(launch_dir: str, rank: int, hangs: bool) -> None:
    """Let the supervisor go on without a worker, and end it if it hangs: it might never end by itself."""
    for name in (_GIVEN_UP_FILE, *([_HANGING_FILE] if hangs else [])) if launch_dir else ():
        with contextlib.suppress(OSError):
            _add(Path(launch_dir, name), [rank])


def read_lost(launch_dir: str) -> set[int]:
    """Return the ranks that `goes_on_without` has noted."""
    return _read(Path(launch_dir, _LOST_FILE)) if launch_dir else set()


def goes_on_without(folder: Path, ranks: Collection[int]) -> bool:
    """Return whether the server goes on without ranks whose machines are lost, and let it know."""
    if 0 in ranks or not (may_lose(folder) or (ranks and {*ranks} <= _read(folder / _GIVEN_UP_FILE))):
        return False
    _add(folder / _LOST_FILE, ranks)
    return True


def may_lose(folder: Path) -> bool:
    """Return whether the server's loop runs."""
    return (folder / _MAY_LOSE_FILE).exists()


def what_joiners_do(folder: Path) -> str:
    return "it waits for the end of the run" if may_lose(folder) else "its devices start, and join at the end of a step"


def _add(path: Path, ranks: Iterable[int]) -> None:
    with path.open("a") as file:
        file.writelines(f"{rank}\n" for rank in ranks)


def _read(path: Path) -> set[int]:
    return {int(line) for line in path.read_text().splitlines()} if path.exists() else set()


class LostWorkers:
    """Workers that were killed, and without which the run goes on."""

    def __init__(self, folder: Path, print_line: Callable[[str], None]) -> None:
        self._folder = folder
        self._print_line = print_line
        self._ranks: set[int] = set()
        self._hanging: set[int] = set()

    def end_hanging(self, workers: Iterable[WorkerProcess | RemoteWorker]) -> None:
        """Kill the workers that the server has given up since the last call because they hang."""
        if new := _read(self._folder / _HANGING_FILE) - self._hanging:
            self._hanging |= new
            for worker in workers:
                if worker.spec.rank in new and worker.poll() is None:
                    worker.kill()

    def takes(self, worker: WorkerProcess | RemoteWorker, failure: FailureReport) -> bool:
        """Return whether the run goes on without this worker: not if it reported an error of the script."""
        rank = worker.spec.rank
        if rank in self._ranks:
            return True
        # A worker that was given up and comes back before it is killed ends by itself, with the error of the server's answer.
        was_killed = failure.kind.startswith("killed by ") or rank in self._hanging
        if rank == 0 or worker.poll() is None or not was_killed:
            return False
        if not (may_lose(self._folder) or rank in _read(self._folder / _GIVEN_UP_FILE)):
            return False
        self._ranks.add(rank)
        self._print_line(f"evenload: {failure.text(worker.spec.device)}\nevenload: the run goes on without rank {rank}")
        return True
