"""A rank follows the change that answers a loss, also where it is about to leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from evenload.errors import PeerLostError
from evenload.training.elastic.members import Members
from evenload.training.launch.membership_messages import MembershipChange


def _change(number: int, workers: tuple[str, ...], left: tuple[str, ...] = ()) -> Any:
    return cast(MembershipChange, SimpleNamespace(number=number, workers=workers, left=left))


def _follow(*changes: Any) -> int:
    members = object.__new__(Members)
    members._context = cast(
        Any, SimpleNamespace(groups=SimpleNamespace(closed=False, limits=SimpleNamespace(setup_s=1)))
    )
    members._is_capable, members._tried, members._worker = True, 5, "a"

    def wait(after: int, limit_s: float) -> Any:
        return next((change for change in changes if change.number > after), None)

    members._changes = cast(Any, SimpleNamespace(wait=wait))
    members._switch = lambda change: change.number  # type: ignore[method-assign]
    return members._follow_changes(PeerLostError("a rank is lost"))


def test_a_rank_that_is_to_leave_goes_on_if_another_is_lost_in_its_last_step() -> None:
    leaves = _change(6, ("b", "c"), left=("a",))
    assert _follow(leaves, _change(7, ("a", "b"))) == 7
    with pytest.raises(PeerLostError, match="a rank is lost"):
        _follow(leaves)
