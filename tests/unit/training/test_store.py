"""The connection to the store of a machine that is gone is given up when the next change of the members has come."""

import socket
import time

import pytest

from evenload.errors import PeerLostError
from evenload.training.comm.generation import Membership
from evenload.training.comm.store import WaitLimits, connect


def test_a_store_that_is_gone_is_given_up_for_the_next_change():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    def check():
        raise PeerLostError("the coordinator is lost")

    began_s = time.monotonic()
    with pytest.raises(PeerLostError, match="the coordinator is lost"):
        connect(Membership(1, ("worker-0", "worker-1"), f"127.0.0.1:{port}"), 0, WaitLimits(600.0), check)
    assert time.monotonic() - began_s < 10
