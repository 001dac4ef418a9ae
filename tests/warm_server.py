"""A server that has imported torch and Evenload, and forks a process for each command line of python that it is sent.

It stands in for the start of an interpreter, which spends seconds of CPU time on the same imports in each of the hundreds of
processes that the tests start. After the fork all is as in a process of its own: session, files, environment, signals,
`sys.argv`, `sys.path`, `__main__`, threads, random states. A launch of Evenload forks its workers in the same way. What a fork
can't show (what a command imports, in which order, string hashes that differ) has tests that start interpreters.

Started by tests/warm.py, with one end of a socket pair as its argument.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy
import torch

from evenload.job import processes
from evenload.training.launch import worker
from evenload.training.launch.environment import WORKER_VARIABLE, read_spec

PRELOAD = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils.data",
    "evenload.cli.run",
    "evenload.cli.verify",
    "evenload.training.launch.supervisor",
    "evenload.training.run",
)
MAX_BYTES = 1 << 20
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_WORKER = "evenload.training.launch.worker"
_PATH = list(sys.path)
_FINALIZERS: set[weakref.finalize[..., Any]] = set()
_MAIN = sys.modules["__main__"]  # else its globals would go with it


def serve(control: socket.socket) -> None:
    """Fork what is sent, and report each process id and exit code, until the other end is closed."""
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(waker, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if waker in ready:
                os.read(waker, 4096)
                _reap(running)
            if control in ready:
                message, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, 4)
                if not message:
                    return
                reply, *files = descriptors
                request = json.loads(message)
                pid = os.fork()
                if pid == 0:
                    _become(
                        request["arguments"],
                        request["environment"],
                        files,
                        folder=request["folder"],
                        host=request["host"],
                    )
                for descriptor in files:
                    os.close(descriptor)
                running[pid] = socket.socket(fileno=reply)
                _send(running[pid], pid)


def _reap(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            reply = running.pop(pid)
            _send(reply, os.waitstatus_to_exitcode(status))
            reply.close()


def _send(reply: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody waits for it any more
        reply.send(str(number).encode())


class _ForkedWorker:
    """A worker of Evenload, forked from the process that starts it, with the parts of `subprocess.Popen` that it needs."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: tuple[int, ...],
        start_new_session: bool,
        preexec_fn: None,
    ) -> None:
        sys.stdout.flush()  # else the worker would write it too
        self.pid = os.fork()
        if self.pid == 0:
            _become(command[1:], env, (os.open(os.devnull, os.O_RDONLY), stdout, stderr), keep=pass_fds)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _popen(command: Sequence[str], **options: Any) -> Any:
    return (_ForkedWorker if _WORKER in command else subprocess.Popen)(command, **options)


def _become(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[int],
    *,
    folder: str = "",
    keep: Sequence[int] = (),
    host: Sequence[str] = (),
) -> NoReturn:
    """Go on as an interpreter of these arguments; called in a process that was just forked."""
    code = 1
    gc.freeze()  # garbage of the process that was forked would close files of this one, by their numbers
    try:
        os.setsid()
        _reset_signals()
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
        _close_others(keep)
        os.environ.clear()
        os.environ.update(environment)
        if host:
            _enter(*host)
        if folder:
            os.chdir(folder)
        _reset_modules(arguments)
        code = _run([argument for argument in arguments if argument not in ("-u", "-P")])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _enter(network: str, hosts_file: str, name: str) -> None:
    """Move this process to a machine of `evenload.testing.hosts`, as `VirtualHost.popen` does with nsenter and unshare."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: Any) -> None:
        if getattr(libc, function)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")

    with Path(network).open("rb") as file:
        call("setns", file.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    call("mount", hosts_file.encode(), b"/etc/hosts", None, _MS_BIND, None)
    socket.sethostname(name)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _close_others(keep: Sequence[int]) -> None:
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        os.set_inheritable(descriptor, True)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _reset_modules(arguments: Sequence[str]) -> None:
    """Replace all that modules keep of the process that was forked, or found when they were imported."""
    sys.orig_argv[:] = [sys.executable, *arguments]
    extra = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [_PATH[0], *extra, *_PATH]  # the first is replaced by the script's folder
    unbuffered = "-u" in arguments
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, unbuffered, "strict")
    sys.stderr = sys.__stderr__ = _writer(2, unbuffered, "backslashreplace")
    tempfile.tempdir = None
    for finalizer in weakref.finalize._registry.keys() - _FINALIZERS:  # type: ignore[attr-defined]
        finalizer.detach()  # a temporary folder of the process that was forked
    tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None
    processes.subprocess = SimpleNamespace(Popen=_popen)  # type: ignore[attr-defined]
    numpy.random.seed()
    torch.set_num_threads(_num_threads())


def _writer(descriptor: int, unbuffered: bool, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    if unbuffered:
        return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)  # type: ignore[arg-type]
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=descriptor == 2)


def _num_threads() -> int:
    """As torch finds it when it is imported after the worker has bound itself to its cores."""
    path = os.environ.get(WORKER_VARIABLE)
    spec = read_spec(Path(path)) if path else None
    if spec is not None and (spec.num_threads or spec.cores):
        return spec.num_threads or len(spec.cores)
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def _run(arguments: list[str]) -> int:
    """Run ``SCRIPT args...`` or ``-m MODULE args...`` to the end of the interpreter; return the exit code."""
    code = 0
    try:
        worker.run_script(arguments)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if code and not isinstance(leave.code, int):
            print(leave.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


if __name__ == "__main__":
    for name in PRELOAD:
        importlib.import_module(name)
    _FINALIZERS.update(weakref.finalize._registry)  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # it stays shared memory
    serve(socket.socket(fileno=int(sys.argv[1])))
