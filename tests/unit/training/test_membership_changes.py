"""A change that comes before the rank has its end of the channel to hand."""

from __future__ import annotations

import socket
from typing import Any

from evenload.training.elastic.changes import MembershipChanges
from evenload.training.launch.membership_messages import MembershipChange, MessageChannel, to_line


def test_a_change_that_came_first_is_prepared_for() -> None:
    ours, theirs = socket.socketpair()
    change = MembershipChange(1, ("w0", "w1"), ("w1",), (), (), "127.0.0.1:1", urgent=False)
    ours.sendall(to_line(change).encode())
    prepared: list[Any] = []
    changes = MembershipChanges(
        MessageChannel(theirs, blocking=True), "w0", lambda *_: None, lambda *found: prepared.append(found)
    )
    assert changes.wait(0, 10.0) == change and prepared == [(change, changes)]
    changes.close()
    ours.close()
