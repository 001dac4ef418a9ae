"""Requests for other devices of a run in progress: what a client receives."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.training.launch.run_control import RunControl, change_devices_of, members_of


def test_a_change_that_a_later_one_replaces_is_not_done(tmp_path: Path) -> None:
    control, received, ends = RunControl(tmp_path), [], {}
    control.announce(tmp_path, ["rank 0: cpu"])

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
            control.poll(lambda text: received.append(text) or ([f"to {text}"], ["cpu"]), changes=True)
        return thread

    threads = [begin("cpu:3"), begin("cpu:2")]
    threads[0].join(20)
    assert ends == {"cpu:3": f"{tmp_path}: a later change replaced this one: -d cpu:2"}
    control.poll(lambda _: ([], []), changes=False)
    threads[1].join(20)
    control.close()
    assert ends["cpu:2"] == ["to cpu:2"]


def test_two_requests_of_the_same_devices_end_together_and_devices_that_did_not_come_are_an_error(
    tmp_path: Path,
) -> None:
    control, ends = RunControl(tmp_path), []
    control.announce(tmp_path, ["rank 0: cuda:0", "rank 1: cpu"])
    for names, is_done in ((["cpu", "cuda:0"], True), (["cuda:0+cpu"], False), (["cuda:0", "cpu", "cpu"], False)):
        ends.clear()
        received: list[str] = []

        def request() -> None:
            try:
                ends.append(list(change_devices_of(tmp_path, "0,1,2")))
            except ConfigError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=request) for _ in range(2)]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + 20
        while len(received) < 2 and time.monotonic() < until_s:
            control.poll(lambda text: received.append(text) or ([f"to {text}"], names), changes=True)  # noqa: B023
        control.poll(lambda _: ([], []), changes=False)
        for thread in threads:
            thread.join(20)
        wrong = f"{tmp_path}: the run is on cuda:0, cpu instead of -d 0,1,2"
        assert ends == ([["to 0,1,2"]] if is_done else [wrong]) * 2
    control.close()


def test_between_two_starts_of_all_ranks_the_run_is_in_progress_and_a_change_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    control = RunControl(tmp_path)
    control.announce(run, ["rank 0: cpu"])
    control.close()
    (tmp_path / "control").unlink()
    assert members_of(run) == ["rank 0: cpu"]
    with pytest.raises(ConfigError, match="all ranks start again; change the devices once they train"):
        list(change_devices_of(run, "cpu"))
