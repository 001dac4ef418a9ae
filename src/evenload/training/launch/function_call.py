"""Transfer of a function and its arguments to the workers, and of rank 0's result back.

Note [How a worker finds the function]
  A function of an importable module is pickled by name. So is one of the script (`__main__`): each worker runs the script as
  ``__mp_main__``, like multiprocessing's start method spawn, so code under ``if __name__ == "__main__"`` does not run. A
  notebook has no file to run, so functions and the globals they use are pickled by value (cloudpickle).
"""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.atomic_file import write_atomically
from evenload.errors import ConfigError

MAIN_NAME = "__mp_main__"
"""`__name__` of a script that is run only for its functions, as in multiprocessing."""

_CALL_FILE = "call.pickle"
_RESULT_FILE = "result.pickle"


@dataclass(frozen=True)
class FunctionCall:
    """A function of another process, with its arguments."""

    name: str
    payload: bytes
    """The pickled function and arguments; loaded after `main`."""
    by_value: bool
    """`payload` holds code, not names."""
    main: tuple[str, ...]
    """The script, or ``-m`` and a module, that the worker runs first; may be empty."""
    argv: tuple[str, ...]
    path: tuple[str, ...]
    """`sys.path` of the caller, as is `argv`."""


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> FunctionCall:
    """Pickle a function and its arguments; ConfigError if they can't be pickled."""
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    main = _main_target()
    payload = _pickle(fn, args, name, by_value=False) if main is not None else None
    by_value = payload is None
    if payload is None:
        payload = _pickle(fn, args, name, by_value=True)
    # A function of another module does not need the script, which may have no `__main__` guard.
    needs_main = not by_value and b"__main__" in payload
    if needs_main and not main:
        raise ConfigError(
            f"evenload.spawn({name}): it is defined in a __main__.py, which workers can't import without running it; "
            "define it in another module and import it"
        )
    return FunctionCall(
        name=name,
        payload=payload,
        by_value=by_value,
        main=(main or ()) if needs_main else (),
        # The run folder is named after argv[0], which in a notebook is the kernel's.
        argv=tuple(sys.argv) if main else ("interactive",),
        path=tuple(sys.path),
    )


def write_call(call: FunctionCall, folder: Path) -> None:
    (folder / _CALL_FILE).write_bytes(pickle.dumps(call))


def read_call(folder: Path) -> FunctionCall:
    call: FunctionCall = pickle.loads((folder / _CALL_FILE).read_bytes())
    return call


def run_call(call: FunctionCall, folder: Path, rank: int) -> None:
    """Call the function, and write rank 0's result into the folder; ConfigError if it can't be pickled."""
    fn, args = pickle.loads(call.payload)
    if call.by_value:
        _fill_main(fn)
    result = fn(*args)
    if rank != 0:
        return
    try:
        pickled = _dumps(result, by_value=call.by_value)
    except Exception as error:  # whatever a value's own pickling raises
        raise ConfigError(
            f"evenload.spawn: {call.name} returned a {type(result).__name__}, which can't be sent back to the caller "
            f"({error}); return numbers, text, tensors, or dicts and lists of them"
        ) from error
    write_atomically(folder / _RESULT_FILE, pickled)


def read_result(folder: Path) -> Any:
    """Return rank 0's result; None if it exited before its end (`sys.exit(0)`)."""
    path = folder / _RESULT_FILE
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _fill_main(fn: Callable[..., Any]) -> None:
    """Define `__main__` with the globals of a function sent by value: pickling a class looks it up there."""
    main = types.ModuleType("__main__")
    main.__dict__.update(getattr(fn, "__globals__", {}))
    sys.modules["__main__"] = main


def _main_target() -> tuple[str, ...] | None:
    """Return how a worker runs this process's `__main__`; None where it has no file (a notebook, `python -c`)."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        # A package's __main__.py runs the program under any name.
        return () if spec.name == "__main__" or spec.name.endswith(".__main__") else ("-m", spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).exists():
        return None
    return (os.fspath(Path(file).absolute()),)


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...], name: str, *, by_value: bool) -> bytes:
    try:
        return _dumps((fn, args), by_value=by_value)
    except Exception as error:  # whatever a value's own pickling raises
        if by_value:
            raise ConfigError(
                f"evenload.spawn({name}): the function, its arguments, or the globals that it uses can't be sent to another "
                f"process ({error}); create what can't be sent (a run, a loader, a lock, an open file) inside the function"
            ) from error
        raise ConfigError(
            f"evenload.spawn({name}): the function or its arguments can't be sent to another process ({error}); define the "
            "function at the top of a module or script, and create what can't be sent (a run, a loader, a lock) inside it"
        ) from error


def _dumps(value: Any, *, by_value: bool) -> bytes:
    if not by_value:
        return pickle.dumps(value)
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)
    return pickled
