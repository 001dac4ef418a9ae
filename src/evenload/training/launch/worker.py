"""Entry point of a worker process, from the launcher's file to `os._exit`.

    python -m evenload.training.launch.worker train.py --its --args
    python -m evenload.training.launch.worker -m package.module --its --args
    python -m evenload.training.launch.worker          the function of its file (function_call.py)

The worker sets up `__main__`, `sys.argv` and `sys.path[0]` as python does for the script. It exits by `os._exit`, because a
process that used gloo may crash in its destructors. This module must not import torch: the number of threads must be set first.
"""

from __future__ import annotations

import atexit
import gc
import importlib.machinery
import importlib.util
import io
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from evenload.config import spell_option
from evenload.errors import ConfigError, EvenloadError, LaunchError
from evenload.job import EXIT_CODE
from evenload.training.launch import stop_status
from evenload.training.launch.cuda_memory import allocator_variables
from evenload.training.launch.environment import WorkerSpec, detect, devices_without_effect
from evenload.training.launch.failure import (
    FailureReport,
    describe_end,
    describe_error,
    is_consequence,
    write_failure,
    write_whole_traceback,
)
from evenload.training.launch.function_call import MAIN_NAME, read_call, run_call
from evenload.training.launch.left import join_threads
from evenload.training.launch.print_once import is_printed_elsewhere
from evenload.training.launch.stack_room import with_room
from evenload.training.launch.stop_status import StopStatus

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_CLEAN_UP_S = 5.0
"""Time limit of the clean-up of a worker that failed or was stopped: it may wait for a lost peer."""
_IMPORT_THRESHOLD = 200_000
"""Objects between two collections of garbage until the script calls `init`: imports make hundreds of thousands and no garbage."""
_PR_SET_PDEATHSIG = 1
_GLOO_THREADS_S = 0.02
"""Time for gloo's threads to release their tensors, several times the interpreter's switch interval."""


@dataclass
class WorkerProgress:
    pid: int = 0
    """The process that the launcher started as a rank; in its children another one."""
    initialised: bool = False
    folder: Path | None = None
    """The run folder, once it is open."""
    placed: bool = False
    step: int | None = None
    reading: bool = False
    """The script runs only for its functions (`run_function`)."""
    saving: bool = False
    """The last checkpoint is being written: SIGTERM does not interrupt it."""
    exit_code: int | None = None
    """Set before the clean-up callbacks run. Unless it is 0, or 75 after a stop that all ranks agreed on, peers may be gone, and
    collectives must not be called."""


progress = WorkerProgress()
_thresholds = gc.get_threshold()
_exit_timers: list[threading.Timer] = []
_callbacks: list[Callable[[], object]] = []


def at_exit(callback: Callable[[], object]) -> None:
    """Register a clean-up that runs before this worker exits, last registered first.

    `os._exit` runs no exit functions by itself. `progress.exit_code` is the exit code of the script. Without Evenload's launcher
    (``python train.py``) the clean-up is an ordinary exit function.
    """
    if not _callbacks:
        atexit.register(_at_interpreter_exit)
    _callbacks.append(callback)


@with_room
def main(argv: list[str] | None = None) -> None:
    """Run the script or module of the command line as a worker; never return."""
    arguments = sys.argv[1:] if argv is None else argv
    spec = detect()
    progress.pid = os.getpid()
    _watch_supervisor(spec)
    _bind(spec)
    # SIGTERM runs `finally` blocks and the clean-up; the supervisor kills what does not end by itself.
    signal.signal(signal.SIGTERM, leave_on_signal)
    sys.unraisablehook = _leave_again
    gc.set_threshold(_IMPORT_THRESHOLD, *_thresholds[1:])
    code = 0
    try:
        if spec.call:
            run_function(Path(spec.call), spec.rank)
        else:
            run_script(arguments)
        if not progress.initialised and not spec.call and (spec.world_size > 1 or spec.settings):
            raise LaunchError(_no_init(arguments, spec))
        if len(spec.devices) > 1 and not progress.placed and not progress.initialised:
            raise ConfigError(devices_without_effect(spec))
    except SystemExit as error:
        code = _exit_code(error)
        if code not in (0, EXIT_CODE) and spec.launch_dir:
            # The script's own decision: without a report it would count as a device that is lost.
            with suppress(OSError):
                failure = replace(describe_end(spec.rank, code, time.time()), lost=False)
                write_failure(failure, Path(spec.launch_dir), spec.worker)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        progress.exit_code = code
        _report_failure(error, spec, code)
    _exit(code, spec)


def set_initialised(folder: Path) -> None:
    """Note that the script has called `init`, with its run folder; from here on, garbage is collected as usual."""
    progress.initialised = True
    progress.folder = folder
    collect_as_usual()


def collect_as_usual() -> None:
    """Collect garbage as often as Python does by itself, unless the script has set how often."""
    if gc.get_threshold()[0] == _IMPORT_THRESHOLD:
        gc.set_threshold(*_thresholds)


def run_function(folder: Path, rank: int) -> None:
    """Call the function in `folder`, with the path and arguments of the process that sent it."""
    call = read_call(folder)
    sys.path[:] = call.path
    sys.argv = list(call.argv)
    if call.main:
        progress.reading = True
        run_script([*call.main, *call.argv[1:]], MAIN_NAME)
        progress.reading = False
    collect_as_usual()
    run_call(call, folder, rank)


def run_script(arguments: list[str], name: str = "__main__") -> None:
    """Run ``SCRIPT args...`` or ``-m MODULE args...`` as python does, with `name` as its ``__name__``.

    Unlike with `runpy`, `__main__` stays afterwards, so the clean-up can pickle its objects, and the start method spawn finds the
    script by its file or module name.
    """
    if arguments[:1] == ["-m"]:
        _prepend(str(Path.cwd()))
        spec, code = _find_module(arguments[1])
        origin = spec.origin or arguments[1]
        sys.argv = [origin, *arguments[2:]]
        module = types.ModuleType(name)
        module.__dict__.update(__spec__=spec, __package__=spec.parent, __loader__=spec.loader, __file__=origin)
    else:
        path = Path(arguments[0]).absolute()
        sys.argv = list(arguments)
        _prepend(str(path.resolve().parent))
        with io.open_code(str(path)) as file:
            code = compile(file.read(), str(path), "exec", dont_inherit=True)
        loader = importlib.machinery.SourceFileLoader(name, str(path))
        module = types.ModuleType(name)
        module.__dict__.update(__spec__=None, __loader__=loader, __file__=str(path), __cached__=None)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = sys.modules[name] = module
    exec(code, module.__dict__)


def _prepend(folder: str) -> None:
    # A worker starts with -P, which leaves out the script's folder.
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


def _find_module(name: str) -> tuple[importlib.machinery.ModuleSpec, types.CodeType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if loader is not None and spec is not None else None
    if spec is None or code is None:
        raise LaunchError(f"-m {name}: there is no such module, or it can't be run")
    return spec, code


def _no_init(arguments: list[str], spec: WorkerSpec) -> str:
    script = " ".join(arguments[: 2 if arguments[0] == "-m" else 1])
    effect = f"each of the {spec.world_size} ranks ran all of it alone"
    if spec.world_size == 1:
        options = ", ".join(spell_option(name, value) for name, value in spec.settings.items())
        effect = f"it ran as it is, and {options} had no effect"
    return (
        f"{script} ended without `evenload.init()`, so {effect}; add\n"
        "    run = evenload.init()\n"
        "    model, loader = run.prepare(model, loader)\n"
        "and `step.backward(loss_fn)` in the loop, or start it with plain python"
    )


def _bind(spec: WorkerSpec) -> None:
    """Set cores, threads, memory of GPUs and network interface, before libraries read the variables."""
    # Of what spawned loader workers can't receive, the error and its hint (hints.py) say more.
    warnings.filterwarnings("ignore", message="Got pickle error", category=UserWarning)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
        # Torch counts only the cores of this rank; loader workers have a lower priority (data/reading.py).
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
    if spec.num_threads:
        for variable in _THREAD_VARIABLES:
            os.environ[variable] = str(spec.num_threads)
    replicas = [str(replica["device"]) for replica in spec.replicas]
    os.environ.update(allocator_variables([spec.device, *spec.devices, *replicas], os.environ))
    if spec.interface:
        # By default they take that of the host name, or the first: the usual reason for a rendezvous that hangs.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", spec.interface)
        os.environ.setdefault("TP_SOCKET_IFNAME", spec.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={spec.interface}")


def _watch_supervisor(spec: WorkerSpec) -> None:
    """Wait for the supervisor's start byte, then kill this process group when the supervisor is gone."""
    if spec.lifeline < 0:
        return
    for descriptor in (spec.lifeline, spec.channel):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    _continue_with_supervisor()
    if not os.read(spec.lifeline, 1):
        os._exit(1)

    def watch() -> None:
        os.read(spec.lifeline, 1)
        for folder in filter(None, (spec.launch_dir, spec.call)):
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="evenload-lifeline", daemon=True).start()


def _continue_with_supervisor() -> None:
    """Request SIGCONT when the supervisor dies (Linux), so a stopped worker continues and ends by its lifeline.

    SIGKILL would leave the worker's children behind. If the supervisor died before this call, the lifeline has already ended.
    """
    if sys.platform != "linux":
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def leave_on_signal(number: int, _: object) -> None:
    """Handle SIGTERM in a worker that can't save (session/stop.py): run `finally` blocks and the clean-up."""
    if progress.exit_code or progress.saving:
        return  # it already exits, in limited time
    # A second one ends the process at once.
    signal.signal(number, signal.SIG_DFL)
    if progress.exit_code == 0:
        return  # the script has ended
    raise SystemExit(128 + number)


def _leave_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat a signal that came while Python closed a generator or ran a `__del__`: there exceptions are only printed."""
    if isinstance(unraisable.exc_value, SystemExit) and unraisable.exc_value.code == 128 + signal.SIGTERM:
        signal.signal(signal.SIGTERM, leave_on_signal)
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    if not is_printed_elsewhere(str(error.code)):
        print(error.code, file=sys.stderr)
    return 1


def describe_uncaught(error: BaseException, rank: int, code: int) -> FailureReport:
    """Describe an error; write the whole traceback, where it says more, into the run folder."""
    failure = describe_error(error, rank, progress.step, code)
    says_more = error.__cause__ or error.__context__ or not isinstance(error, EvenloadError)
    if progress.folder is not None and progress.folder.is_dir() and says_more:
        path = write_whole_traceback(error, progress.folder, rank)
        if path is not None:
            failure = replace(failure, traceback=f"{failure.traceback}(whole traceback: {path})\n")
    return failure


def _report_failure(error: BaseException, spec: WorkerSpec, code: int) -> None:
    failure = describe_uncaught(error, spec.rank, code)
    if spec.launch_dir:
        with suppress(OSError):
            write_failure(failure, Path(spec.launch_dir), spec.worker)
            return
    print(f"evenload: {failure.text()}", file=sys.stderr)


def _exit(code: int, spec: WorkerSpec) -> None:
    """Run every clean-up, flush, and end the process."""
    progress.exit_code = code
    if code:
        if signal.getsignal(signal.SIGTERM) is leave_on_signal:
            # The supervisor sends it to all ranks when one fails; this rank already exits, in limited time.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _limit_clean_up(code)
    else:
        join_threads()
        stop_status.write(spec.launch_dir, spec.worker, StopStatus.EXITING)
    error = _run_callbacks()
    if error is not None and not code:
        code = 1
        _report_failure(error, spec, code)
    end_process(code)


def _limit_clean_up(code: int) -> None:
    late = threading.Timer(_CLEAN_UP_S, os._exit, (code,))
    late.daemon = True
    _exit_timers.append(late)
    late.start()


@contextmanager
def saving(spec: WorkerSpec) -> Iterator[None]:
    """Let the clean-up of a failed worker take as long as the body, which writes the last checkpoint."""
    limited = bool(_exit_timers)
    while _exit_timers:
        _exit_timers.pop().cancel()
    progress.saving = True
    stop_status.write(spec.launch_dir, spec.worker, StopStatus.SAVING)
    try:
        yield
    finally:
        progress.saving = False
        stop_status.write(spec.launch_dir, spec.worker, StopStatus.CLOSED)
        if limited:
            _limit_clean_up(progress.exit_code or 1)


def end_process(code: int) -> NoReturn:
    """End this process without waiting for its threads; run exit functions first, in which loggers and trackers flush."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _run_callbacks() -> BaseException | None:
    """Run all of them even if one raises; return the first error."""
    first: BaseException | None = None
    while _callbacks:
        callback = _callbacks.pop()
        try:
            callback()
        except BaseException as error:
            first = first or error
    return first


def _at_interpreter_exit() -> None:
    """Run the clean-up where the interpreter ends the process: under plain python, torchrun, srun.

    Note [Ending gloo's threads]
      A thread of gloo may release its last tensor after the operation has completed, and needs the interpreter for it. If it
      does so while the interpreter ends, the process crashes ("terminate called without an active exception"). So the groups
      end before, and their threads get some time.
    """
    failed = getattr(sys, "last_value", None) is not None
    progress.exit_code = int(failed)
    error = _run_callbacks()
    time.sleep(_GLOO_THREADS_S)
    if error is None or failed:
        return
    traceback.print_exception(error)
    if is_consequence(error):
        return  # another rank reports the cause, and this one keeps its exit code
    # An exception in an exit function leaves exit code 0, which would hide a failed save.
    atexit.unregister(_at_interpreter_exit)
    end_process(1)


if __name__ == "__main__":
    # Import it under its name, so that other modules share `progress`.
    from evenload.training.launch import worker

    worker.main()
