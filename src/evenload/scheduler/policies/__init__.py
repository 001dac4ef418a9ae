"""Scheduling policies by name, each a pure function from a `PolicyInput` to a `PolicyDecision`."""

from __future__ import annotations

from importlib import import_module

from evenload.errors import ConfigError
from evenload.scheduler.core.policy import Policy
from evenload.scheduler.core.values import POLICIES


def policy_named(name: str) -> Policy:
    """Return the policy of this name; `ConfigError` if there is none."""
    policy = _LOADED.get(name)
    if policy is None:
        if name not in POLICIES:
            raise ConfigError(f"policy={name!r}: there is no such policy; there are {', '.join(POLICIES)}")
        policy = _LOADED[name] = getattr(import_module(f"{__name__}.{name}"), name)
    return policy


_LOADED: dict[str, Policy] = {}
