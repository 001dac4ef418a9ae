"""Exchanges through shared memory between real processes: exact, woken at once, never hanging, and nothing left behind."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import evenload
from evenload.errors import DesyncError, PeerLostError
from evenload.testing import run_ranks
from evenload.training.comm import host_exchange
from evenload.training.comm.control import CAPACITY, Control, Operation
from evenload.training.comm.generation import CollectiveAbortedError, Membership
from evenload.training.comm.groups import Groups
from evenload.training.comm.host_exchange import (
    ROW_VALUES,
    Gather,
    HostExchange,
    find_hosts,
    share_rows,
    share_statistics,
)
from evenload.training.comm.shared_memory import (
    ChannelLayout,
    SegmentMember,
    SharedChannel,
    SharedSegment,
    start_ticks,
)
from evenload.training.launch.environment import detect

_SIZES = (1, 129, 4_097, 9_001)


def _gather_among(ranks: Sequence[int]) -> Gather:
    group = dist.new_group(list(ranks))

    def gather(own: torch.Tensor) -> torch.Tensor:
        everyone = own.new_empty(len(ranks), own.numel())
        dist.all_gather(list(everyone.unbind()), own, group=group)
        return everyone

    return gather


def _groups(timeout_s: float = 20) -> tuple[Groups, int]:
    spec = detect()
    return Groups(Membership(0, spec.workers, spec.store), spec.rank, backend="gloo", timeout_s=timeout_s), spec.rank


def _share(hosts: str) -> tuple[HostExchange | None, int]:
    """As `Groups` does it, on hosts of these names."""
    _, rank = _groups()
    gather = _gather_among(range(len(hosts)))
    return share_rows(find_hosts(gather, hosts[rank]), rank, gather, _gather_among, 20), rank


def _values(rank: int, index: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(1000 * index + rank))


def _many_rounds(num_ranks: int) -> list[bytes]:
    groups, rank = _groups()
    assert isinstance(groups.generation.statistics, SharedChannel)
    delays = random.Random(rank)
    sums = []
    for index in range(60):
        if delays.random() < 0.1:
            time.sleep(delays.random() * 5e-3)
        rows = groups.exchange_row([index + other / 7 + rank for other in range(ROW_VALUES)])
        assert [list(row) for row in rows] == [
            [index + other / 7 + peer for other in range(ROW_VALUES)] for peer in range(num_ranks)
        ]
        size, dtype = _SIZES[index % len(_SIZES)], (torch.float32, torch.float64)[index % 2]
        vectors = [_values(peer, index, size, dtype) for peer in range(num_ranks)]
        table = groups.gather_statistics(vectors[rank])
        total = vectors[rank].clone()
        groups.sum_statistics(total)
        assert torch.equal(table, torch.stack(vectors))  # a copy: the exchange after it doesn't change it
        expected = vectors[0].clone()
        for vector in vectors[1:]:
            expected += vector
        assert torch.equal(total, expected)
        sums.append(total.numpy().tobytes())
    return sums


def test_rows_and_statistics_are_exact_over_many_rounds_with_delays() -> None:
    zero, *others = run_ranks(_many_rounds, 3, 3)
    assert all(other == zero for other in others)


def _abort(by_thread: bool) -> tuple[str, float, float]:
    exchange, rank = _groups()
    assert exchange.generation.rows is not None
    if rank == 2:
        time.sleep(0.5)
        if not by_thread:
            exchange.abort("rank 2 ran out of memory")
        time.sleep(1)
        return "", 0.0, 0.0
    if by_thread and rank == 1:
        threading.Timer(0.5, exchange.abort, ("the step is done again",)).start()
    cpu_s = time.thread_time()
    with pytest.raises(PeerLostError) as caught:
        exchange.exchange_row([0.0] * ROW_VALUES)
    woken_s = time.monotonic()
    with pytest.raises(PeerLostError):
        exchange.exchange_row([0.0] * ROW_VALUES)
    return str(caught.value), woken_s, time.thread_time() - cpu_s


@pytest.mark.parametrize(
    ("by_thread", "reason"), [(False, "rank 2 ran out of memory"), (True, "the step is done again")]
)
def test_an_abort_wakes_every_waiter_and_waiting_takes_no_cpu(by_thread: bool, reason: str) -> None:
    zero, one, _ = run_ranks(_abort, 3, by_thread)
    assert zero[0] == one[0] == reason
    assert abs(zero[1] - one[1]) < 0.4
    assert max(zero[2], one[2]) < 0.1


def _pair(child: Callable[[SharedSegment], None]) -> tuple[SharedSegment, int]:
    """Fork a second member, which runs `child`; return the first member's segment and the other's process."""
    layouts = [ChannelLayout(2, 8 * ROW_VALUES)]
    reader, writer = os.pipe()
    own = SegmentMember(0, os.getpid(), start_ticks(os.getpid()))
    fd = SharedSegment.create([own, own], layouts)
    pid = os.fork()
    if pid == 0:
        members = [own, SegmentMember(1, os.getpid(), start_ticks(os.getpid()))]
        segment = SharedSegment(fd, members, 1, layouts)
        os.write(writer, b".")
        try:
            child(segment)
        finally:
            os._exit(0)
    os.read(reader, 1)
    return SharedSegment(fd, [own, SegmentMember(1, pid, start_ticks(pid))], 0, layouts), pid


def _exchange_once_and_sleep(segment: SharedSegment) -> None:
    segment.channel(0, 10).exchange_row([1.0])
    time.sleep(20)


def _exchange_once_and_close(segment: SharedSegment) -> None:
    segment.channel(0, 10).exchange_row([1.0])
    segment.close()
    time.sleep(3)


def _exchange_another_length(segment: SharedSegment) -> None:
    segment.channel(0, 10).exchange_row([1.0, 2.0])


def _dead_peer() -> tuple[str, float]:
    segment, pid = _pair(_exchange_once_and_sleep)
    channel = segment.channel(0, 10)
    assert channel.exchange_row([0.0]).tolist() == [[0.0], [1.0]]
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        channel.exchange_row([0.0])
    return str(caught.value), time.monotonic() - start


def test_a_killed_peer_is_named_within_a_second() -> None:
    ((message, waited_s),) = run_ranks(_dead_peer, 1)
    assert "of rank 1 has ended" in message
    assert 0.3 <= waited_s < 1.5


def _closed_peer() -> float:
    segment, _ = _pair(_exchange_once_and_close)
    channel = segment.channel(0, 10)
    time.sleep(0.3)
    # Its last row counts although it has left.
    assert channel.exchange_row([0.0]).tolist() == [[0.0], [1.0]]
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 has closed its groups"):
        channel.exchange_row([0.0])
    return time.monotonic() - start


def test_a_peer_that_has_left_is_not_waited_for() -> None:
    assert run_ranks(_closed_peer, 1)[0] < 1.0


def _late_peer() -> float:
    segment, pid = _pair(_exchange_once_and_sleep)
    channel = segment.channel(0, 0.5)
    channel.exchange_row([0.0])
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"timed out after 0\.5 s; rank 1 did not come"):
        channel.exchange_row([0.0])
    waited_s = time.monotonic() - start
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match="interrupted"):
        channel.exchange_row([0.0])
    return waited_s


def test_a_late_peer_ends_the_wait_at_the_limit() -> None:
    assert 0.5 <= run_ranks(_late_peer, 1)[0] < 1.5


def _unlike_lengths() -> None:
    segment, _ = _pair(_exchange_another_length)
    with pytest.raises(DesyncError, match="rank 0 exchanges 8 bytes and rank 1 16"):
        segment.channel(0, 10).exchange_row([0.0])


def test_unlike_lengths_are_an_error() -> None:
    run_ranks(_unlike_lengths, 1)


def _fork_workers() -> list[float]:
    exchange, rank = _groups()
    assert exchange.generation.rows is not None
    exchange.exchange_row([0.0] * ROW_VALUES)
    for how in ("exit", "close", "kill"):
        pid = os.fork()
        if pid == 0:
            if how == "close":
                exchange.abort("a worker ended")
                exchange.generation.rows.close()  # torch's groups can't be closed in a fork: their threads are not there
            elif how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        os.waitpid(pid, 0)
    time.sleep(0.3 * rank)
    return [row[0] for row in exchange.exchange_row([float(rank)] * ROW_VALUES)]


def test_workers_forked_later_do_not_end_the_exchange() -> None:
    assert run_ranks(_fork_workers, 2) == [[0.0, 1.0]] * 2


def _files() -> tuple[set[str], str]:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    exchange, _ = _groups()
    assert exchange.generation.rows is not None
    exchange.exchange_row([0.0] * ROW_VALUES)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:evenload" in line]
    return set(os.listdir("/dev/shm")) - before, maps[0]  # noqa: PTH208


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_the_memory_has_no_name_that_could_be_left_behind() -> None:
    for made, mapping in run_ranks(_files, 2):
        assert not {name for name in made if "evenload" in name}
        assert mapping.endswith("(deleted)")


def _over_hosts(hosts: str) -> list[list[float]]:
    exchange, rank = _share(hosts)
    assert exchange is not None
    for index in range(30):
        if (index + rank) % 17 == 0:
            time.sleep(2e-3)
        rows = exchange.exchange_row([float(100 * rank + index)] * ROW_VALUES)
        assert [list(row) for row in rows] == [[100.0 * peer + index] * ROW_VALUES for peer in range(len(hosts))]
    return [list(row[:1]) for row in rows]


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abaa"])
def test_one_rank_of_each_host_exchanges_the_rows_of_all(hosts: str) -> None:
    assert run_ranks(_over_hosts, 4, hosts) == [[[100.0 * peer + 29] for peer in range(4)]] * 4


def _lose_a_host() -> tuple[str, float]:
    exchange, rank = _share("aabb")
    assert exchange is not None
    exchange.exchange_row([0.0] * ROW_VALUES)
    if rank == 3:
        time.sleep(0.2)
        exchange.abort("rank 3 failed")
    start = time.monotonic()
    with pytest.raises((PeerLostError, RuntimeError)) as caught:
        exchange.exchange_row([0.0] * ROW_VALUES)
    if rank == 2:
        dist.destroy_process_group()  # as its process's end would
    return str(caught.value), time.monotonic() - start


def test_all_hosts_learn_that_one_failed() -> None:
    results = run_ranks(_lose_a_host, 4)
    assert all(waited_s < 5 for _, waited_s in results)
    assert "rank 3 failed" in results[2][0]
    assert "the exchange with the other hosts failed" in results[1][0]


def _unavailable(what: str) -> bool:
    _, rank = _groups()
    gather = _gather_among(range(3))
    gather(torch.zeros(1))
    if what == "no room" and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if what == "one cannot attach" and rank == 1:
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    found = find_hosts(gather, "abc"[rank] if what == "alone on each host" else "aab"[rank])
    rows = share_rows(found, rank, gather, _gather_among, 20)
    agreed, _ = share_statistics(found, rank, (0, 1), gather, 20)
    gather(torch.zeros(1))
    return rows is None and not agreed


@pytest.mark.parametrize("what", ["no room", "one cannot attach", "alone on each host"])
def test_all_ranks_agree_that_memory_cannot_be_shared(what: str) -> None:
    assert run_ranks(_unavailable, 3, what) == [True] * 3


def _interrupt_statistics() -> tuple[str, float, float]:
    groups, rank = _groups()
    start = time.monotonic()
    message = ""
    if rank == 2:
        time.sleep(0.3)
        groups.abort_statistics()
    else:
        with pytest.raises(CollectiveAbortedError) as caught:
            groups.gather_statistics(torch.zeros(3))
        message = str(caught.value)
    waited_s = time.monotonic() - start
    # Rows still travel; after the ranks have agreed, so do statistics.
    groups.exchange_row([0.0] * ROW_VALUES)
    groups.rebuild_statistics()
    total = torch.tensor([float(rank)])
    groups.sum_statistics(total)
    groups.set_computing((0, 2))
    if rank != 1:
        groups.sum_statistics(total)
    groups.close()
    return message, waited_s, float(total)


def test_a_rank_that_leaves_a_forward_wakes_the_others_and_statistics_begin_anew() -> None:
    zero, one, two = run_ranks(_interrupt_statistics, 3)
    assert "rank 2 has left the step" in zero[0]
    assert zero[0] == one[0]
    assert max(zero[1], one[1]) < 1.5
    assert [zero[2], one[2], two[2]] == [6.0, 3.0, 6.0]


def _late_rank() -> str:
    groups, rank = _groups(timeout_s=1)
    control = Control(groups)
    control.exchange(Operation.INIT)
    if rank == 1:
        time.sleep(2)
        return ""
    with pytest.raises(PeerLostError) as caught:
        control.exchange(Operation.BACKWARD)
    return str(caught.value)


def test_a_rank_that_does_not_arrive_is_told_from_one_that_is_gone() -> None:
    message = run_ranks(_late_rank, 2)[0]
    assert "rank 0 is in step.backward and waited 1 s for another rank, which is alive but did not arrive" in message


def _agree() -> list[list[int]]:
    groups, rank = _groups()
    control = Control(groups)
    lists = [[2**52 + 1, -3], [2**62, -(2**62)], list(range(CAPACITY - 2)), list(range(200)), []]
    return [control.agree(values if rank == 0 else None) for values in lists]


def test_integers_of_any_size_and_number_arrive() -> None:
    zero, one = run_ranks(_agree, 2)
    assert zero == one == [[2**52 + 1, -3], [2**62, -(2**62)], list(range(CAPACITY - 2)), list(range(200)), []]


def _exchange_through_gloo(folder: str, able: bool) -> tuple[float, bool]:
    if not able and detect().rank == 1:
        host_exchange.why_unavailable = lambda: "as on another processor"
    run = evenload.init(project_dir=folder)
    shared = run._context.groups.generation.rows is not None
    total = run.reduce(float(run.rank + 1))
    run.close()
    return total, shared


@pytest.mark.parametrize("able", [True, False])
def test_a_run_says_that_its_ranks_can_not_share_memory(tmp_path: Path, able: bool) -> None:
    assert run_ranks(_exchange_through_gloo, 2, str(tmp_path), able) == [(3.0, able)] * 2
    (events,) = tmp_path.rglob("events.jsonl")
    said = "the system of rank 1 can't share memory" in events.read_text()
    assert said is not able
