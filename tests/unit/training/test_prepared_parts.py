"""Parts that ranks share are kept by no failed preparation, and begun whatever the order in which threads prepare it."""

from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from evenload.errors import PeerLostError
from evenload.training.comm import prepared
from evenload.training.comm.generation import Membership
from evenload.training.comm.host_exchange import find_hosts
from evenload.training.comm.shared_sums import share_sums
from evenload.training.comm.store import WaitLimits


def num_segments():
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:evenload" in str(link.readlink()) for link in links)


def test_memory_is_given_back_if_a_member_is_lost_before_it_is_shared():
    found = find_hosts(lambda own: torch.stack([own, own]))

    def lost(own):
        raise PeerLostError("the members change again")

    with pytest.raises(PeerLostError):
        share_sums(found, 0, (0, 1), lost, 1.0)
    assert num_segments() == 0


@pytest.fixture
def prepare(monkeypatch):
    """Prepares a membership of two; returns the object, the calls by which it prepares, and the closed parts."""
    store, closed, following = HashStore(), [], prepared.NextGeneration()
    monkeypatch.setattr(prepared, "connect", lambda *_: store)
    monkeypatch.setattr(prepared, "_close", lambda parts: (closed.extend(parts.values()), parts.clear()))

    def run(number, error=None):
        def make(parts, *_):
            parts["part"] = number
            if error is not None:
                raise error

        monkeypatch.setattr(prepared, "_make", make)
        membership = Membership(number, ("w0", "w1"), "")
        following.prepare(membership, 0, ("", ""), WaitLimits(1.0), lambda: False)

    def is_done(number):
        return prepared._keys(store, number).check(["done/0"])

    return following, run, is_done, closed


def test_what_ends_after_its_generation_began_is_left(prepare):
    following, run, is_done, closed = prepare
    with following.begun(7):
        run(6)
        run(7)
    assert closed == [6, 7] and not is_done(6) and not is_done(7)


def test_threads_may_prepare_in_any_order(prepare):
    following, run, is_done, closed = prepare
    for number in (8, 7, 9):
        run(number)
    with following.begun(8):
        assert is_done(8) and following.get("part") == 8 and closed == [7]
    with following.begun(9):
        assert following.get("part") == 9
    run(10)
    following.close()
    run(11)
    assert closed == [7, 10, 11]


def test_an_unexpected_error_leaves_nothing(prepare):
    _, run, _, closed = prepare
    with pytest.raises(MemoryError):
        run(3, MemoryError())
    assert closed == [3]
