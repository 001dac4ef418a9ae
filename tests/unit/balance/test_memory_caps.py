"""Caps fall when memory runs out, and rise again on trial, at growing intervals."""

from __future__ import annotations

from evenload.balance.memory_caps import FIRST_TRIAL, RETRY_EVERY, MemoryCaps


def test_half_of_what_did_not_fit() -> None:
    memory = MemoryCaps((None, None))
    assert memory.lower((None, None), (24, None), 3) == (12, None)
    assert memory.lower((12, None), (12, 8), 3) == (6, 4)


def test_one_retry_in_so_many_steps() -> None:
    memory = MemoryCaps((None,))
    assert [memory.may_retry(step) for step in (0, 0, 5, RETRY_EVERY, RETRY_EVERY, 2 * RETRY_EVERY - 1)] == [
        *(True, False, False, True, False, False)
    ]


def test_a_trial_saves_one_micro_batch_and_no_more() -> None:
    memory = MemoryCaps((None, None))
    caps = memory.lower((None, None), (64, None), 10)
    caps = memory.lower(caps, (32, None), 10)  # 64 samples in K = 4 of 16
    assert caps == (16, None)
    assert memory.trial(caps, (64, 8), 10 + FIRST_TRIAL - 1) is None
    caps = memory.trial(caps, (64, 8), 10 + FIRST_TRIAL)
    assert caps == (22, None)  # K = 3
    assert memory.trial(caps, (64, 8), 10 + 2 * FIRST_TRIAL - 1) is None
    assert memory.trial(caps, (64, 8), 10 + 2 * FIRST_TRIAL) == (32, None)


def test_a_trial_that_fails_is_taken_back_and_the_next_comes_later() -> None:
    memory = MemoryCaps((None, None))
    low = memory.lower((None, None), (64, None), 0)
    assert low == (32, None)
    high = memory.trial(low, (64, 64), FIRST_TRIAL)
    assert high == (64, None)
    assert memory.lower(high, (64, None), FIRST_TRIAL + 2) == low
    again = FIRST_TRIAL + 2 + 4 * FIRST_TRIAL
    assert memory.trial(low, (64, 64), again - 1) is None
    assert memory.trial(low, (64, 64), again) == high
    assert memory.lower(high, (64, None), again + 1) == low
    assert memory.trial(low, (64, 64), again + 1 + 16 * FIRST_TRIAL - 1) is None


def test_a_rank_that_fails_below_its_former_cap_gets_half() -> None:
    memory = MemoryCaps((None, None))
    low = memory.lower((None, None), (64, None), 0)
    high = memory.trial(low, (64, 30), FIRST_TRIAL)
    assert high == (64, None)
    assert memory.lower(high, (None, 30), FIRST_TRIAL + 2) == (64, 15)  # the other rank ran out


def test_the_users_cap_is_not_exceeded() -> None:
    memory = MemoryCaps((16, 16))
    caps = memory.lower((16, 16), (16, None), 0)
    assert caps == (8, 16)
    assert memory.trial(caps, (16, 40), FIRST_TRIAL) is None  # the other rank needs K = 3 anyway
    assert memory.trial(caps, (32, 16), FIRST_TRIAL) == (11, 16)
    assert memory.trial((11, 16), (32, 16), 2 * FIRST_TRIAL) == (16, 16)
    assert memory.trial((16, 16), (32, 16), 3 * FIRST_TRIAL) is None


def test_nothing_is_tried_without_a_failure() -> None:
    assert MemoryCaps((None, 8)).trial((None, 8), (8, 16), 10_000) is None
