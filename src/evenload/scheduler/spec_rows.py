"""Specs of jobs as clients send them, checked; used by the queue of this machine and by that on Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evenload.errors import ConfigError
from evenload.scheduler import validation
from evenload.scheduler.core.values import JobSpec
from evenload.scheduler.messages import CHANGEABLE

_LONGEST_NAME = 200
_MOST_NAMES = 1000
_TIMES = ("not_before_s", "deadline_s")


def spec_from(row: Mapping[str, Any], user: str) -> JobSpec:
    """Return a job's spec; raise a `ConfigError` where a field is unknown or doesn't fit."""
    if "user" in row:
        raise ConfigError("spec.user: the queue takes the owner from the connection; leave it out")
    return _spec({**row, "user": user, "estimate_source": ""})


def changed_spec(spec: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """Return a job's spec with some fields changed; raise a `ConfigError` where they can't be changed to that."""
    if not changes:
        raise ConfigError(f"change names no field; the fields that can be changed are {', '.join(CHANGEABLE)}")
    if unknown := changes.keys() - set(CHANGEABLE):
        raise ConfigError(f"{', '.join(sorted(unknown))} can't be changed; what can: {', '.join(CHANGEABLE)}")
    before = validation.plain(spec)
    if isinstance(changes.get("needs"), Mapping):
        changes = {**changes, "needs": {**before.get("needs", {}), **changes["needs"]}}
    if "estimate_s" in changes:
        before["estimate_source"] = ""
    found = _spec({**before, **changes})
    kept = [name for name in spec.delays if name not in changes]  # a time that isn't changed stays what it was
    given = [name for name in found.delays if name in changes and "delays" in changes]
    return replace(found, delays=(*kept, *given))


def _spec(row: Mapping[str, Any]) -> JobSpec:
    spec = validation.build(JobSpec, row, "spec")
    check_name("name", spec.name, may_be_empty=True)
    check_name("array", spec.array, may_be_empty=True)
    if unknown := set(spec.delays) - set(_TIMES):
        raise ConfigError(f"spec.delays: {', '.join(sorted(unknown))[:100]}: expected some of {', '.join(_TIMES)}")
    for part in (spec.needs.kinds, tuple(after.job for after in spec.after)):
        if len(part) > _MOST_NAMES:
            raise ConfigError(f"spec with {len(part)} names in one list: expected at most {_MOST_NAMES}")
        for name in part:
            check_name("spec", name)
    return spec


def check_name(what: str, name: Any, *, may_be_empty: bool = False) -> str:
    """Return a name that can be shown in a terminal; raise a `ConfigError` for any other."""
    if not isinstance(name, str) or (not name and not may_be_empty):
        raise ConfigError(f"{what}={name!r:.100}: expected a name")
    if len(name) > _LONGEST_NAME:
        raise ConfigError(f"{what} of {len(name)} characters: expected at most {_LONGEST_NAME}")
    if not name.isprintable():
        raise ConfigError(f"{what}={name!r}: it holds characters that can't be printed")
    return name
