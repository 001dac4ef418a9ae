"""Requests for other devices of a run in progress: what a client receives."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from evenload.errors import ConfigError
from evenload.training.launch.run_control import RunControl, change_devices_of


def test_a_change_that_a_later_one_replaces_is_not_done(tmp_path: Path) -> None:
    control, received, ends = RunControl(tmp_path), [], {}
    control.announce(tmp_path, ["rank 0"])

    def request(devices: str) -> None:
        try:
            ends[devices] = list(change_devices_of(tmp_path, devices))
        except ConfigError as error:
            ends[devices] = str(error)

    def begin(devices: str) -> threading.Thread:
        thread = threading.Thread(target=request, args=(devices,))
        thread.start()
        until_s = time.monotonic() + 20
        while devices not in received and time.monotonic() < until_s:
            control.poll(lambda text: received.append(text) or [f"to {text}"], changes=True)
        return thread

    threads = [begin("cpu:3"), begin("cpu:2")]
    threads[0].join(20)
    assert ends == {"cpu:3": f"{tmp_path}: a later change replaced this one: -d cpu:2"}
    control.poll(lambda _: [], changes=False)
    threads[1].join(20)
    control.close()
    assert ends["cpu:2"] == ["to cpu:2"]
