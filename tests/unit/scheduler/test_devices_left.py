"""`DevicesLeft` counts what an assignment of devices to jobs leaves, by few unions of pools."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from evenload.scheduler.core.eligibility import PoolChoices
from evenload.scheduler.policies.devices_left import DevicesLeft
from tests.unit.scheduler.queue import Queue, box


@given(st.data())
def test_devices_left_are_those_that_an_assignment_to_jobs_leaves(data: st.DataObject) -> None:
    """Jobs take what is left, or keep what they hold; an exhaustive search finds as much and no more."""
    kinds = ("a", "b", "c")
    counts = {kind: data.draw(st.integers(0, 2)) for kind in kinds}
    queue = Queue([device for kind, num in counts.items() for device in box(num, kind=kind)])
    jobs = []
    for _ in range(data.draw(st.integers(1, 4))):
        usable = data.draw(st.sets(st.sampled_from(kinds)))
        jobs.append(queue.submit(1, kinds=tuple(sorted(usable)), name=f"j{queue.num}"))
    snapshot = queue.queue_state.snapshot()
    left = DevicesLeft(snapshot.layout, PoolChoices(snapshot, 0.0), range(sum(counts.values())))
    given_: list[tuple[str, ...]] = []
    still = dict(counts)
    for name in jobs:
        job = queue.queue_state.jobs[name]
        usable_kinds = job.spec.needs.kinds or kinds
        most = next(n for n in range(7) if not _fits([*given_, *[usable_kinds] * (n + 1)], still))
        assert left.most(job) == most
        num = data.draw(st.integers(0, most))
        kind = data.draw(st.sampled_from(kinds))
        if data.draw(st.booleans()) and num and still[kind] >= num:
            first = counts[kind] - still[kind]
            kept = replace(job, devices=tuple(f"{kind}0.{n}" for n in range(first, first + num)))
            fits = _fits(given_, {**still, kind: still[kind] - num})
            assert left.keep(kept, num) == fits
            still[kind] -= num if fits else 0
        else:
            left.take(job, num)
            given_ += [usable_kinds] * num


def test_few_unions_are_counted_and_most_questions_do_not_count_them() -> None:
    """100 sets of 12 kinds, whose unions are more than a thousand; nothing is refused that there is."""
    kinds = [f"k{number:02}" for number in range(12)]
    queue = Queue([device for kind in kinds for device in box(50, kind=kind)])
    rng = random.Random(0)
    names = [queue.submit(1, kinds=tuple(sorted(rng.sample(kinds, rng.randint(1, 4))))) for _ in range(100)]
    snapshot = queue.queue_state.snapshot()
    left = DevicesLeft(snapshot.layout, PoolChoices(snapshot, 0.0), range(600))
    jobs = [queue.queue_state.jobs[name] for name in names]
    with patch.object(left, "_update", wraps=left._update) as updates:
        for number in range(300):
            job = jobs[number % 100]
            kind = (job.spec.needs.kinds or (kinds[0],))[0]
            if number % 2:
                assert left.keep(replace(job, devices=(f"{kind}0.{number // 100}",)), 1)
            else:
                assert left.has(job, 1)
                left.take(job, 1)
    assert left.num_left == 300 and updates.call_count <= 60
    assert len(left._left) <= 128


def _fits(needs: list[tuple[str, ...]], left: dict[str, int]) -> bool:
    if not needs:
        return True
    return any(left[kind] and _fits(needs[1:], {**left, kind: left[kind] - 1}) for kind in needs[0])
