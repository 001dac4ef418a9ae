"""The life of one worker process: from the launcher's file to `os._exit`.

    python -m evenload.training.launch.worker train.py --its --args
    python -m evenload.training.launch.worker -m package.module --its --args
    python -m evenload.training.launch.worker          the call that its file names (call.py)

It becomes the user's script as far as the script can tell: `__main__`, `sys.argv`, `sys.path[0]`. It leaves by
`os._exit`, because a process that used gloo may die in its destructors after its work. Its module holds no
torch: the number of threads must be set before torch is imported.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from evenload.errors import ConfigError, LaunchError
from evenload.training.launch.call import MAIN_NAME, read_call, run_call
from evenload.training.launch.environment import WorkerSpec, detect, devices_without_effect
from evenload.training.launch.failure import describe_error, is_consequence, write_failure
from evenload.training.launch.stop_status import Stop
from evenload.training.launch.stop_status import tell as tell_stop

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LAST_WORDS_S = 5.0
"""How long a worker that failed, or was stopped, may take for its clean-up; a peer it waits for may be gone, and somebody
waits for the devices."""
_PR_SET_PDEATHSIG = 1
_LET_IN_S = 0.02
"""What threads of gloo get to let go of their tensors, several times the interpreter's switch interval."""


@dataclass
class Progress:
    """What the core tells about this process, for the story of a failure."""

    initialised: bool = False
    """`evenload.init` was called."""
    placed: bool = False
    """`evenload.place` was called."""
    step: int | None = None
    """The global step that is running or was last."""
    reading: bool = False
    """A script is read for its functions (`run_function`), not run."""
    exit_code: int | None = None
    """Set before the clean-up callbacks run; anything but 0, or 75 of a stop that all ranks agreed on, means that peers may be
    gone: no collectives then."""


progress = Progress()
_callbacks: list[Callable[[], object]] = []


def at_exit(callback: Callable[[], object]) -> None:
    """Registers a clean-up that runs before this worker leaves, last registered first.

    Under `os._exit` nothing of the kind runs by itself. `progress.exit_code` tells the callback how the script ended.
    Without our bootstrap (``python train.py``) it runs as an ordinary exit function.
    """
    if not _callbacks:
        atexit.register(_at_interpreter_exit)
    _callbacks.append(callback)


def main(argv: list[str] | None = None) -> None:
    """Runs the script or module of the command line as a worker; never returns."""
    arguments = sys.argv[1:] if argv is None else argv
    spec = detect()
    _watch_supervisor(spec)
    _bind(spec)
    # SIGTERM runs `finally` blocks and the clean-up; the supervisor kills what doesn't end by itself.
    signal.signal(signal.SIGTERM, leave_on_signal)
    code = 0
    try:
        if spec.call:
            run_function(Path(spec.call), spec.rank)
        else:
            run_script(arguments)
        if spec.world_size > 1 and not progress.initialised and not spec.call:
            raise LaunchError(_no_init(arguments, spec.world_size))
        if len(spec.devices) > 1 and not progress.placed and not progress.initialised:
            raise ConfigError(devices_without_effect(spec))
    except SystemExit as leave:
        code = _exit_code(leave)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        progress.exit_code = code
        _tell(error, spec, code)
    _leave(code, spec)


def run_function(folder: Path, rank: int) -> None:
    """Calls the function that lies in `folder`, in the surroundings of the process that sent it."""
    call = read_call(folder)
    sys.path[:] = call.path
    sys.argv = list(call.argv)
    if call.main:
        progress.reading = True
        run_script([*call.main, *call.argv[1:]], MAIN_NAME)
        progress.reading = False
    run_call(call, folder, rank)


def run_script(arguments: list[str], name: str = "__main__") -> None:
    """Becomes ``SCRIPT args...`` or ``-m MODULE args...``, as python itself would run it; `name` is its ``__name__``.

    `__main__` stays in place afterwards (`runpy` takes it away), so that what the clean-up pickles is still found, and
    the start method spawn finds the script by its file or its module's name.
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
    """Makes the folder ``sys.path[0]``; the worker starts with -P, so nothing stands there yet."""
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


def _no_init(arguments: list[str], world_size: int) -> str:
    script = " ".join(arguments[: 2 if arguments[0] == "-m" else 1])
    return (
        f"{script} ended without `evenload.init()`, so each of the {world_size} ranks ran all of it alone; add\n"
        "    run = evenload.init()\n"
        "    model, loader = run.prepare(model, loader)\n"
        "and `step.backward(loss_fn)` in the loop, or start it with plain python"
    )


def _bind(spec: WorkerSpec) -> None:
    """Sets cores, threads and the network interface; libraries read the variables when they are loaded or first used."""
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
        # Torch counts the cores of this rank alone; loader workers give way to it (data/reading.py).
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
    if spec.num_threads:
        for variable in _THREAD_VARIABLES:
            os.environ[variable] = str(spec.num_threads)
    if spec.interface:
        # Left to themselves they take the one of the host name, or the first: the usual reason why machines wait for ever.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", spec.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={spec.interface}")


def _watch_supervisor(spec: WorkerSpec) -> None:
    """Waits for the supervisor's go, then watches that it lives: this process group must not outlive it."""
    if spec.lifeline < 0:
        return
    os.set_inheritable(spec.lifeline, False)
    _wake_with_supervisor()
    if not os.read(spec.lifeline, 1):
        os._exit(1)

    def watch() -> None:
        os.read(spec.lifeline, 1)
        for folder in filter(None, (spec.launch_dir, spec.call)):
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="evenload-lifeline", daemon=True).start()


def _wake_with_supervisor() -> None:
    """Where Linux can: a worker that is stopped (SIGSTOP) goes on when its supervisor dies, and then ends by its lifeline.

    Not SIGKILL, which would leave behind what this worker started. One whose supervisor died before this call reads the end of
    the lifeline at once.
    """
    if sys.platform != "linux":
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def leave_on_signal(number: int, _: object) -> None:
    """What SIGTERM does to a worker that can't save (stop.py): it runs `finally` blocks and the clean-up."""
    if progress.exit_code:
        return  # it leaves already, in limited time
    # A second one ends the process where it stands.
    signal.signal(number, signal.SIG_DFL)
    if progress.exit_code == 0:
        return  # the script has done its work, and only takes leave
    raise SystemExit(128 + number)


def _exit_code(leave: SystemExit) -> int:
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    print(leave.code, file=sys.stderr)
    return 1


def _tell(error: BaseException, spec: WorkerSpec, code: int) -> None:
    failure = describe_error(error, spec.rank, progress.step, code)
    if spec.launch_dir:
        with suppress(OSError):
            write_failure(failure, Path(spec.launch_dir))
            return
    print(f"evenload: {failure.story()}", file=sys.stderr)


def _leave(code: int, spec: WorkerSpec) -> None:
    """Runs every clean-up, flushes, and ends the process."""
    progress.exit_code = code
    if code:
        if signal.getsignal(signal.SIGTERM) is leave_on_signal:
            # The supervisor says so to all as soon as it hears of one: this one leaves already, in limited time.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        late = threading.Timer(_LAST_WORDS_S, os._exit, (code,))
        late.daemon = True
        late.start()
    else:
        _join_threads()
        tell_stop(spec.launch_dir, spec.rank, Stop.ENDS)
    error = _run_callbacks()
    if error is not None and not code:
        code = 1
        _tell(error, spec, code)
    _end(code)


def _end(code: int) -> NoReturn:
    # What the interpreter would call: loggers and trackers flush here.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _join_threads() -> None:
    """Waits for the script's own threads, as the interpreter does at its end."""
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.current_thread(), threading.main_thread()):
            thread.join()


def _run_callbacks() -> BaseException | None:
    """Runs all of them, whatever one raises; returns the first error."""
    first: BaseException | None = None
    while _callbacks:
        callback = _callbacks.pop()
        try:
            callback()
        except BaseException as error:
            first = first or error
    return first


def _at_interpreter_exit() -> None:
    """The clean-up where the interpreter, not our bootstrap, ends the process: under plain python, torchrun, srun.

    Note [How gloo leaves]
      A thread of gloo lets go of its last tensor after the waiter has gone on, and needs the interpreter for it; one that
      asks while the interpreter ends takes the process with it ("terminate called without an active exception"). So the
      groups end before that, and who asks now is let in.
    """
    failed = getattr(sys, "last_value", None) is not None
    progress.exit_code = int(failed)
    error = _run_callbacks()
    time.sleep(_LET_IN_S)
    if error is None or failed:
        return
    traceback.print_exception(error)
    if is_consequence(error):
        return  # another rank has the story, and this one keeps its exit code
    # An exception in an exit function would leave exit code 0: what could not be saved would look well.
    atexit.unregister(_at_interpreter_exit)
    _end(1)


if __name__ == "__main__":
    # The module the core imports and this one must be the same, or nobody would see `progress`.
    from evenload.training.launch import worker

    worker.main()
