"""Failure reports of ranks: small files that the supervisor reads and prints once."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.atomic_file import read_reserved, reserve, write_atomically, write_reserved
from evenload.errors import CheckpointError, DesyncError, EvenloadError, LaunchError, PeerLostError, RankFailedError
from evenload.training.launch.hints import hint_for

_STANDARD_LIBRARY = str(Path(traceback.__file__).parent)
_PACKAGE = str(Path(__file__).resolve().parents[2])
_TORCH_DATA = str(Path("torch", "utils", "data"))
_CHILD_ERRORS = (
    (
        re.compile(r"Caught \w+ in DataLoader worker process (\d+)\.\nOriginal (Traceback .*)", re.DOTALL),
        "DataLoader worker",
    ),
    (
        re.compile(r"\s*-- Process (\d+) terminated with the following error:\n(Traceback .*)", re.DOTALL),
        "process of torch.multiprocessing.spawn",
    ),
)
"""Errors of child processes, which torch sends as text."""
_FRAME = re.compile(r'^  File "([^"]*)"[^\n]*\n(?:    [^\n]*\n)*', re.MULTILINE)


@dataclass(frozen=True)
class FailureReport:
    """The error with which a rank ended."""

    rank: int
    kind: str
    """Type of the exception, or the end of the process, such as ``killed by SIGKILL``."""
    message: str
    traceback: str = ""
    """Frames of the user's code, and the last one where the error is not Evenload's."""
    step: int | None = None
    consequence: bool = False
    """The error only shows that another rank is gone; it is never the cause."""
    exit_code: int = 1
    lost: bool = False
    """The process or its device is gone, and the script is not at fault: the other ranks can go on without it."""
    time_s: float = 0.0
    """Seconds since the epoch."""

    def text(self, device: str = "") -> str:
        where = f"rank {self.rank}" + (f" ({device})" if device else "")
        return self.sentence(where)

    def sentence(self, where: str) -> str:
        """Return the error, then the traceback; `where` says what failed."""
        at = f" at step {self.step}" if self.step is not None else ""
        what = f"{self.kind}: {self.message}" if self.message else self.kind
        head = f"{where} failed{at}: {what}"
        return f"{head}\n{self.traceback.rstrip()}" if self.traceback else head


def failure_path(launch_dir: Path, worker: str) -> Path:
    return launch_dir / f"failure-{worker}.json"


def describe_error(error: BaseException, rank: int, step: int | None, exit_code: int = 1) -> FailureReport:
    kind, message, formatted = _in_child(error) or (type(error).__name__, str(error), user_traceback(error))
    return FailureReport(
        rank=rank,
        kind=kind,
        message=message + (f"\n  hint: {hint}" if (hint := hint_for(error)) else ""),
        traceback=formatted,
        step=step,
        consequence=is_consequence(error),
        lost=_is_device_lost(error) or (isinstance(error, PeerLostError) and error.restarts_all),
        exit_code=exit_code,
        time_s=time.time(),
    )


def prepare_failure(launch_dir: Path, worker: str) -> None:
    """Take the room for a worker's report: on a full disk its error must not look like the loss of a device. OSError: no room."""
    reserve(failure_path(launch_dir, worker), _ROOM_BYTES)


def write_failure(failure: FailureReport, launch_dir: Path, worker: str) -> None:
    message, trace = failure.message, failure.traceback
    while len(content := json.dumps(dataclasses.asdict(failure)).encode()) >= _ROOM_BYTES:
        message, trace = message[: len(message) // 2], trace[len(trace) // 2 :]
        failure = dataclasses.replace(failure, message=message, traceback=trace)
    write_reserved(failure_path(launch_dir, worker), content)


def read_failure(launch_dir: Path, worker: str) -> FailureReport | None:
    try:
        content = read_reserved(failure_path(launch_dir, worker))
        return FailureReport(**json.loads(content)) if content else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise LaunchError(f"the failure report of {worker} in {launch_dir} can't be read: {error}") from error


def is_consequence(error: BaseException) -> bool:
    """Return True if the error only shows that another rank is gone or failed."""
    if isinstance(error, CheckpointError) and error.elsewhere:
        return True
    if isinstance(error, PeerLostError | DesyncError) or type(error).__name__ == "DistNetworkError":
        return True
    # Messages of gloo that have not been translated yet, and of TensorPipe (RPC).
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in ("Connection closed by peer", "Connection reset by peer", "this error originated at tensorpipe")
    )


def _is_device_lost(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and "CUDA error" in text and any(sign in text for sign in _LOST_DEVICE)


def user_traceback(error: BaseException) -> str:
    """Return the traceback with the frames of the user's code, and one line for each error that led to this one.

    The last frame stays too, whose file it may be, of an error that Evenload did not raise.
    """
    error_traceback = traceback.TracebackException.from_exception(error)
    error_traceback.__cause__ = error_traceback.__context__ = None
    _keep_users_frames(error_traceback)
    is_alone = isinstance(error, EvenloadError) and not error_traceback.stack
    is_alone = is_alone or isinstance(error, RankFailedError)  # its message has the traceback of the rank
    own = "" if is_alone else "".join(error_traceback.format())
    return own + "".join(f"caused by {_first_line(earlier)}{_place(earlier)}\n" for earlier in earlier_errors(error))


def earlier_errors(error: BaseException) -> list[BaseException]:
    """Return the errors that led to this one, the latest first; of an error of Evenload only what it was raised from."""
    found: list[BaseException] = []
    now: BaseException | None = error
    while now is not None:
        hides = now.__suppress_context__ or isinstance(error, EvenloadError)
        now = now.__cause__ or (None if hides else now.__context__)
        if now is None or now in found:
            break
        found.append(now)
    return found


def write_whole_traceback(error: BaseException, folder: Path, rank: int) -> Path | None:
    """Write the traceback with all frames and earlier errors into the run folder; None if that can't be done."""
    path = folder / f"traceback-rank-{rank}.txt"
    try:
        write_atomically(path, "".join(traceback.format_exception(error)))
    except OSError:
        return None
    return path


def passes_through_package(trace: types.TracebackType | None) -> bool:
    return any(frame.f_code.co_filename.startswith(_PACKAGE) for frame, _ in traceback.walk_tb(trace))


def is_users_file(name: str) -> bool:
    """Return False for files of Evenload, of installed packages and of Python itself."""
    return not name.startswith(("<", _PACKAGE, _STANDARD_LIBRARY)) and "site-packages" not in name


def _place(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users_file(frame.filename)]
    return f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})" if own else ""


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _in_child(error: BaseException) -> tuple[str, str, str] | None:
    """Return kind, message and traceback of an error in a DataLoader worker, or in a process that mp.spawn started."""
    matches = ((pattern.match(str(error)), child) for pattern, child in _CHILD_ERRORS)
    found, child = next(((found, child) for found, child in matches if found), (None, ""))
    if found is None:
        return None
    number, text = found.groups()
    text = text[text.rindex("Traceback (most recent call last)") :]
    kind, _, message = _FRAME.split(text)[-1].strip().partition(": ")
    where = f"in {child} {number} of this rank"
    frames = [frame[1] for frame in _FRAME.finditer(text)]
    kept = iter(_kept(frames))
    own = _FRAME.sub(lambda frame: frame[0] if next(kept) else "", text)
    return kind.rpartition(".")[2], f"{message} ({where})" if message else where, own


def _kept(files: Sequence[str]) -> list[bool]:
    """Return for each frame of a traceback, by its file, whether it is shown: those of the user's code, and the last one."""
    users = [is_users_file(name) for name in files]
    if not any(users):
        users = [not (name.startswith((_PACKAGE, "<frozen")) or _TORCH_DATA in name) for name in files]
    return [*users[:-1], not files[-1].startswith("<frozen")] if files else []


def _keep_users_frames(summary: traceback.TracebackException) -> None:
    frames = list(summary.stack)
    files = [frame.filename for frame in frames]
    kept = _kept(files)
    tells_enough = _is_type(summary, (EvenloadError, SyntaxError))  # without the frame that raised it
    if tells_enough and frames:
        kept[-1] = is_users_file(frames[-1].filename)
    if tells_enough or any(stays and is_users_file(name) for stays, name in zip(kept, files, strict=True)):
        own = [frame for frame, stays in zip(frames, kept, strict=True) if stays]
        summary.stack = traceback.StackSummary.from_list(own)


def _is_type(summary: traceback.TracebackException, kinds: tuple[type[BaseException], ...]) -> bool:
    return isinstance(summary.exc_type, type) and issubclass(summary.exc_type, kinds)


def describe_end(rank: int, code: int, ended_s: float) -> FailureReport:
    """Return the report of a worker that wrote none, from its exit code (−N: signal N; 0: before the end of its script)."""
    if code == 0:
        return FailureReport(
            rank, "it ended with exit code 0 before its script did", _EARLY_HINT, time_s=ended_s, lost=True
        )
    if code > 0:
        message = _ARGUMENTS_HINT if code == _WRONG_ARGUMENTS else ""
        return FailureReport(
            rank, f"it ended with exit code {code}", message, exit_code=code, time_s=ended_s, lost=True
        )
    name = signal.Signals(-code).name
    message = _SIGNAL_HINTS.get(name, "")
    # gloo aborts healthy processes when a peer is gone: seldom the cause.
    return FailureReport(
        rank,
        f"killed by {name}",
        message,
        exit_code=128 - code,
        time_s=ended_s,
        consequence=name == "SIGABRT",
        lost=True,
    )


_ROOM_BYTES = 1 << 16
_LOST_DEVICE = (
    "uncorrectable ECC error",
    "GPU is lost",
    "fallen off the bus",
    "no CUDA-capable device",
    "devices are busy or unavailable",
    "hardware stack error",
    "uncorrectable NVLink error",
)
"""In messages of CUDA errors that come from the device; others, such as an assertion in a kernel, come from the script."""
_WRONG_ARGUMENTS = 2
"""Exit code of argparse for wrong arguments."""
_ARGUMENTS_HINT = (
    "argparse does so for wrong arguments; options of evenload come before the script, the script's own after it"
)
_EARLY_HINT = (
    "os._exit, or code that calls it: Evenload could not write the last checkpoint. Return from the script, call sys.exit, or "
    "call run.close() before it"
)
_SIGNAL_HINTS = {
    "SIGKILL": "from outside; the system does this when memory runs out",
    "SIGSEGV": "a crash in native code; run with `python -X faulthandler` to see where",
    "SIGBUS": "often a full /dev/shm; give it more, or use fewer loader workers",
}
