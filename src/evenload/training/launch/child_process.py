"""Refuse `evenload.init` in a process that is no rank of its own: one that multiprocessing, mp.spawn or subprocess started."""

from __future__ import annotations

import multiprocessing
import os
import sys
import types
from pathlib import Path

from evenload.errors import ConfigError, EvenloadError, LaunchError
from evenload.training.launch import worker
from evenload.training.launch.environment import WORKER_VARIABLE, detect, read_spec
from evenload.training.launch.print_once import is_printed_elsewhere

_SPAWN_FILE = str(Path("torch", "multiprocessing", "spawn.py"))
_IMPORTS = (
    "evenload.init was called while a new process (a DataLoader worker?) imports the script; put the training under "
    "`if __name__ == '__main__':`"
)
_OF_A_RANK = (
    "evenload.init was called in a process that a rank of `{how}` started by multiprocessing, mp.spawn or subprocess. "
    "{how} has started one process per device: call the function itself, as train(), in place of mp.spawn(train, ...); or "
    'start ranks from plain python by evenload.spawn(train, devices="cpu:2")'
)
_ALONE = (
    "torch.multiprocessing.spawn started this process without a rank (RANK, WORLD_SIZE, MASTER_ADDR), so each process would "
    'train a model of its own; write evenload.spawn(train, devices="cpu:2") in place of mp.spawn(train, nprocs=2), or call '
    "train() and start the script by evenload run train.py"
)


def check_process() -> None:
    """Raise ConfigError or LaunchError if this process is a child of one that trains, or was started without a rank.

    In a child of multiprocessing the error is printed, once where possible, and the process ends: multiprocessing would print
    a traceback for each child.
    """
    error = _find_error()
    if error is None:
        return
    if multiprocessing.parent_process() is None and not _is_importing():
        raise error
    text = f"evenload: {type(error).__name__}: {error}"
    if not is_printed_elsewhere(text):
        print(text, file=sys.stderr, flush=True)
    raise SystemExit(1)


def _find_error() -> EvenloadError | None:
    if worker.progress.reading:  # raised: this process is a rank, and reports it itself
        raise ConfigError(_IMPORTS)
    if _is_importing():
        return ConfigError(_IMPORTS)
    if path := os.environ.get(WORKER_VARIABLE):
        spec = read_spec(Path(path))
        if spec.lifeline < 0 or worker.progress.pid == os.getpid():
            return None
        how = "evenload.spawn" if spec.origin == "spawn" else "evenload run"
        return LaunchError(_OF_A_RANK.format(how=how))
    return LaunchError(_ALONE) if _is_in_spawn() and detect().origin == "alone" else None


def _is_importing() -> bool:
    """Return whether a new process of multiprocessing imports the script before it does its work."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _is_in_spawn() -> bool:
    """Return whether torch.multiprocessing.spawn called the function that runs."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_name == "_wrap" and frame.f_code.co_filename.endswith(_SPAWN_FILE)
    ):
        frame = frame.f_back
    return frame is not None
