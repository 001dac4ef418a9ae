"""What every test must leave as it was: processes, threads, environment variables, torch's defaults."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.paths import ROOT
from tests.system.scheduler.backends.ray_box import ray_address, ray_box
from tests.system.scheduler.backends.slurm_cluster import slurm, slurm_of_file, srun_here

__all__ = ["ray_address", "ray_box", "slurm", "slurm_of_file", "srun_here"]
"""Fixtures of clusters that are started once in a file of tests, by the first test that needs one."""

# Libraries set these when they are first imported.
_SET_BY_LIBRARIES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "CUDA_MODULE_LOADING", "TORCH_NCCL_", "TF_")
_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "warm_server.py")
_GRACE_S = 2.0

_LONG_FILES = (
    "tests/ranks/adaptive_batch/test_growing.py",
    "tests/ranks/adaptive_batch/test_other_devices.py",
    "tests/ranks/data/test_randomness.py",
    "tests/ranks/data/test_workers.py",
    "tests/ranks/elastic/test_campaign.py",
    "tests/ranks/elastic/test_lost_gathers.py",
    "tests/ranks/exact/test_hierarchical.py",
    "tests/ranks/exact/test_methods.py",
    "tests/ranks/exact/test_splits.py",
    "tests/system/launch/test_supervisor.py",
    "tests/ranks/wrong_uses/test_gradient_uses.py",
    "tests/system/launch/test_preemption.py",
    "tests/system/scheduler/backends/test_ray.py",
    "tests/system/scheduler/backends/test_slurm.py",
    "tests/system/starts/test_ways.py",
)
"""Files that take long, beside those that hold a test marked slow."""

# Modules whose assertions pytest has rewritten are kept for the next run, also where PYTHONDONTWRITEBYTECODE is set: rewriting
# them takes each worker ten seconds.
sys.dont_write_bytecode = False

# A shell's background commands, and all that they start, inherit that SIGINT is ignored: no test of Ctrl-C would end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A collection of garbage searches all that torch and thousands of tests have made: a sixth of the time of the unit tests.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--traces",
        default=os.environ.get("EVENLOAD_TRACES"),
        help="a folder of recorded workloads, for the tests of the simulator on them (default: EVENLOAD_TRACES)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Use a short temporary folder, as paths of Unix sockets below it have 107 bytes at most, and an empty folder of state."""
    if config.option.basetemp is None and not hasattr(config, "workerinput"):
        config.option.basetemp = tempfile.mkdtemp(prefix="et-")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))
    if not hasattr(config, "workerinput"):  # the queue of whoever runs the tests is not theirs
        state = tempfile.mkdtemp(prefix="es-")
        os.environ["XDG_STATE_HOME"] = state
        config.add_cleanup(lambda: shutil.rmtree(state, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first and the unit tests last, so that workers that take whole files end at the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")} | {ROOT / name for name in _LONG_FILES}
    items.sort(key=lambda item: (item.path not in slow, "unit" in item.path.parts))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none here")


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaks, names what it leaked, and mends it so that the next test starts clean."""
    _use_one_thread()
    processes, threads, environment, defaults = _children(), _threads(), dict(os.environ), _torch_defaults()
    yield
    problems = []
    if late := _wait_until_gone(_children, processes):
        problems += [f"the process {_describe(process)}" for process in late]
        for process in late:
            process.kill()
    if late_threads := _wait_until_gone(_threads, threads):
        problems += [f"the thread {thread.name!r}" for thread in late_threads]
    changed = [
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and not name.startswith(_SET_BY_LIBRARIES)
    ]
    if changed:
        problems.append(f"a change of the environment variables {', '.join(sorted(changed))}")
        for name in changed:
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]
    for name, before in defaults.items():
        now = _torch_defaults()[name]
        if now != before:
            problems.append(f"torch's {name} at {now} (was {before})")
            _restore(name, before)
    if problems:
        pytest.fail(f"{request.node.nodeid} leaves behind {'; '.join(problems)}", pytrace=False)


def _children() -> set[psutil.Process]:
    """All processes below this one, apart from the servers of multiprocessing and tests/warm.py."""
    found = set()
    for pid in _descendants():
        try:
            child = psutil.Process(pid)
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not _is_server(child, command):
                found.add(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _descendants() -> list[int]:
    """As `psutil.Process.children(recursive=True)`, which reads all processes of the machine, twice in each test."""
    found, above = [], [os.getpid()]
    try:
        while above:
            parent = above.pop()
            for thread in Path(f"/proc/{parent}/task").iterdir():
                with suppress(ProcessLookupError):
                    above += (own := [int(pid) for pid in (thread / "children").read_text().split()])
                    found += own
    except FileNotFoundError:  # a process that has just ended, or a system without this file
        return [child.pid for child in psutil.Process().children(recursive=True)]
    return found


def _is_server(child: psutil.Process, command: str) -> bool:
    # What the fork server has forked carries its command line, but has another parent.
    return any(server in command for server in _SERVERS) and child.ppid() == os.getpid()


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _wait_until_gone(look: Any, before: set[Any]) -> set[Any]:
    """What is new, and still there after a moment: an end may be under way."""
    deadline = time.monotonic() + _GRACE_S
    while late := look() - before:
        if time.monotonic() > deadline:
            return late
        time.sleep(0.02)
    return set()


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({' '.join(process.cmdline())[:120]})"
    except psutil.NoSuchProcess:
        return str(process.pid)


def _use_one_thread() -> None:
    """As ranks have it: files are tested side by side, and threads that share a core wait for each other most of the time."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads") and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _torch_defaults() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "process group": torch.distributed.is_initialized(),
        "grad mode": torch.is_grad_enabled(),
    }


def _restore(name: str, before: Any) -> None:
    torch = sys.modules["torch"]
    match name:
        case "default dtype":
            torch.set_default_dtype(before)
        case "number of threads":
            torch.set_num_threads(before)
        case "deterministic algorithms":
            torch.use_deterministic_algorithms(before)
        case "grad mode":
            torch.set_grad_enabled(before)
        case "process group":
            torch.distributed.destroy_process_group()
