"""The ledger of strategy async, without processes: the bound in any order of events, each part once, lost workers, `break`."""

from __future__ import annotations

import random

import pytest

from evenload.training.parallel.asynchronous.ledger import PartJob, PartLedger, ends_sooner_without


def simulate(staleness: int, num_workers: int, num_parts: int, seed: int, *, deaths: int = 0) -> tuple[list[int], int]:
    """Play workers with random speeds; return the applied parts in order, and the largest staleness."""
    draw = random.Random(seed)
    ledger = PartLedger(range(num_parts), staleness)
    free, computing = list(range(num_workers)), dict[int, PartJob]()
    applied: list[int] = []
    worst = 0
    while not ledger.is_done:
        events = ["apply", "take", "arrive", *(["die"] if deaths and len(free) + len(computing) > 1 else [])]
        event = draw.choices(events, [3, 3, 2, 0.05][: len(events)])[0]
        if event == "take" and free:
            worker = draw.choice(free)
            job = ledger.hand_out(worker, reserve=draw.random() < 0.5)
            if job is not None:
                free.remove(worker)
                computing[worker] = job
        elif event == "arrive" and computing:
            worker = draw.choices(list(computing), [1.0 / (1 + 4 * other) for other in computing])[0]
            assert ledger.arrive(computing.pop(worker).number)
            free.append(worker)
        elif event == "die" and computing:
            worker, job = computing.popitem()
            deaths -= 1
            assert ledger.lose(worker) == [job.part] and not ledger.arrive(job.number)
        elif event == "apply":
            # A state in which nothing can ever happen again would be a deadlock.
            assert free or computing
            before = ledger.updates
            if (job := ledger.next_update()) is not None:
                assert ledger.updates == before + 1
                worst = max(worst, before - job.version)
                applied.append(job.part)
    return applied, worst


@pytest.mark.parametrize("staleness", [1, 2, 4, 7])
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_the_bound_holds_and_each_part_is_applied_once(staleness: int, num_workers: int) -> None:
    for seed in range(8):
        applied, worst = simulate(staleness, num_workers, 60, seed, deaths=num_workers - 1)
        assert sorted(applied) == list(range(60)) and worst <= staleness


def test_a_stalled_worker_stops_nobody_for_twice_the_bound() -> None:
    ledger = PartLedger(range(100), 4)
    stalled = ledger.hand_out(1)
    assert stalled is not None
    count = 0
    while (job := ledger.hand_out(2)) is not None:
        count += ledger.arrive(job.number)
        ledger.next_update()
    assert count == 8 and ledger.updates == 4  # four applied, four computed and waiting
    ledger.arrive(stalled.number)
    first = ledger.next_update()
    assert first == stalled  # its deadline has come: the others, which arrived before it, can wait
    assert [ledger.next_update() is not None for _ in range(5)] == [True] * 4 + [False]


def test_a_reserved_part_goes_to_a_free_worker_at_the_end() -> None:
    ledger = PartLedger(range(3), 4)
    slow, fast = ledger.hand_out(1, reserve=True), ledger.hand_out(2)
    assert slow is not None and fast is not None
    assert (slow.part, ledger.reserved_for(1), fast.part) == (0, 1, 2)
    last = ledger.hand_out(2)
    assert last is not None and last.part == 1 and ledger.reserved_for(1) is None


def test_a_loop_that_is_left_hands_out_nothing_more() -> None:
    ledger = PartLedger(range(5), 4)
    job = ledger.hand_out(1)
    ledger.stop()
    assert job is not None and ledger.hand_out(2) is None and not ledger.is_done
    ledger.arrive(job.number)
    assert ledger.next_update() == job and ledger.is_done


def test_a_slow_worker_takes_no_part_that_would_end_after_all_others() -> None:
    assert ends_sooner_without(4.0, [1.0], 3)
    assert not ends_sooner_without(4.0, [1.0], 4)
    assert not ends_sooner_without(1.0, [4.0], 1)
    assert not ends_sooner_without(1.0, [], 1)
    # Of workers that are about equally fast none waits, also where few parts are left.
    assert not ends_sooner_without(1.1, [1.0, 1.0, 1.0], 1)


def test_a_part_that_is_kept_for_a_worker_goes_to_others() -> None:
    ledger = PartLedger(range(3), 4)
    ledger.hand_out(1, reserve=True)
    assert (ledger.num_left, ledger.reserved_for(1)) == (2, 1)
    ledger.give_back(1)
    job = ledger.hand_out(2)
    assert job is not None and job.part == 1
    assert ledger.num_left == 1
