"""kill -9 of daemon, runners, both, and a machine that starts anew (`daemon_crash` tells how; the benchmark has 300)."""

from __future__ import annotations

import pytest

from tests.system.scheduler.daemon_crash import run

NUM_KILLS = 14


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_job_is_lost_and_none_runs_twice() -> None:
    found = run(NUM_KILLS, seed=3, with_disks_and_clocks=False)
    assert sum(found["kills"].values()) == NUM_KILLS and found["kills"]["reboot"] >= 1
    assert found["lost"] == []
    assert 0 <= found["unconfirmed"]["jobs"] <= found["unconfirmed"]["submits"]
    assert found["run_twice"] == []
    assert found["two_at_once"] == []
    assert found["not_adopted"] == []
    assert found["lost_without_a_kill"] == []
    assert found["record"] == []
    assert found["left_behind"] == []
    assert found["adopted"] >= 1
