"""`evenload.spawn`: calls a function on each device, from a script or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from evenload.errors import ConfigError, LaunchError, RankFailedError
from evenload.job import EXIT_CODE
from evenload.training.launch import worker
from evenload.training.launch.call import pack, read_result, write_call
from evenload.training.launch.environment import detect
from evenload.training.launch.stop_status import is_interactive
from evenload.training.launch.supervisor import LaunchRequest, launch

_GUARD = (
    "evenload.spawn was called while a worker reads the script for its functions; put the call where only the script itself "
    "runs it:\n"
    '    if __name__ == "__main__":\n'
    "        evenload.spawn(train)"
)


def spawn(
    fn: Callable[..., Any],
    devices: str = "auto",
    args: Sequence[Any] = (),
    *,
    throttle: Sequence[float] = (),
    port: int = 0,
    **settings: Any,
) -> Any:
    """Calls ``fn(*args)`` on each device, each call in a process of its own, and returns what rank 0's call returned.

    ``fn`` calls `evenload.init` as a script would. It is a function of a module or of the script itself, which then has its
    own calls under ``if __name__ == "__main__":``; in a notebook it may be defined in a cell. The processes are new ones, so
    it doesn't matter what the caller did with a GPU before.

    Args:
        fn: the function, called by every rank.
        devices: as ``evenload run -d`` takes it: ``auto`` (every GPU, else the CPU), ``all``, ``0,2``, ``cpu:2``, or a mix.
        args: its arguments, copied to every rank.
        throttle: relative speeds of the ranks, to try unequal devices, as ``--throttle``.
        port: TCP port of the ranks' meeting point; 0 takes a free one.
        **settings: those of `evenload.Config`, as the command line gives them: ``balance=(3, 1)``, ``precision="bf16"``.

    Raises:
        ConfigError: a setting or device is wrong, or the function or its result can't travel between processes.
        LaunchError: this process is a rank itself.
        RankFailedError: a rank failed; the message tells which, at which step, with its traceback.
        SystemExit: with code 75: asked to stop, all ranks saved and ended (docs/job.md); in a notebook KeyboardInterrupt.
        KeyboardInterrupt: Ctrl-C where the ranks can't save, or a second one; all ranks have ended.
    """
    _check_caller()
    if not callable(fn):
        raise ConfigError(
            f"evenload.spawn got a {type(fn).__name__}; it takes a function: evenload.spawn(train, args=(1e-3,))"
        )
    if not isinstance(devices, str):
        raise ConfigError(
            f"evenload.spawn(devices={devices!r}): expected text as -d takes it: auto, all, cpu:2 (two CPU ranks), 0,1 (GPUs)"
        )
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ConfigError(
            f"evenload.spawn(args={args!r}): expected a tuple of the function's arguments, such as args=(1e-3,)"
        )
    call = pack(fn, tuple(args))
    stories: list[str] = []
    with tempfile.TemporaryDirectory(prefix="evenload-call-") as folder:
        write_call(call, Path(folder))
        request = LaunchRequest(
            arguments=(),
            call=folder,
            devices=devices,
            settings={
                key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in settings.items()
            },
            throttle=tuple(throttle),
            port=port,
        )
        code = launch(request, stories.append)
        if code == 0:
            return read_result(Path(folder))
    if code == 128 + SIGINT or (code == EXIT_CODE and is_interactive()):
        raise KeyboardInterrupt
    if code in (128 + SIGTERM, EXIT_CODE):
        raise SystemExit(code)
    raise RankFailedError("\n".join(stories))


def _check_caller() -> None:
    """Raises where a call would start ranks from within a rank."""
    if worker.progress.reading or getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(_GUARD)
    here = detect()
    if here.world_size == 1 and here.origin not in ("evenload", "spawn"):
        return
    how = {"evenload": "evenload run", "spawn": "evenload.spawn", "slurm": "srun"}.get(here.origin, here.origin)
    raise LaunchError(
        f"evenload.spawn was called in a process that is rank {here.rank} of {here.world_size} already, started by {how}; "
        "call the function itself here, or start the script with plain python"
    )
