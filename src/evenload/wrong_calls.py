"""Answer wrong calls and unknown attributes by an error that shows what to write."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from evenload.errors import ConfigError, UnknownNameError
from evenload.foreign_names import describe_unknown

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def shows_usage(
    usage: str, explain_keyword: Callable[[str], str] | None = None
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Make calls whose arguments do not fit the signature raise ConfigError with `usage`, the right call.

    `explain_keyword` returns the words for an unknown keyword, in place of both.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except TypeError:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as wrong:
                    reason = f"{wrong}; write: {usage}"
                else:
                    raise
            unknown = [name for name in kwargs if name not in signature.parameters]
            if explain_keyword is not None and unknown:
                reason = explain_keyword(unknown[0])
            raise ConfigError(f"{_spell(function)}: {reason}")

        return call

    return decorate


def _spell(function: Callable[..., object]) -> str:
    owner, dot, name = function.__qualname__.rpartition(".")
    return f"{owner.lower() if dot else 'evenload'}.{name}"


def unknown_attribute(owner: object, name: str, elsewhere: Mapping[str, str]) -> UnknownNameError:
    """Return the error for an attribute that `owner` does not have, with what to write instead (foreign_names.py)."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_") or name in elsewhere:
        known = [known for known in dir(type(owner)) if not known.startswith("_")]
        hint = describe_unknown(name, known, elsewhere)
        message += f"; {hint}" if hint else f"; it has {', '.join(known)}"
    return UnknownNameError(message)
