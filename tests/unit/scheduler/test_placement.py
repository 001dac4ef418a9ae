"""Where gangs are put."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenload.scheduler.core import events
from evenload.scheduler.core.layout import layout_of
from evenload.scheduler.core.placement import FreeDevices, PoolChoice
from evenload.scheduler.core.values import Device
from tests.unit.scheduler.queue import GIB, Queue, box, spec


def hosts_of(queue: Queue, job: str) -> list[int]:
    counts: dict[str, int] = {}
    for device in queue.devices(job):
        host = queue.queue_state.devices[device].host
        counts[host] = counts.get(host, 0) + 1
    return sorted(counts.values())


def test_a_gang_goes_into_the_host_that_it_fills_best() -> None:
    queue = Queue([*box(4, 2), *box(8, 1, "gpu2")])
    queue.submit(3, name="three")
    queue.settle()
    queue.submit(1, name="one")
    queue.settle()
    assert {queue.queue_state.devices[d].host for j in ("three", "one") for d in queue.devices(j)} == {"gpu-host0"}


def test_small_jobs_leave_whole_hosts_whole() -> None:
    queue = Queue(box(4, 4))
    for _ in range(7):
        queue.submit(1)
    queue.settle()
    queue.submit(8, name="big")
    queue.settle()
    assert hosts_of(queue, "big") == [4, 4]


def test_a_gang_larger_than_a_host_takes_whole_hosts_and_packs_the_rest() -> None:
    queue = Queue(box(4, 4), policy="fifo")
    queue.submit(2, name="small")
    queue.settle()
    queue.submit(10, name="big")
    queue.settle()
    assert hosts_of(queue, "big") == [2, 4, 4]
    assert {queue.queue_state.devices[d].host for d in queue.devices("small")} < {
        queue.queue_state.devices[d].host for d in queue.devices("big")
    }


def test_spread_takes_the_emptiest_hosts() -> None:
    queue = Queue(box(4, 3), packing="spread")
    for _ in range(3):
        queue.submit(1)
    queue.settle()
    assert len({queue.queue_state.devices[queue.devices(j)[0]].host for j in queue.running}) == 3


def test_an_elastic_job_rather_takes_fewer_devices_than_some_of_a_further_host() -> None:
    queue = Queue(box(4, 4), policy="goodput", min_run_s=0.0)
    for host, held in enumerate((1, 2, 3, 4)):
        for device in range(held):
            queue.apply(events.DeviceClosed(0.0, f"gpu{host}.{device}", "taken"))
    queue.submit((1, 6), name="elastic", rates=tuple(range(1, 7)), total=1e6)
    queue.settle()
    assert hosts_of(queue, "elastic") == [2]  # of six free; three of one host are no power of two
    queue.submit((5, 6), name="needs five", rates=tuple(range(1, 7)), total=1e6)
    queue.apply(events.DeviceOpened(0.0, "gpu3.0"))
    queue.ended("elastic")
    queue.settle()
    assert len(queue.devices("needs five")) == 5  # what it needs at least it takes wherever it is


def test_kinds_memory_one_host_and_one_kind_are_kept() -> None:
    devices = [*box(2, 1, "slow", memory_bytes=8 * GIB), *box(4, 1, "fast", memory_bytes=24 * GIB, speed=2.0)]
    queue = Queue(devices)
    queue.submit(spec(2, memory_bytes=16 * GIB), name="large")
    queue.submit(spec(1, kinds=("slow",)), name="slow")
    queue.submit(spec(3, one_kind=True), name="one kind")
    queue.submit(spec(3), name="mixed")
    queue.settle()
    assert {d[:4] for d in queue.devices("large")} == {"fast"}
    assert queue.devices("slow")[0].startswith("slow")
    assert queue.state("one kind") == "PENDING"
    assert {d[:4] for d in queue.devices("mixed")} == {"fast", "slow"}


def test_the_fast_kind_is_taken_first() -> None:
    queue = Queue([*box(2, 1, "slow", speed=1.0), *box(2, 1, "fast", speed=1.5)])
    job = queue.submit(1)
    queue.settle()
    assert queue.devices(job)[0].startswith("fast")


def test_a_gang_over_hosts_takes_the_fast_one_whole_whatever_their_order() -> None:
    slow, fast = box(4, 1, "slow", speed=0.5), box(4, 1, "fast")
    for devices in ([*slow, *fast], [*fast, *slow]):
        queue = Queue(devices)
        job = queue.submit(6)
        queue.settle()
        assert sorted(device[:4] for device in queue.devices(job)) == ["fast"] * 4 + ["slow"] * 2


def test_least_memory_that_suffices_is_taken_where_speeds_are_equal() -> None:
    queue = Queue([*box(1, 1, "big", memory_bytes=80 * GIB), *box(1, 1, "small", memory_bytes=24 * GIB)])
    job = queue.submit(spec(1, memory_bytes=10 * GIB))
    queue.settle()
    assert queue.devices(job)[0].startswith("small")


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    moves=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), max_size=20),
    spread=st.booleans(),
)
def test_a_fleet_counts_right_and_finds_a_place_exactly_where_there_is_one(
    sizes: list[int], moves: list[tuple[int, bool, bool]], spread: bool
) -> None:
    devices = [Device(f"{h}.{d}", f"h{h}", kind="ab"[h % 2]) for h, size in enumerate(sizes) for d in range(size)]
    layout = layout_of(devices)
    fleet = FreeDevices(layout, range(len(devices)), layout.pool_of, "spread" if spread else "pack")
    free = set(range(len(devices)))
    held: list[tuple[int, ...]] = []
    groups = tuple((pool,) for pool in range(len(layout.pools)))
    for num, one_host, one_kind in moves:
        choice = PoolChoice(groups, one_host, one_kind)
        sets: dict[tuple[int, int], int] = {}
        for slot in free:
            key = (layout.host_of[slot] if one_host else -1, layout.pool_of[slot] if one_kind else -1)
            sets[key] = sets.get(key, 0) + 1
        most = max(sets.values(), default=0)
        place = fleet.place(choice, num)
        assert (place is not None) == (num <= most)
        if place is not None:
            assert len(set(place)) == num and free.issuperset(place)
            assert not one_host or len({layout.host_of[s] for s in place}) == 1
            assert not one_kind or len({layout.pool_of[s] for s in place}) == 1
            free -= set(place)
            held.append(place)
        elif held:
            back = held.pop(0)
            fleet.give(back)
            free |= set(back)
        assert fleet.free() == sorted(free) and fleet.num_free == len(free)


def test_of_equally_free_hosts_the_lowest_is_taken_whatever_was_given_back_before() -> None:
    layout = layout_of(box(4, 3))
    fleet = FreeDevices(layout, range(12), layout.pool_of, "pack")
    choice = PoolChoice(((0,),))
    first, second = fleet.place(choice, 4), fleet.place(choice, 4)
    assert (first, second) == ((0, 1, 2, 3), (4, 5, 6, 7))
    fleet.give(second)
    fleet.give(first)
    assert fleet.place(choice, 2) == (0, 1)
    assert fleet.find(choice, 4) == (4, 5, 6, 7) == fleet.find(choice, 4)  # a search takes nothing


def test_devices_that_are_coming_serve_those_alone_that_may_wait_for_them() -> None:
    layout = layout_of(box(4, 2))
    fleet = FreeDevices(layout, (0, 5), layout.pool_of, "pack", coming=(6, 7))
    choice = PoolChoice(((0,),))
    assert (fleet.num_free, fleet.num_coming, fleet.largest(choice), fleet.largest(choice, soon=True)) == (2, 2, 2, 4)
    assert fleet.place(choice, 3) is None
    assert fleet.place(choice, 3, soon=True) == (5, 6, 7)  # of one host, the free one first
    assert (fleet.num_free, fleet.num_coming, fleet.free(soon=True)) == (1, 0, [0])
    fleet.give((6,), soon=True)
    fleet.give((5,))
    assert fleet.free() == [0, 5] and fleet.free(soon=True) == [0, 5, 6]
