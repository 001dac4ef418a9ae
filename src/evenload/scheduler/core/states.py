"""States of a job as a table: what can happen in each, and which state follows.

::

    PENDING ──place──▶ STARTING ──begin──▶ RUNNING ──succeed──▶ SUCCEEDED
       ▲                  ▲                │  │ └───fail─────▶ FAILED
       │                  └─yield─ RESIZING ◀┘  └──stop──▶ PREEMPTING ──yield──▶ PENDING
       │                           └─switch─▶ RUNNING                        └─cancel─▶ CANCELLED
       └──yield, lose, retry (from any state that holds devices)

A job that is to be ended for good (cancelled, or over its hard limit) is PREEMPTING too; its `Job.ending` is the state
that follows.
"""

from __future__ import annotations

from enum import StrEnum

from evenload.errors import QueueError


class JobState(StrEnum):
    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    PREEMPTING = "PREEMPTING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Verb(StrEnum):
    PLACE = "place"
    BEGIN = "begin"
    RESIZE = "resize"
    """It is requested to continue on other devices: without a stop, or by a save and a stop."""
    SWITCH = "switch"
    """It runs on its new devices without a stop."""
    STOP = "stop"
    """It is requested to save and stop."""
    YIELD = "yield"
    """It has saved, and its processes have ended with exit code 75."""
    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    """It failed, and may be tried again."""
    LOSE = "lose"
    """Its processes are gone through no fault of its own: a host died, a runner was killed."""
    CANCEL = "cancel"


_S, _V = JobState, Verb

TABLE: dict[tuple[JobState, Verb], JobState] = {
    (_S.PENDING, _V.PLACE): _S.STARTING,
    (_S.PENDING, _V.CANCEL): _S.CANCELLED,
    (_S.PENDING, _V.FAIL): _S.FAILED,
    (_S.STARTING, _V.BEGIN): _S.RUNNING,
    (_S.STARTING, _V.STOP): _S.PREEMPTING,
    (_S.RUNNING, _V.RESIZE): _S.RESIZING,
    (_S.RUNNING, _V.STOP): _S.PREEMPTING,
    (_S.RESIZING, _V.SWITCH): _S.RUNNING,
    (_S.RESIZING, _V.YIELD): _S.STARTING,
    (_S.RESIZING, _V.STOP): _S.PREEMPTING,
    (_S.PREEMPTING, _V.STOP): _S.PREEMPTING,
    (_S.PREEMPTING, _V.CANCEL): _S.CANCELLED,
    (_S.PREEMPTING, _V.YIELD): _S.PENDING,
    (_S.STARTING, _V.YIELD): _S.PENDING,
    (_S.RUNNING, _V.YIELD): _S.PENDING,
    **{
        (state, verb): target
        for state in (_S.STARTING, _S.RUNNING, _S.RESIZING, _S.PREEMPTING)
        for verb, target in (
            (_V.SUCCEED, _S.SUCCEEDED),
            (_V.FAIL, _S.FAILED),
            (_V.RETRY, _S.PENDING),
            (_V.LOSE, _S.PENDING),
        )
    },
}
"""(State, verb) → next state; other verbs can't happen."""

WITH_DEVICES = frozenset((_S.STARTING, _S.RUNNING, _S.RESIZING, _S.PREEMPTING))
"""A job holds devices in exactly these states."""

ENDED = frozenset((_S.SUCCEEDED, _S.FAILED, _S.CANCELLED))
"""A job stays in these for ever."""


def next_state(state: JobState, verb: Verb) -> JobState:
    """Return the state that follows; `QueueError` if the verb can't happen in this state."""
    target = TABLE.get((state, verb))
    if target is None:
        allowed = sorted(str(v) for s, v in TABLE if s is state)
        raise QueueError(
            f"a job that is {state} can't {verb}; what can happen to it: {', '.join(allowed) or 'nothing, it has ended'}"
        )
    return target
