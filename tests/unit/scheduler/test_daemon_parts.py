"""The daemon's pure parts: what an end means, what is set, and what follows from what is seen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenload.cli import cancel as cancel_module
from evenload.errors import ConfigError
from evenload.job.processes import identity_of, is_alive
from evenload.job.protocol import ProgressReport
from evenload.scheduler.core import events
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.values import Device, JobSpec, Limits
from evenload.scheduler.daemon import daemon as daemon_module
from evenload.scheduler.daemon.attempts import Attempts
from evenload.scheduler.daemon.devices import HOST, LocalDevice, variables_for
from evenload.scheduler.daemon.endings import ending
from evenload.scheduler.daemon.external_processes import DeviceUse, GpuScan
from evenload.scheduler.daemon.log import DaemonLog
from evenload.scheduler.daemon.maintenance import device_events, external_process_events, file_events
from evenload.scheduler.daemon.queue_file import QueueFile, read_queue_file
from evenload.scheduler.paths import LOGS, SETTINGS_FILE, socket_address
from evenload.scheduler.runner import files
from evenload.scheduler.runner.__main__ import _write_result, is_killed
from evenload.scheduler.runner.files import RunnerResult
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore

GIB = 2**30


@pytest.mark.parametrize(
    ("code", "was_killed"), [(0, False), (3, False), (75, False), (None, False), (-9, True), (137, True)]
)
def test_only_the_end_of_a_killed_program_is_recorded_later(code: int | None, was_killed: bool) -> None:
    """Its whole tree may be being killed; any other end is written at once."""
    assert is_killed(RunnerResult(1, code)) == was_killed


def _report(state: str, step: int = 9) -> ProgressReport:
    return ProgressReport("1", 1, 7, step, 10, 1.0, 0.0, state, 0.0)


@pytest.mark.parametrize(
    ("result", "told", "kind", "reason"),
    [
        (RunnerResult(1, 0), None, "ok", ""),
        (RunnerResult(1, 3), None, "failed", "exit code 3"),
        (RunnerResult(1, -signal.SIGSEGV), None, "failed", "killed by SIGSEGV"),
        (RunnerResult(1, None, problem="no such file"), None, "failed", "no such file"),
        (RunnerResult(1, None, requested="stop", problem="the daemon was away"), None, "Yielded", "away"),
        (RunnerResult(1, 75, requested="stop"), _report("stopped"), "Yielded", ""),
        (RunnerResult(1, 75, requested="stop"), None, "Yielded", ""),
        (RunnerResult(1, 0, requested="stop"), _report("stopped"), "Yielded", ""),
        (RunnerResult(1, 0, requested="stop"), _report("finished", 10), "ok", ""),
        (RunnerResult(1, 0, requested="stop"), _report("running"), "Yielded", "without a report that it had finished"),
        (RunnerResult(1, 0, requested="stop"), None, "Yielded", "exit code 0"),
        (RunnerResult(1, -signal.SIGTERM, requested="stop"), _report("stopped"), "Yielded", ""),  # a shell around it
        (RunnerResult(1, -signal.SIGTERM, requested="stop"), None, "Yielded", "without saving"),
        (RunnerResult(1, 143, requested="stop"), None, "Yielded", "without saving"),
        (RunnerResult(1, -signal.SIGKILL, requested="stop", was_killed=True), _report("running"), "Yielded", "grace"),
        (RunnerResult(1, 1, requested="stop"), _report("running"), "failed", "requested to stop"),
        (RunnerResult(1, 75), _report("stopped"), "Yielded", "saved at step 9"),
        (RunnerResult(1, 75), _report("stopped", 4), "failed", "no progress"),
        (RunnerResult(1, 75), None, "failed", "no progress"),
    ],
)
def test_what_an_end_means(result: RunnerResult, told: ProgressReport | None, kind: str, reason: str) -> None:
    event = ending("1", 5.0, result, told, done_before=4.0)
    found = type(event).__name__
    if isinstance(event, events.Ended):
        found = "ok" if event.is_success else "failed"
    assert found == kind
    assert reason in event.reason  # type: ignore[union-attr]


def test_a_queue_file(tmp_path: Path) -> None:
    assert read_queue_file(tmp_path) == QueueFile()
    (tmp_path / SETTINGS_FILE).write_text(
        'shared = true\nadmins = ["root", 12]\nmax_priority = 2\n[settings]\npolicy = "fifo"\n[limits.ann]\nmax_devices = 1\n'
        '[cpu]\nslots = 3\n[[device]]\nmatch = "gpu0"\nuse = false\n[watch]\nevery_s = 1\n'
    )
    found = read_queue_file(tmp_path)
    assert found.admins == {0, 12} and found.limits == {"ann": Limits(max_devices=1)}
    assert (found.cpu_slots, found.look_every_s, found.devices[0].use) == (3, 1, False)


@pytest.mark.parametrize(
    "text",
    [
        "shared = 1",
        'admins = ["no-such-user-here"]',
        "max_priority = 1.5",
        "[settings]\npolicy = 'best'",
        "[limits.ann]\nmax_device = 1",
        "[cpu]\nslots = -1",
        "[[device]]\nspeed = 2",
        "[watch]\nevery_s = 0",
        "limits = 3",
        "x = ",
    ],
)
def test_a_queue_file_that_cannot_be(tmp_path: Path, text: str) -> None:
    (tmp_path / SETTINGS_FILE).write_text(text)
    with pytest.raises(ConfigError, match=SETTINGS_FILE):
        read_queue_file(tmp_path)


def _gpu(name: str) -> LocalDevice:
    return LocalDevice(Device(name, HOST, "h200", GIB), name)


def _slot(core: int) -> LocalDevice:
    return LocalDevice(Device(f"cpu:{core}", HOST, "cpu", GIB), f"cpu:{core}", (core,))


def _known(*found: LocalDevice) -> dict[str, LocalDevice]:
    return {one.device.id: one for one in found}


def test_devices_that_come_and_go() -> None:
    queue_state = QueueState()

    def follow(found: dict[str, LocalDevice]) -> list[str]:
        happened = device_events(queue_state, found, 1.0)
        for event in happened:
            queue_state.apply(event)
        return [type(event).__name__ for event in happened]

    assert follow(_known(_gpu("a"), _gpu("b"))) == ["DeviceAdded", "DeviceAdded"]
    assert follow(_known(_gpu("a"), _gpu("b"))) == []
    assert follow({}) == ["DeviceClosed", "DeviceClosed"]  # a driver that is away for a moment
    assert follow(_known(_gpu("a"))) == ["DeviceOpened", "DeviceRemoved"]
    assert follow(_known(_gpu("a"), _slot(0))) == ["DeviceAdded"]
    queue_state.apply(events.Submitted(1.0, "1", JobSpec("ann")))
    queue_state.apply(events.Placed(1.0, "1", ("cpu:0",), 1))
    assert follow(_known(_gpu("a"))) == ["DeviceClosed"]  # a job has it


def test_external_processes_close_and_open() -> None:
    queue_state, found, told_s = QueueState(), _known(_gpu("a")), dict[str, float]()
    for event in device_events(queue_state, found, 0.0):
        queue_state.apply(event)

    def see(held: DeviceUse, now_s: float) -> list[str]:
        happened = external_process_events(queue_state, found, GpuScan(now_s, {"a": held}), GIB, told_s, now_s)
        for event in happened:
            queue_state.apply(event)
        return [type(event).__name__ for event in happened]

    assert see(DeviceUse(), 1) == []
    assert see(DeviceUse(used_bytes=5 * GIB), 2) == ["DeviceClosed"]
    assert see(DeviceUse(used_bytes=6 * GIB), 3) == []  # the same, with another number
    assert see(DeviceUse(used_bytes=6 * GIB), 60) == ["DeviceClosed"]
    assert see(DeviceUse(problem="lost"), 61) == ["DeviceClosed"]
    assert see(DeviceUse(), 62) == ["DeviceOpened"]
    assert see(DeviceUse(), 63) == []


def test_settings_of_the_file_are_recorded_once() -> None:
    queue_state, settings = QueueState(), QueueFile(settings={"policy": "fifo"}, limits={"ann": Limits(max_devices=1)})
    for event in file_events(queue_state, settings, 1.0):
        queue_state.apply(event)
    assert queue_state.settings.policy == "fifo" and queue_state.users["ann"].limits.max_devices == 1
    assert file_events(queue_state, settings, 2.0) == []


def test_a_program_sees_its_devices_alone() -> None:
    assert variables_for([_gpu("GPU-1"), _gpu("GPU-2")]) == ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, ())
    assert variables_for([_slot(3), _slot(1)]) == ({"CUDA_VISIBLE_DEVICES": ""}, (1, 3))


def test_a_process_is_known_again() -> None:
    found = identity_of(os.getpid())
    assert found is not None and is_alive(found)
    assert not is_alive(type(found)(found.pid, found.start_ticks + 1, found.boot_id))
    assert not is_alive(type(found)(found.pid, found.start_ticks, "another boot"))
    assert identity_of(2**22 + 1) is None


def test_a_long_path_has_a_short_address(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    with socket_address(deep) as address:
        assert len(address) < 108


def test_addresses_of_listening_sockets_are_read() -> None:
    from evenload.scheduler.daemon.listening import _readable

    words = [int.from_bytes(part, sys.byteorder) for part in (b"\x7f\0\0\1", b"\0\0\0\0", b"\0\0\0\1")]
    assert _readable(f"{words[0]:08X}") == "127.0.0.1"
    assert _readable(f"{words[1]:08X}" * 3 + f"{words[2]:08X}") == "::1"


def test_a_decision_that_fails_does_not_end_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a policy whose numbers overflow: the queue answers, so that the setting can be set back."""
    daemon = object.__new__(daemon_module.Daemon)
    written: list[str] = []
    monkeypatch.setattr(daemon, "_state", SimpleNamespace(problems={}), raising=False)
    monkeypatch.setattr(daemon, "_log", SimpleNamespace(write=written.append), raising=False)

    def overflow(*_: object) -> tuple[()]:
        raise OverflowError("too large")

    monkeypatch.setattr(daemon_module, "decide", overflow)
    snapshot = QueueState().snapshot()
    assert [daemon._commands(snapshot, 0.0) for _ in range(3)] == [()] * 3
    assert len(written) == 1 and "Traceback" in written[0]
    assert daemon._state.problems == {
        "decide": "nothing is decided (OverflowError: too large); the daemon's log has more"
    }
    monkeypatch.setattr(daemon_module, "decide", lambda *_: ())
    assert daemon._commands(snapshot, 0.0) == () and not daemon._state.problems


def test_settings_that_break_while_the_daemon_starts_leave_it_its_devices(tmp_path: Path) -> None:
    """It reads them once to open the queue, and again in its first turn: the devices are those of the file that it could read."""
    (tmp_path / SETTINGS_FILE).write_text("[cpu]\nslots = 2\n")

    async def first_turn() -> tuple[int, dict[str, str]]:
        daemon = daemon_module.Daemon(tmp_path, DaemonLog())
        try:
            (tmp_path / SETTINGS_FILE).write_text("[cpu]\nslotz = 2\n")
            daemon._run_once()
            return len(daemon._state.devices), dict(daemon._state.problems)
        finally:
            daemon._close()

    num_devices, problems = asyncio.run(first_turn())
    assert num_devices == 2 and "slotz" in problems["settings"]


def test_a_new_job_has_no_number_of_which_there_is_an_output(tmp_path: Path) -> None:
    """A repaired queue may have lost the job whose output that is, and its runner may still run."""
    with QueueStore(tmp_path, holder="test") as store:
        store.record(events.Submitted(0.0, "7", JobSpec("ann")), extra={"command": ["true"]})
        store.commit()
    (tmp_path / LOGS).mkdir()
    with Reader(tmp_path) as reader:
        assert daemon_module._next_number(reader, tmp_path) == reader.jobs()[0].number + 1
        for name in ("41.log", "other.log"):
            (tmp_path / LOGS / name).touch()
        assert daemon_module._next_number(reader, tmp_path) == 42


@pytest.mark.timeout(20)
def test_a_runner_whose_queue_was_removed_ends(tmp_path: Path) -> None:
    """It waits for room on a full disk, but not for a folder that is gone."""
    _write_result(tmp_path / "gone", RunnerResult(1, 0))


def test_nothing_is_billed_of_an_attempt_whose_program_never_began() -> None:
    """Such as one whose runner waited for room on a full disk until its job was cancelled."""
    clock = SimpleNamespace(now_s=lambda: 500.0, at=lambda boot, since_boot_s: since_boot_s)
    attempts = SimpleNamespace(_state=SimpleNamespace(clock=clock))
    for code, ended_s in ((None, 100.0), (0, 400.0), (-9, 400.0)):
        result = RunnerResult(1, code, boot="boot", ended_since_boot_s=400.0)
        gone = SimpleNamespace(result=result, live=None, reason="")
        assert Attempts._ended_s(attempts, gone, 100.0) == ended_s  # type: ignore[arg-type]


def test_cancel_reads_the_reply_of_an_earlier_versions_daemon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = SimpleNamespace(call=lambda *_, **__: {"jobs": [{"id": "1", "state": "PREEMPTING"}]})

    def act_on_jobs(jobs: list[str], queue: Path | None, states: object, act: Callable[..., object]) -> None:
        print(*act(client, jobs))  # type: ignore[misc]

    monkeypatch.setattr(cancel_module, "act_on_jobs", act_on_jobs)
    cancel_module.cancel(["1"])
    assert "asked to save" in capsys.readouterr().out


def test_a_daemon_of_an_earlier_version_reads_what_a_new_runner_notes(tmp_path: Path) -> None:
    """It runs through the upgrade, compares the whole file, and fails a job that "may not report" where it should go on."""
    descriptors = files.open_protocol(tmp_path)
    assert (tmp_path / "protocol").read_bytes() == b"0" and files.began_since_boot_s(tmp_path) is None
    files.note_start(descriptors, reports=True)
    assert (tmp_path / "protocol").read_bytes() == b"1" and files.may_report(tmp_path)
    assert (files.began_since_boot_s(tmp_path) or 0.0) > 0
    for descriptor in descriptors:
        os.close(descriptor)
