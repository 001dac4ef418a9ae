"""Two machines for each test; where they can't be made the tests are skipped with the reason."""

import pytest

from evenload.testing import hosts


@pytest.fixture(scope="session")
def can_make_machines():
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def boxes(can_make_machines):
    with hosts.machines(2) as made:
        yield made


@pytest.fixture
def three_boxes(can_make_machines):
    with hosts.machines(3) as made:
        yield made
