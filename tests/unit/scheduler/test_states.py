from __future__ import annotations

import pytest

from evenload.errors import QueueError
from evenload.scheduler.core.states import ENDED, TABLE, WITH_DEVICES, JobState, Verb, next_state


def test_every_state_can_be_reached_and_only_ends_are_ends() -> None:
    reached = {JobState.PENDING}
    while more := {target for (state, _), target in TABLE.items() if state in reached} - reached:
        reached |= more
    assert reached == set(JobState)
    assert {state for state, _ in TABLE} == set(JobState) - ENDED
    assert ENDED.isdisjoint(WITH_DEVICES) and ENDED | WITH_DEVICES | {JobState.PENDING} == set(JobState)


def test_from_every_living_state_a_job_can_end() -> None:
    ends = set(ENDED)
    while more := {state for (state, _), target in TABLE.items() if target in ends} - ends:
        ends |= more
    assert ends == set(JobState)


@pytest.mark.parametrize("state", sorted(ENDED))
@pytest.mark.parametrize("verb", list(Verb))
def test_nothing_happens_to_what_has_ended(state: JobState, verb: Verb) -> None:
    with pytest.raises(QueueError, match="it has ended"):
        next_state(state, verb)


def test_an_impossible_step_says_what_is_possible() -> None:
    with pytest.raises(
        QueueError, match="a job that is PENDING can't yield; what can happen to it: cancel, fail, place"
    ):
        next_state(JobState.PENDING, Verb.YIELD)
