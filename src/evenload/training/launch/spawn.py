"""`evenload.spawn`: call a function on each device, from a script or a notebook."""

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
from evenload.training.launch.environment import detect
from evenload.training.launch.function_call import pack_call, read_result, write_call
from evenload.training.launch.request import LaunchRequest
from evenload.training.launch.stop_status import is_interactive
from evenload.training.launch.supervisor import launch
from evenload.training.launch.uncaught import reports_uncaught

_GUARD = (
    "evenload.spawn was called while a worker runs the script for its functions; put the call where only the script itself "
    "runs it:\n"
    '    if __name__ == "__main__":\n'
    "        evenload.spawn(train)"
)


@reports_uncaught
def spawn(
    fn: Callable[..., Any],
    devices: str = "auto",
    args: Sequence[Any] = (),
    *,
    throttle: Sequence[float] = (),
    port: int = 0,
    **settings: Any,
) -> Any:
    """Call ``fn(*args)`` on each device, each in a new process, and return the result of rank 0.

    ``fn`` calls `evenload.init` as a script does. It is a function of a module, of the script itself (whose other calls are
    then under ``if __name__ == "__main__":``), or of a notebook cell. The caller may have used a GPU before.

    Args:
        fn: the function that every rank calls.
        devices: as for ``evenload run -d``: ``auto`` (every GPU, else the CPU), ``all``, ``0,2``, ``cpu:2``, or a mix.
        args: arguments, copied to every rank.
        throttle: relative speeds of the ranks, as for ``--throttle``.
        port: TCP port of the rendezvous; 0 takes a free one.
        **settings: settings of `evenload.Config`: ``balance=(3, 1)``, ``precision="bf16"``.

    Raises:
        ConfigError: a setting or device is wrong, or the function or its result can't be pickled.
        LaunchError: this process is itself a rank.
        RankFailedError: a rank failed; the message has its number, step and traceback.
        SystemExit: with code 75: all ranks saved and ended on request (docs/job.md); in a notebook KeyboardInterrupt.
        KeyboardInterrupt: Ctrl-C where the ranks can't save, or a second Ctrl-C; all ranks have ended.
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
    call = pack_call(fn, tuple(args))
    reports: list[str] = []
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
        code = launch(request, reports.append)
        if code == 0:
            return read_result(Path(folder))
    if code == 128 + SIGINT or (code == EXIT_CODE and is_interactive()):
        raise KeyboardInterrupt
    if code in (128 + SIGTERM, EXIT_CODE):
        raise SystemExit(code)
    raise RankFailedError("\n".join(reports))


def _check_caller() -> None:
    """Refuse to start ranks from within a rank."""
    if worker.progress.reading or getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(_GUARD)
    here = detect()
    if here.world_size == 1 and here.origin not in ("evenload", "spawn"):
        return
    how = {"evenload": "evenload run", "spawn": "evenload.spawn", "slurm": "srun"}.get(here.origin, here.origin)
    raise LaunchError(
        f"evenload.spawn was called in a process that is already rank {here.rank} of {here.world_size}, started by {how}; "
        "call the function itself here, or start the script with plain python"
    )
