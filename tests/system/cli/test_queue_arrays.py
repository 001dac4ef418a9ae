"""Commands on an array of a thousand jobs take a few requests, not thousands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evenload.scheduler.client import Client
from tests.system.cli.queue_box import box_in


def test_an_array_is_held_released_and_cancelled_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While some of it run; a second request has nothing to do."""
    verbs: Counter[str] = Counter()
    call = Client.call

    def counted(client: Client, verb: str, **fields: Any) -> dict[str, Any]:
        verbs[verb] += 1
        return call(client, verb, **fields)

    with box_in(tmp_path) as box:
        monkeypatch.setattr(Client, "call", counted)
        long = [word for number in range(20) for word in ("--env", f"LONG_{number}={'x' * 500}")]
        first = int(box.submit("--name", "sweep", "--array", "0-999", *long, "--", "sleep", "1000"))
        for name in (first, first + 1):
            box.wait(str(name), "RUNNING")
        verbs.clear()
        held = box.run("change", "sweep", "--hold")
        assert held.code == 0 and held.out.count(": held\n") == 998, held.err
        assert box.run("change", "sweep", "--release").out.count(": released\n") == 998
        assert verbs["hold"] == verbs["release"] == 1
        cancelled = box.run("cancel", "sweep")
        assert cancelled.code == 0, cancelled.err
        assert cancelled.out.count(": cancelled\n") == 998 and cancelled.out.count("asked to save") == 2
        assert verbs["cancel"] == 1 and verbs["list"] <= 9 and not verbs["job"], verbs
        for name in (first, first + 1, first + 999):
            box.wait(str(name), "CANCELLED")
        refused = box.run("cancel", "sweep")
        assert refused.code == 2 and "none of the 1000 jobs of sweep is waiting or starting or" in refused.err
