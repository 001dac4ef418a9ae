"""Times that count from a submission or a change, beside times of day: what a change makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from evenload.errors import ConfigError
from evenload.scheduler.spec_rows import changed_spec
from tests.unit.scheduler.queue import spec

BEGIN, DEADLINE = "not_before_s", "deadline_s"


@pytest.mark.parametrize(
    ("changes", "delays"),
    [
        ({"priority": 1}, (BEGIN, DEADLINE)),
        ({BEGIN: 5.0}, (DEADLINE,)),
        ({BEGIN: 5.0, "delays": []}, (DEADLINE,)),
        ({BEGIN: 5.0, "delays": [BEGIN]}, (DEADLINE, BEGIN)),
        ({BEGIN: 5.0, DEADLINE: 6.0, "delays": [DEADLINE]}, (DEADLINE,)),
        ({"priority": 1, "delays": []}, (BEGIN, DEADLINE)),
    ],
)
def test_a_time_that_is_not_changed_stays_what_it_was(changes: dict[str, Any], delays: tuple[str, ...]) -> None:
    before = spec(not_before_s=1.0, deadline_s=2.0, delays=(BEGIN, DEADLINE))
    assert changed_spec(before, changes).delays == delays


@pytest.mark.parametrize("delays", [5, "deadline_s", [[BEGIN]], ["colour"], None])
def test_anything_else_is_named(delays: object) -> None:
    with pytest.raises(ConfigError, match=r"spec\.delays"):
        changed_spec(spec(), {BEGIN: 5.0, "delays": delays})
