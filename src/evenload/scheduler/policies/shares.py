"""Use of the cluster by each user, relative to their share."""

from __future__ import annotations

from evenload.scheduler.core.policy import PolicyInput
from evenload.scheduler.core.values import User

_NOTICED_S = 3600.0
"""Use of less than so many seconds of a user's part of the machine makes no difference."""


def relative_use(inputs: PolicyInput) -> dict[str, float]:
    """Return user → decayed device-seconds over share, relative to the mean of the users who have jobs here.

    r_u = (U_u / s_u + e) / (mean + e), with e an hour of an equal part of the machine: 1 for a user like the others, 2 for
    one who had twice as much, and near 1 for all while use is small.
    """
    names = sorted({job.spec.user for job in inputs.jobs})
    used = {name: use(inputs, name) for name in names}
    least = _NOTICED_S * inputs.num_devices / max(1, len(names))
    mean = sum(used.values()) / max(1, len(names))
    return {name: (value + least) / (mean + least) if mean + least > 0 else 1.0 for name, value in used.items()}


def use(inputs: PolicyInput, name: str) -> float:
    """Return a user's decayed device-seconds over their share."""
    user = inputs.users.get(name, User(name))
    return user.usage_until(inputs.now_s, inputs.settings.half_life_s) / user.limits.share
