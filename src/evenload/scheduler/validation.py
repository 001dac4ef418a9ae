"""Validation of plain values (JSON, TOML) against the type hints of frozen dataclasses and functions, and back.

Everything that comes from a socket or a file passes through here. Nothing is converted silently: a bool is no number, and
numbers are finite and fit into 64 bits. Metadata of a field: ``min``, the least number; ``infinite``, infinity is allowed;
``check``, a function that raises `ValueError` with what was expected.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from evenload.errors import ConfigError

_LARGEST_INT = 2**63 - 1
_EXPECTED = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
_T = TypeVar("_T")


class _Mismatch(Exception):
    """A value that doesn't fit: the problem, and the path of fields that leads to it."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem, self.path = problem, path

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{what}{'.' if what and self.path else ''}{self.path}{self.problem}")


class _FieldHint(NamedTuple):
    hint: Any
    default: Any
    """`dataclasses.MISSING` for none."""
    metadata: Mapping[str, Any]


_hints: dict[Any, dict[str, _FieldHint]] = {}
_parts: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def build(kind: type[_T], row: Any, what: str) -> _T:
    """Make a dataclass of plain values; lists become tuples or frozensets, objects the dataclasses of the fields.

    Raises `ConfigError`, with the field and with `what`, if a field is unknown, missing or doesn't fit.
    """
    try:
        return kind(**_values(kind, row))
    except _Mismatch as error:
        raise error.error(what) from None


def arguments(function: Callable[..., Any], row: Any, what: str) -> dict[str, Any]:
    """Return a function's keyword-only arguments from plain values, checked as by `build`; ``**kwargs`` takes unknown fields."""
    try:
        return _values(getattr(function, "__func__", function), row)
    except _Mismatch as error:
        raise error.error(what) from None


def check(value: Any) -> None:
    """Raise `ConfigError` unless all fields of a dataclass, and of those inside, are of the declared types."""
    try:
        _check(value)
    except _Mismatch as error:
        raise error.error("") from None


def plain(value: Any) -> dict[str, Any]:
    """Return a dataclass as the plain values of JSON; what has its default is left out."""
    return {
        name: _plain_part(part)
        for name, field in _fields(type(value)).items()
        if (part := getattr(value, name)) != field.default
    }


def _plain_part(part: Any) -> Any:
    if dataclasses.is_dataclass(part):
        return plain(part)
    if isinstance(part, frozenset):
        return sorted(part)
    if isinstance(part, tuple):
        return [_plain_part(element) for element in part]
    return part


def _values(kind: Any, row: Any) -> dict[str, Any]:
    known = _fields(kind)
    names = ", ".join(name for name in known if name != "**") or "none"
    if not isinstance(row, Mapping):
        raise _Mismatch(f"={row!r:.100}: expected an object with the fields {names}")
    values = {}
    for name, value in row.items():
        field = known.get(name) or known.get("**")
        if field is None:
            raise _Mismatch(f": there is no such field; the fields are {names}", str(name)[:100])
        values[name] = _fit_at(name, field, value)
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in values:
            raise _Mismatch(" is missing", name)
    return values


def _check(value: Any) -> None:
    for name, field in _fields(type(value)).items():
        part = getattr(value, name)
        if isinstance(part, list):
            raise _Mismatch(f"={part!r:.100}: expected a tuple", name)
        _fit_at(name, field, part)


def _fit_at(name: str, field: _FieldHint, value: Any) -> Any:
    try:
        return _fit(field.hint, value, field.metadata)
    except _Mismatch as error:
        error.path = f"{name}.{error.path}" if error.path else name
        raise


def _fields(kind: Any) -> dict[str, _FieldHint]:
    known = _hints.get(kind)
    if known is None:
        hints = get_type_hints(kind)
        if isinstance(kind, type):
            known = {
                f.name: _FieldHint(
                    hints[f.name],
                    f.default if f.default_factory is dataclasses.MISSING else f.default_factory(),
                    f.metadata,
                )
                for f in dataclasses.fields(kind)
            }
        else:
            known = {}
            for name, parameter in inspect.signature(kind).parameters.items():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
                    known[name] = _FieldHint(hints[name], default, {})
                elif parameter.kind is parameter.VAR_KEYWORD:
                    known["**"] = _FieldHint(hints[name], None, {})
        _hints[kind] = known
    return known


def _fit(hint: Any, value: Any, metadata: Mapping[str, Any]) -> Any:
    if hint in _EXPECTED:
        return _fit_scalar(hint, value, metadata)
    if hint is Any:
        return value
    if hint not in _parts:
        _parts[hint] = get_origin(hint), get_args(hint)
    origin, parts = _parts[hint]
    if origin in (Union, types.UnionType):
        return _fit_one_of(parts, value, metadata)
    if origin in (tuple, frozenset):
        if not isinstance(value, list | tuple | frozenset):
            raise _Mismatch(f"={value!r:.100}: expected a list")
        return origin([_fit(parts[0], part, metadata) for part in value])
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise _Mismatch(f"={value!r:.100}: expected an object")
        field = _FieldHint(parts[1], None, metadata)
        return {_fit(parts[0], name, {}): _fit_at(str(name)[:100], field, part) for name, part in value.items()}
    if issubclass(hint, enum.Enum):
        if value not in list(hint):
            raise _Mismatch(f"={value!r:.100}: expected one of {', '.join(member.value for member in hint)}")
        return hint(value)
    if isinstance(value, hint):
        _check(value)
        return value
    return hint(**_values(hint, value))


def _fit_one_of(kinds: Sequence[Any], value: Any, metadata: Mapping[str, Any]) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not types.NoneType)
    for other in others:
        try:
            return _fit(other, value, metadata)
        except _Mismatch:
            continue
    return _fit(last, value, metadata)


def _fit_scalar(kind: type[Any], value: Any, metadata: Mapping[str, Any]) -> Any:
    if kind is str or kind is bool:
        fits = isinstance(value, kind)
    else:
        fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if fits and isinstance(value, int):
            fits = abs(value) <= _LARGEST_INT
        elif fits:
            fits = math.isfinite(value) or ("infinite" in metadata and not math.isnan(value))
        fits = fits and ("min" not in metadata or value >= metadata["min"])
    if not fits:
        least = f" of at least {metadata['min']:g}" if "min" in metadata and kind is not str else ""
        raise _Mismatch(f"={value!r:.100}: expected {_EXPECTED[kind]}{least}")
    if "check" in metadata:
        try:
            metadata["check"](value)
        except ValueError as error:
            raise _Mismatch(f"={value!r:.100}: expected {error}") from None
    return value
