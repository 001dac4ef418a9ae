"""A function and its arguments on their way to the workers, and rank 0's result on its way back.

Note [How a worker finds the function]
  A function of an importable module travels by name. One of a script's own (`__main__`) too: each worker reads the script as
  ``__mp_main__``, as multiprocessing's start method spawn does, so that what stands under ``if __name__ == "__main__"`` stays
  out. A notebook has no file to read: there functions, and the globals that they use, travel by value (cloudpickle).
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

from evenload.errors import ConfigError

MAIN_NAME = "__mp_main__"
"""What a script is called that is read for its functions; multiprocessing's own name, which its children know."""

_CALL_FILE = "call.pickle"
_RESULT_FILE = "result.pickle"


@dataclass(frozen=True)
class Call:
    """What a worker needs to call a function of another process."""

    name: str
    """What a person calls the function."""
    payload: bytes
    """The function and its arguments, pickled; read after `main`."""
    by_value: bool
    """Whether `payload` holds code, not names."""
    main: tuple[str, ...]
    """What the worker reads first, as on the command line of python: a script, or ``-m`` and a module; empty: nothing."""
    argv: tuple[str, ...]
    """`sys.argv` of the caller."""
    path: tuple[str, ...]
    """`sys.path` of the caller."""


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """Makes a function and its arguments ready to travel.

    Raises:
        ConfigError: they can't travel, with the reason and what to write instead.
    """
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    main = _main_target()
    payload = _pickle(fn, args, name, by_value=False) if main is not None else None
    by_value = payload is None
    if payload is None:
        payload = _pickle(fn, args, name, by_value=True)
    # Only who needs the script reads it: a function of a module stays clear of a script without guard.
    needs_main = not by_value and b"__main__" in payload
    if needs_main and not main:
        raise ConfigError(
            f"evenload.spawn({name}): it is defined in a __main__.py, which runs as a whole and can't be read by the workers; "
            "define it in another module and import it"
        )
    return Call(
        name=name,
        payload=payload,
        by_value=by_value,
        main=(main or ()) if needs_main else (),
        argv=tuple(sys.argv) if main else (_interactive_name(),),
        path=tuple(sys.path),
    )


def write_call(call: Call, folder: Path) -> None:
    """Lays the call down where the workers find it."""
    (folder / _CALL_FILE).write_bytes(pickle.dumps(call))


def read_call(folder: Path) -> Call:
    """What `write_call` wrote."""
    call: Call = pickle.loads((folder / _CALL_FILE).read_bytes())
    return call


def run_call(call: Call, folder: Path, rank: int) -> None:
    """Calls the function; the result of rank 0 is left in the folder.

    Raises:
        ConfigError: the result of rank 0 can't travel back.
    """
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
    partial = folder / f"{_RESULT_FILE}.partial"
    partial.write_bytes(pickled)
    partial.replace(folder / _RESULT_FILE)


def read_result(folder: Path) -> Any:
    """What rank 0's call returned; None where it left before its end (`sys.exit(0)`)."""
    path = folder / _RESULT_FILE
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _fill_main(fn: Callable[..., Any]) -> None:
    """Puts what came by value where it says that it is, in `__main__`: pickling a class asks for it there."""
    main = types.ModuleType("__main__")
    main.__dict__.update(getattr(fn, "__globals__", {}))
    sys.modules["__main__"] = main


def _main_target() -> tuple[str, ...] | None:
    """How a worker can read what is `__main__` here; None where there is no file to read (a notebook, `python -c`)."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        # A package's __main__.py runs the program whatever its name is: nobody defines functions for others there.
        return () if spec.name == "__main__" or spec.name.endswith(".__main__") else ("-m", spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).exists():
        return None
    return (os.fspath(Path(file).absolute()),)


def _interactive_name() -> str:
    """The run folder takes its name from `sys.argv[0]`, which in a notebook is the kernel's."""
    return "interactive"


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...], name: str, *, by_value: bool) -> bytes:
    try:
        return _dumps((fn, args), by_value=by_value)
    except Exception as error:  # whatever a value's own pickling raises
        if by_value:
            raise ConfigError(
                f"evenload.spawn({name}): the function, its arguments, or the globals that it uses can't be sent to another "
                f"process ({error}); make what can't be sent (a run, a loader, a lock, an open file) inside the function"
            ) from error
        raise ConfigError(
            f"evenload.spawn({name}): the function or its arguments can't be sent to another process ({error}); define the "
            "function at the top of a module or script, and make what can't be sent (a run, a loader, a lock) inside it"
        ) from error


def _dumps(value: Any, *, by_value: bool) -> bytes:
    if not by_value:
        return pickle.dumps(value)
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)
    return pickled
