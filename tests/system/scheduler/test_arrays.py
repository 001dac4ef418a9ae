"""Arrays of a thousand jobs with a long environment: submitted in one message, cancelled while some run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from evenload.errors import QueueError
from evenload.scheduler.backends.local import LocalBackend
from evenload.scheduler.core.values import After
from evenload.scheduler.job_file import INDEX_VARIABLE, JobFile
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.schema import DATABASE
from tests.system.scheduler.daemons import box


def test_a_large_array_with_a_long_environment(tmp_path: Path) -> None:
    with box() as queue:
        queue.settings("[cpu]\nslots = 2\n")
        queue.start()
        queue.client().close()
        variables = {f"LONG_{number}": "x" * 2000 for number in range(20)}
        job = JobFile(
            command=("sleep", "100{index}"),
            name="sweep",
            array=tuple(range(1000)),
            environment=variables,
            folder=str(tmp_path),
        )
        backend = LocalBackend(queue.folder)
        request = backend.build_request(job)
        ids = backend.submit(request)
        assert len(ids) == 1000 and len(request.text) < 1e6
        program = queue.call("job", job=ids[-1])["program"]
        assert program["command"] == ["sleep", "100999"]
        assert program["environment"] == {**variables, INDEX_VARIABLE: "999"}
        assert json.loads(request.text)["common"]["program"]["environment"] == variables
        queue.wait_for(ids[0], "RUNNING")
        began_s = time.monotonic()
        queue.call("cancel", jobs=list(ids))
        for name in (*ids[:2], ids[-1]):
            queue.wait_for(name, "CANCELLED")
        assert time.monotonic() - began_s < 15
        queue.stop()
        assert (queue.folder / DATABASE).stat().st_size < 20e6 and audit(queue.folder) == []


def test_an_array_after_an_array(tmp_path: Path) -> None:
    """A small one follows each end; of a large one, each end would change a thousand jobs that wait for a thousand."""
    with box() as queue:
        queue.settings("[cpu]\nslots = 2\n")
        queue.start()
        queue.client().close()
        backend = LocalBackend(queue.folder)

        def submit(num: int, after: tuple[str, ...] = (), on: str = "ok") -> tuple[str, ...]:
            afters = tuple(After(name, on) for name in after)
            job = JobFile(command=("true",), array=tuple(range(num)), after=afters, folder=str(tmp_path))
            return backend.submit(backend.build_request(job))

        first = submit(3)
        second = submit(3, first)
        for name in (*first, *second):
            queue.wait_for(name, "SUCCEEDED")
        (held,) = submit(1)
        queue.wait_for(held, "SUCCEEDED")
        blocks = queue.submit("sleep", "1000", spec={"needs": {"min_devices": 2, "max_devices": 2}})
        queue.wait_for(blocks, "RUNNING")
        sweep = submit(300)
        with pytest.raises(QueueError, match="submit one job between them"):
            submit(300, sweep)
        (between,) = submit(1, sweep)
        assert len(submit(300, (between,))) == 300
        queue.call("cancel", jobs=list(sweep))
        assert len(submit(300, sweep, "any")) == 300, "nothing is left to follow"
        queue.call("cancel", jobs=[blocks], now=True)
