"""The queue on disk: what is recorded is there again, who is stale is refused, one bad event spoils no other."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenload.errors import QueueError, StaleError
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import JobSpec, Settings
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.ledger import Fence, RunnerStarted
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import DATABASE, QueueStore
from tests.unit.scheduler.queue import box, spec
from tests.unit.scheduler.store_history import Happenings


@pytest.fixture
def store(tmp_path: Path) -> Iterator[QueueStore]:
    """A queue of three devices and three jobs."""
    with QueueStore(tmp_path / "queue", holder="a test") as opened:
        for device in box(3):
            opened.record(events.DeviceAdded(0.0, device))
        for number in range(3):
            opened.record(
                events.Submitted(1.0, f"j{number}", spec(name=f"job {number}")), extra={"command": ["a", number]}
            )
        opened.commit()
        yield opened


def start(store: QueueStore, job: str, device: str, time_s: float = 2.0) -> Fence:
    attempt = store.queue_state.jobs[job].attempt + 1
    store.record(events.Placed(time_s, job, (device,), attempt))
    store.record(events.JobStarted(time_s, job))
    store.commit()
    return store.fence(job)


def test_whatever_happens_the_tables_are_the_fold_of_the_log_and_open_again_as_they_were(tmp_path: Path) -> None:
    num_refused = 0
    for seed in range(4):
        folder = tmp_path / str(seed)
        for session in range(3):
            with QueueStore(folder, holder="a test") as store:
                happenings = Happenings(store, 10 * seed + session)
                for _ in range(12):
                    happenings.happen(10)
                    store.commit()
                num_refused += happenings.num_refused
                before = (
                    store.last,
                    store.queue_state.snapshot(),
                    store.queue_state.outcomes,
                    store.queue_state.holder,
                    store.attempts(),
                )
            assert audit(folder) == []
            with QueueStore(folder, holder="a test") as store:
                after = (
                    store.last,
                    store.queue_state.snapshot(),
                    store.queue_state.outcomes,
                    store.queue_state.holder,
                    store.attempts(),
                )
                assert after == before
    assert num_refused > 100  # the histories try what can't be, too


def test_the_audit_finds_what_does_not_hold_together(store: QueueStore) -> None:
    store.close()
    other = sqlite3.connect(store.folder / DATABASE)
    other.execute("UPDATE users SET num_devices = 1")
    other.execute("DELETE FROM jobs WHERE id = 'j1'")
    other.commit()
    found = "\n".join(audit(store.folder))
    assert "users, ann: " in found and "jobs ever, j1: " in found
    for statement in ("DELETE FROM events", "UPDATE events SET time_s = 0"):
        with pytest.raises(sqlite3.IntegrityError, match="the log only grows"):
            other.execute(statement)
    other.close()


def test_what_is_not_committed_is_seen_by_nobody_and_gone_afterwards(store: QueueStore) -> None:
    store.record(events.Submitted(5.0, "late", spec()))
    with Reader(store.folder) as reader:
        assert reader.job("late") is None
        store.commit()
        assert reader.job("late") == store.queue_state.jobs["late"]
        store.record(events.Cancelled(6.0, "late"))
    store.close()
    with QueueStore(store.folder, holder="the next") as again:
        assert again.queue_state.jobs["late"].state is JobState.PENDING
    with pytest.raises(QueueError, match="closed"):
        store.record(events.Cancelled(6.0, "late"))


def test_one_row_an_attempt(store: QueueStore) -> None:
    first = start(store, "j0", "gpu0.0")
    store.record(RunnerStarted(3.0, "j0", 1, {"pid": 7, "boot_id": "b"}), fence=first)
    store.record(events.ResizeRequested(4.0, "j0", ("gpu0.1",), "a better one"))
    store.record(events.Yielded(5.0, "j0"), fence=first)  # its next attempt begins with the same event
    with pytest.raises(QueueError, match="attempt 2 of job j0 isn't on disk yet: commit first"):
        store.fence("j0")
    store.commit()
    store.record(events.JobStarted(6.0, "j0"), fence=store.fence("j0"))
    store.record(events.Ended(9.0, "j0", True, "exit code 0"), fence=store.fence("j0"))
    store.commit()
    with Reader(store.folder) as reader:
        one, two = reader.attempts("j0")
        assert (one.fence, one.devices, one.began_s, one.ended_s, one.ending) == (
            first,
            ("gpu0.0",),
            2.0,
            5.0,
            "Yielded",
        )
        assert one.runner == {"pid": 7, "boot_id": "b"} and two.runner is None
        assert (two.fence.attempt, two.devices, two.ended_s, two.reason) == (2, ("gpu0.1",), 9.0, "exit code 0")
        assert two.fence.number > first.number
        job = reader.job("j0")
        assert job is not None and job.state is JobState.SUCCEEDED and reader.program("j0") == {"command": ["a", 0]}
        assert [told.entry for told in reader.log(job="j0")][-1] == events.Ended(9.0, "j0", True, "exit code 0")
    assert store.attempts() == () and audit(store.folder) == []


def test_a_runner_whose_attempt_is_over_is_refused(store: QueueStore) -> None:
    stale = start(store, "j0", "gpu0.0")
    store.record(events.Lost(3.0, "j0", "the host didn't answer"))
    with pytest.raises(StaleError, match=r"attempt 1 of job j0 .* is over: none is under way"):
        store.record(events.Ended(4.0, "j0", True), fence=stale)
    fresh = start(store, "j0", "gpu0.1", time_s=5.0)
    for entry in (events.Ended(6.0, "j0", True), RunnerStarted(6.0, "j0", 1, {}), events.Reported(6.0, "j0", 1.0)):
        with pytest.raises(StaleError, match=r"attempt 2 is under way. Its processes have to end"):
            store.record(entry, fence=stale)
    with pytest.raises(StaleError, match="speaks for job j1"):
        store.record(events.Cancelled(6.0, "j1"), fence=fresh)
    with pytest.raises(StaleError):  # right numbers of another queue
        store.check(Fence("j0", fresh.attempt, fresh.number + 1))
    store.check(fresh)
    store.record(events.Ended(6.0, "j0", True), fence=fresh)
    store.commit()
    assert audit(store.folder) == []


def test_a_writer_that_was_replaced_is_refused(store: QueueStore) -> None:
    (store.folder / "writer.lock").rename(store.folder / "lost.lock")  # as a lock that a file system doesn't keep
    with QueueStore(store.folder, holder="the new one") as new:
        store.record(events.Cancelled(2.0, "j0"))
        with pytest.raises(StaleError, match="another has taken over"):
            store.commit()
        new.record(events.Cancelled(2.0, "j1"))
        new.commit()
        assert list(new.queue_state.jobs) == ["j0", "j2"]
    assert audit(store.folder) == []


NAN = float("nan")


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (events.Submitted(2.0, "x", JobSpec("ann", name=b"bytes")), "name"),  # type: ignore[arg-type]
        (events.Submitted(2.0, "x", JobSpec("ann", name="\ud800")), "can't be stored"),
        (events.Submitted(2.0, "x", JobSpec("ann", priority=2**64)), "priority"),
        (events.Submitted(2.0, "x", JobSpec("ann", priority=True)), "priority"),
        (events.Submitted(2.0, 7, JobSpec("ann")), "job=7"),  # type: ignore[arg-type]
        (events.Submitted(2.0, "x", spec(kinds=(3,))), "kinds"),
        (events.Submitted(2.0, "x", spec(kinds=["a"])), "kinds"),
        (events.Submitted(NAN, "x", spec()), "time_s=nan"),
        (events.Submitted(float("inf"), "x", spec()), "time_s=inf"),
        (events.Submitted(2.0, "j0", spec()), "submitted twice"),
        (events.Reported(2.0, "j0", NAN), "done=nan"),
        (events.Placed(2.0, "j0", ("no such",), 1), "no device"),
        (RunnerStarted(2.0, "j0", 1, {}), "not under way"),
        (RunnerStarted(2.0, "j0", 1, {"pid": object()}), "can't be stored"),
    ],
)
def test_an_event_that_cannot_be_is_refused_and_those_beside_it_are_not(
    store: QueueStore, entry: Any, what: str
) -> None:
    store.record(events.Submitted(2.0, "before", spec()))
    with pytest.raises(QueueError, match=what):
        store.record(entry)
    store.record(events.Submitted(2.0, "after", spec()))
    store.commit()
    assert {"before", "after"} < store.queue_state.jobs.keys() and "x" not in store.queue_state.jobs
    assert audit(store.folder) == []


def test_a_program_that_json_cannot_write_is_refused(store: QueueStore) -> None:
    with pytest.raises(QueueError, match="what comes with the event Submitted can't be stored"):
        store.record(events.Submitted(2.0, "x", spec()), extra={"command": object()})
    assert "x" not in store.queue_state.jobs


def test_a_full_disk_undoes_the_batch_here_too_and_the_next_one_goes_through(store: QueueStore) -> None:
    connection = store._connection
    assert connection is not None
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")  # as a disk without room: SQLite says the same
    last = store.last
    for number in range(300):
        store.record(events.Submitted(2.0, f"big{number}", spec(name="n" * 500)))
    with pytest.raises(QueueError, match=r"can't be written: .*full; all since the last commit is undone"):
        store.commit()
    assert store.last == last and list(store.queue_state.jobs) == ["j0", "j1", "j2"]
    connection.execute("PRAGMA max_page_count = 1000000")
    store.record(events.Submitted(2.0, "small", spec()))
    store.commit()
    assert audit(store.folder) == []


def test_lists_are_by_state_by_user_and_by_page(store: QueueStore) -> None:
    for number in range(10):
        store.record(events.Submitted(2.0, f"b{number}", spec(user="bob", priority=number)))
    store.record(events.Cancelled(3.0, "b0"))
    store.commit()
    fence = start(store, "j1", "gpu0.2", time_s=4.0)
    with Reader(store.folder) as reader:
        assert [line.id for line in reader.jobs()] == ["j0", "j1", "j2", *(f"b{n}" for n in range(10))]
        (line,) = reader.jobs(states=[JobState.RUNNING, JobState.STARTING])
        assert (line.id, json.loads(line.devices), line.attempt, line.state) == (
            "j1",
            ["gpu0.2"],
            fence.attempt,
            "RUNNING",
        )
        assert [line.id for line in reader.jobs(user="bob", states=[JobState.PENDING], limit=2)] == ["b1", "b2"]
        newest = reader.jobs(user="bob", newest_first=True, limit=3)
        assert [line.id for line in newest] == ["b9", "b8", "b7"] and newest[0].priority == 9
        assert [one.id for one in reader.jobs(newest_first=True, limit=2, after=newest[-1].number)] == ["b6", "b5"]
        assert [one.id for one in reader.jobs(after=newest[-1].number)] == ["b8", "b9"]
        assert reader.counts() == {JobState.PENDING: 11, JobState.RUNNING: 1, JobState.CANCELLED: 1}
        assert reader.counts(user="bob")[JobState.PENDING] == 9
        assert reader.job("none") is None and reader.program("b1") is None and reader.attempts("b1") == []


def test_settings_with_an_infinity_come_back(store: QueueStore) -> None:
    chosen = Settings(policy="las", starve_after_s=float("inf"))
    store.record(events.SettingsSet(2.0, chosen))
    store.commit()
    store.close()
    with QueueStore(store.folder, holder="the next") as again:
        assert again.queue_state.settings == chosen
