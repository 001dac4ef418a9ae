"""Runs the examples as a user does: `python FILE`, `evenload run FILE`, and the classic ones on ranks that have torch loaded.

The commands are forked from a server that has torch loaded (tests/warm.py).
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from evenload.hardware import free_port
from evenload.testing import run_ranks
from evenload.training.launch import worker
from evenload.training.launch.environment import WORKER_VARIABLE
from tests.paths import ROOT
from tests.warm import Command

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 100


def run_both(name: str, folder: Path, *arguments: str, balance: str) -> tuple[str, str]:
    """What `python FILE` and `evenload run -d cpu:2 FILE` print, each in a folder of its own; both run at once.

    Args:
        name: the file in examples/.
        folder: a temporary one.
        *arguments: of the script.
        balance: the shares of the two ranks, such as ``24,8``.
    """
    alone, two = folder / "alone", folder / "two"
    script = [str(EXAMPLES / name), *arguments]
    ours = ["-m", "evenload.cli.main", "run", "-d", "cpu:2", "--balance", balance, *script]
    return tuple(run_commands({alone: script, two: ours}))


def run_commands(commands: dict[Path, Sequence[str]]) -> list[str]:
    """What python prints for each command line, all at once, each in a folder of its own; they must end well."""
    started = [_start(folder, command) for folder, command in commands.items()]
    try:
        printed = [process.communicate(timeout=TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for process, (stdout, stderr) in zip(started, printed, strict=True):
        assert process.returncode == 0, stdout + stderr
        assert "couples the samples" not in stdout + stderr  # a false alarm (verify/coupling.py)
    return [stdout for stdout, _ in printed]


def _start(folder: Path, command: Sequence[str]) -> Command:
    folder.mkdir()
    # One thread, as each rank has: threads that share a core with others wait for each other most of the time.
    return Command(command, folder, {**os.environ, "OMP_NUM_THREADS": "1"})


def run_on_ranks(
    script: Path,
    folder: Path,
    *arguments: str,
    num_ranks: int = 2,
    torchrun: bool = False,
    double: bool = False,
    **settings: object,
) -> list[str]:
    """What each rank of a script prints; the processes have torch loaded already, so this costs little.

    Args:
        script: the file.
        folder: the ranks' working folder.
        *arguments: of the script.
        num_ranks: how many.
        torchrun: started by torchrun's variables instead of as `evenload run` does.
        double: float64 is torch's default dtype.
        **settings: as the command line of `evenload run` would set them.
    """
    port = free_port("127.0.0.1") if torchrun else None
    call = [str(script), *arguments]
    return run_ranks(
        _run, num_ranks, call, str(folder), port, num_ranks, double, timeout_s=TIMEOUT_S, settings=settings
    )


def _run(call: list[str], folder: str, port: int | None, num_ranks: int, double: bool) -> str:
    os.chdir(folder)
    if double:
        torch.set_default_dtype(torch.float64)
    if port is not None:
        rank = worker.detect().rank
        del os.environ[WORKER_VARIABLE]
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(num_ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            worker.run_script(call)
    except SystemExit as leave:
        return f"left: {leave.code}"
    return printed.getvalue()


def relative_difference(first: Path, second: Path) -> float:
    """‖Δθ‖₂/‖θ‖₂ over all weights of two files of a state_dict."""
    a, b = (torch.load(path, weights_only=True) for path in (first, second))
    assert list(a) == list(b)
    assert all(value.dtype == torch.float64 for value in (*a.values(), *b.values()))
    flat_a, flat_b = (torch.cat([value.flatten() for value in weights.values()]) for weights in (a, b))
    return float((flat_a - flat_b).norm() / flat_a.norm())
