"""Writers of a queue that are killed with -9, again and again; what they left is looked at each time.

``python -m tests.system.scheduler.store_crash FOLDER NUM_KILLS`` prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from evenload.scheduler.store import writer
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import DATABASE, QueueStore
from tests.unit.scheduler.store_history import Happenings


def kills_at_random(folder: Path, num_kills: int) -> dict[str, int]:
    """A writer says which event it has committed; it is killed, and all that it said must be there."""
    rng = random.Random(5)
    found = {"kills": 0, "events": 0}
    for seed in range(num_kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _write_for_ever(folder, seed, writing)
        os.close(writing)
        said = os.read(reading, 8)  # it has begun
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        while more := os.read(reading, 65536):
            said += more
        os.close(reading)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
        last = int.from_bytes(said[len(said) // 8 * 8 - 8 :][:8])
        wrong = audit(folder)
        assert not wrong, wrong
        with Reader(folder) as reader:
            there = sum(1 for _ in reader.log())
        assert there >= last, f"event {last} was committed, {there} are there"
        found["kills"] += 1
        found["events"] = there
    with QueueStore(folder, holder="the last"):
        pass
    return found


def _write_for_ever(folder: Path, seed: int, writing: int) -> None:
    try:
        rng = random.Random(seed)
        with QueueStore(folder, holder=f"writer {seed}") as store:
            happenings = Happenings(store, seed)
            while True:
                happenings.happen(rng.randint(1, 8))
                store.commit()
                os.write(writing, store.last.to_bytes(8))
    finally:
        os._exit(1)  # never back into the parent's code


def kills_at_each_statement(folder: Path) -> dict[str, int]:
    """One commit, killed before its first statement, its second, … until it comes through."""
    with QueueStore(folder, holder="the first") as store:
        Happenings(store, 1).happen(60)
        store.commit()
        before = store.last
    number = 0
    while True:
        number += 1
        copy = folder.with_name(f"{folder.name}-{number}")
        shutil.copytree(folder, copy)

        def batch(copy: Path = copy, number: int = number) -> None:
            store = QueueStore(copy, holder="the killed")
            Happenings(store, 2).happen(12)
            assert store._connection is not None
            store._connection.set_trace_callback(_Bomb(number))
            store.commit()
            assert store.last == before + 12

        was_killed = _in_a_child(batch)
        assert audit(copy) == []
        with QueueStore(copy, holder="the next") as store:
            assert store.last == (before if was_killed else before + 12)
        if not was_killed:
            return {"statements": number - 1}


def kills_at_each_statement_of_the_first_opening(folder: Path) -> dict[str, int]:
    """The making of the tables, killed at each statement; the next one makes them."""
    number = 0
    while True:
        number += 1
        home = folder / f"new-{number}"

        def make(home: Path = home, number: int = number) -> None:
            opened = writer._opened

            def armed(path: Path) -> object:
                connection = opened(path)
                connection.set_trace_callback(_Bomb(number))
                return connection

            writer._opened = armed  # type: ignore[assignment]
            QueueStore(home, holder="the killed").close()

        was_killed = _in_a_child(make)
        with QueueStore(home, holder="the next") as store:
            Happenings(store, 3).happen(5)
            store.commit()
        assert audit(home) == []
        assert (home / DATABASE).stat().st_mode & 0o777 == 0o600
        if not was_killed:
            return {"statements": number - 1}


class _Bomb:
    """Kills the process before its nth statement."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, statement: str) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _in_a_child(work: Callable[[], None]) -> bool:
    """Whether the child that did the work was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(
        json.dumps(
            {
                "random": kills_at_random(where / "random", int(sys.argv[2])),
                "commit": kills_at_each_statement(where / "commit"),
                "opening": kills_at_each_statement_of_the_first_opening(where / "opening"),
            }
        )
    )
