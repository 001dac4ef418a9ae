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


PENDING, RUNNING = JobState.PENDING, JobState.RUNNING  # found ten times as fast, in loops over all jobs
WITH_DEVICES = frozenset((JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.PREEMPTING))
"""A job holds devices in exactly these states."""

ENDED = frozenset((JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED))
"""A job stays in these for ever."""

_S = JobState

TABLE: dict[tuple[JobState, Verb], JobState] = {
    (state, verb): target
    for verb, states, target in (
        (Verb.PLACE, {_S.PENDING}, _S.STARTING),
        (Verb.BEGIN, {_S.STARTING}, _S.RUNNING),
        (Verb.RESIZE, {_S.RUNNING}, _S.RESIZING),
        (Verb.SWITCH, {_S.RESIZING}, _S.RUNNING),
        (Verb.STOP, WITH_DEVICES, _S.PREEMPTING),
        (Verb.YIELD, {_S.RESIZING}, _S.STARTING),
        (Verb.YIELD, WITH_DEVICES - {_S.RESIZING}, _S.PENDING),
        (Verb.SUCCEED, WITH_DEVICES, _S.SUCCEEDED),
        (Verb.FAIL, WITH_DEVICES | {_S.PENDING}, _S.FAILED),
        (Verb.RETRY, WITH_DEVICES, _S.PENDING),
        (Verb.LOSE, WITH_DEVICES, _S.PENDING),
        (Verb.CANCEL, {_S.PENDING, _S.PREEMPTING}, _S.CANCELLED),
    )
    for state in states
}
"""(State, verb) → next state; other verbs can't happen."""


def next_state(state: JobState, verb: Verb) -> JobState:
    """Return the state that follows; `QueueError` if the verb can't happen in this state."""
    target = TABLE.get((state, verb))
    if target is None:
        allowed = sorted(str(v) for s, v in TABLE if s is state)
        raise QueueError(
            f"a job that is {state} can't {verb}; what can happen to it: {', '.join(allowed) or 'nothing, it has ended'}"
        )
    return target
