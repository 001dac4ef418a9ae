"""The daemon's loop: what came in is recorded, decided on, put on disk at once, and then answered and acted on."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from evenload.errors import ConfigError, EvenloadError, QueueError, StaleError
from evenload.scheduler import messages, paths
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide
from evenload.scheduler.daemon.attempts import Attempts
from evenload.scheduler.daemon.devices import LocalDevice, find_devices
from evenload.scheduler.daemon.external_processes import GpuMonitor
from evenload.scheduler.daemon.handlers import DelayedReply, RequestHandlers
from evenload.scheduler.daemon.log import DaemonLog
from evenload.scheduler.daemon.maintenance import device_events, external_process_events, file_events
from evenload.scheduler.daemon.queue_file import QueueFile, read_queue_file
from evenload.scheduler.daemon.requests import caller_of
from evenload.scheduler.daemon.runners import Runners
from evenload.scheduler.daemon.server import Connection, Request, Wire
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.notify import Notifier
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore

TICK_S = 1.0
_WRITER_GOES_S = 10.0
_FULL_DISK_S = 2.0


class Daemon:
    """One queue's daemon, from its start to its end."""

    def __init__(self, folder: Path, log: DaemonLog) -> None:
        """Opens the queue, and takes over what runs.

        Raises:
            ConfigError, QueueError: the queue can't be used.
        """
        self._log = log
        self._selector = selectors.DefaultSelector()
        settings = read_queue_file(folder)
        _make_folders(folder, settings)
        self._store = _open_store(folder)
        reader = Reader(folder)
        newest = reader.jobs(newest_first=True, limit=1)
        self._state = DaemonState(
            folder=folder,
            store=self._store,
            reader=reader,
            runners=Runners(folder, self._selector),
            settings=settings,
            devices={},
            next_number=newest[0].number + 1 if newest else 1,
        )
        self._handlers = RequestHandlers(self._state)
        self._notifier = Notifier(log.write)
        self._attempts = Attempts(self._state, log, self._scan_soon)
        self._watch: GpuMonitor | None = None
        self._told_s: dict[str, float] = {}
        self._waiting: list[tuple[Connection, DelayedReply]] = []
        self._decide_at_s = self._tick_at_s = 0.0
        self._stalled_until_s = 0.0
        self._reload = True
        self._attempts.take_over()
        self._listen_to_signals()
        self._wire = Wire(folder, self._selector, shared=settings.shared)
        log.write(
            f"the daemon {os.getpid()} has the queue {folder}: "
            f"{len(self._store.queue_state.jobs)} jobs, epoch {self._store.epoch}"
        )

    def run(self) -> None:
        """Works until it is asked to end; jobs go on without it."""
        try:
            while not self._handlers.is_over:
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._pass()
        finally:
            self._close()

    def _pause_s(self) -> float:
        now_s = time.monotonic()
        if now_s < self._stalled_until_s:
            return self._stalled_until_s - now_s
        if self._wire.pause_s is not None or self._reload:
            return 0.0
        if self._state.runners.is_sweeping:
            return 0.05
        due_s = self._decide_at_s if self._state.has_changed else self._tick_at_s
        if self._attempts.next_request_s is not None:
            due_s = min(due_s, self._attempts.next_request_s)
        return max(0.0, min(due_s, self._tick_at_s) - now_s)

    def _pass(self) -> None:
        """One turn: all that came in, one commit, then the answers and the acts."""
        if time.monotonic() < self._stalled_until_s:
            return
        answers: list[tuple[Connection, dict[str, Any] | DelayedReply]] = []
        if self._reload:
            self._read_settings()
        is_tick = time.monotonic() >= self._tick_at_s
        if is_tick:
            self._tick()
        self._see()
        for request in self._wire.requests():
            answer = self._handle(request)
            if answer is not None:
                answers.append((request.connection, answer))
        ended = self._attempts.end_gone(self._state.record)
        answers += self._attempts.admit(self._state.record)
        self._decide(is_tick)
        try:
            self._store.commit()
        except StaleError:
            raise
        except QueueError as error:
            self._undone(error, answers)
            return
        self._state.problems.pop("disk", None)
        self._act(ended)
        for connection, row in answers:
            if isinstance(row, DelayedReply):
                self._waiting.append((connection, row))
            else:
                self._wire.answer(connection, row)
        self._answer_waiting()

    def _undone(self, error: QueueError, answers: list[tuple[Connection, dict[str, Any] | DelayedReply]]) -> None:
        """Nothing of this turn is on disk, so nothing of it has happened."""
        self._log.write(f"nothing can be recorded: {error}")
        self._state.problems["disk"] = str(error)
        self._stalled_until_s = time.monotonic() + _FULL_DISK_S
        self._state.ended.clear()
        self._handlers.to_kill.clear()
        newest = self._state.reader.jobs(newest_first=True, limit=1)
        self._state.next_number = newest[0].number + 1 if newest else 1
        self._state.has_changed = self._reload = True
        for connection, _ in answers:
            self._wire.answer(connection, messages.error_row(error))

    def _handle(self, request: Request) -> dict[str, Any] | DelayedReply | None:
        """The answer to one request; None where it follows when a device was looked at."""
        connection, message = request.connection, request.message
        try:
            if message.get("verb") == "runner":
                return self._attempts.register(connection, message)
            caller = caller_of(connection.pid, connection.uid, self._state.settings)
            answer = self._handlers.handle(caller, message)
        except EvenloadError as error:
            return messages.error_row(error)
        except Exception as error:  # a fault of ours must not end the queue of everybody
            self._log.write(f"a request of user {connection.uid} failed: {traceback.format_exc()}")
            return messages.error_row(
                QueueError(f"the daemon failed at this: {type(error).__name__}; its log has more")
            )
        return answer if isinstance(answer, DelayedReply) else {"ok": True, "result": answer}

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._tick_at_s = now_s + TICK_S
        self._wire.tick()
        self._attempts.note_reports(self._state.record)

    def _see(self) -> None:
        """Takes over what the watch has seen since."""
        if self._watch is None or self._watch.last is self._state.scan or self._watch.last is None:
            return
        scan = self._state.scan = self._watch.last
        seen = {
            (device, holder.pid)
            for device, found in self._state.devices.items()
            if found.is_gpu and (held := scan.held.get(device)) is not None
            for holder in held.external
        }
        since = self._state.external_since_s
        self._state.external_since_s = {key: since.get(key, time.time()) for key in seen}
        allowed_bytes = self._state.settings.ghost_bytes
        for event in external_process_events(
            self._store.queue_state,
            self._state.devices,
            scan,
            allowed_bytes,
            self._told_s,
            time.time(),
            self._attempts.runner_pids(),
        ):
            self._state.record(event)
            label = self._state.devices[event.device].label
            self._log.write(f"{label}: {event.reason if isinstance(event, events.DeviceClosed) else 'free again'}")

    def _decide(self, is_tick: bool) -> None:
        """Asks the core what to do now. What it costs bounds how often."""
        began_s = time.monotonic()
        if began_s < self._decide_at_s or not (self._state.has_changed or is_tick):
            return
        snapshot = self._store.queue_state.snapshot()
        if unseen := self._attempts.unseen():
            snapshot = replace(snapshot, closed={**dict.fromkeys(unseen, "it is being looked at"), **snapshot.closed})
        now_s = time.time()
        for command in decide(snapshot, now_s):
            self._state.record(command)
        self._state.has_changed = False
        took_s = time.monotonic() - began_s
        self._decide_at_s = began_s + took_s + min(2.0, 2 * took_s)

    def _act(self, ended: list[Any]) -> None:
        """Carries out what is on disk now."""
        self._attempts.forget(ended)
        for job in self._state.ended:
            found = self._state.program_of(job.id)
            if found is not None and found.program.notify:
                self._notifier.send(found.program, job)
        self._state.ended.clear()
        self._attempts.launch()
        self._attempts.request_stops(self._handlers.to_kill)
        if self._watch is not None:
            self._watch.runners = self._state.runners.pids()

    def _answer_waiting(self) -> None:
        now_s, last = time.monotonic(), self._store.last
        left = []
        for connection, later in self._waiting:
            if connection.is_closed:
                continue
            if last > later.after or now_s >= later.until_s:
                self._wire.answer(connection, {"ok": True, "result": {"last": last}})
            else:
                left.append((connection, later))
        self._waiting = left

    # What is set, and what is here.

    def _read_settings(self) -> None:
        """Reads `queue.toml` and looks for devices anew; what can't be read leaves all as it was."""
        self._reload = False
        try:
            settings = read_queue_file(self._state.folder)
            found = {one.device.id: one for one in find_devices(settings)}
        except (EvenloadError, OSError, TypeError) as error:
            self._state.problems["settings"] = str(error)
            self._log.write(f"settings: {error}")
            settings, found = self._state.settings, dict(self._state.devices)
        else:
            self._state.problems.pop("settings", None)
        self._state.settings, self._state.devices = settings, found
        now_s, queue_state = time.time(), self._store.queue_state
        for event in (*file_events(queue_state, settings, now_s), *device_events(queue_state, found, now_s)):
            with contextlib.suppress(QueueError):
                self._state.record(event)
        self._start_watch(found, settings)

    def _start_watch(self, found: Mapping[str, LocalDevice], settings: QueueFile) -> None:
        if self._watch is not None or not any(one.is_gpu for one in found.values()):
            return
        self._watch = GpuMonitor(settings.look_every_s)
        self._selector.register(self._watch.ready_fd, selectors.EVENT_READ, self._drain_watch)
        self._watch.start()

    def _drain_watch(self) -> None:
        if self._watch is not None:
            _drain(self._watch.ready_fd)

    def _scan_soon(self) -> None:
        if self._watch is not None:
            self._watch.scan_soon()

    def _listen_to_signals(self) -> None:
        self._wakeup, end = os.pipe()
        for descriptor in (self._wakeup, end):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGHUP, self._on_reload)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: _drain(self._wakeup))

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        self._handlers.is_over = True

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self._reload = True

    def _close(self) -> None:
        self._log.write(f"the daemon {os.getpid()} ends; {len(self._state.runners.live)} jobs go on")
        if self._watch is not None:
            self._watch.close()
        self._wire.close()
        self._state.runners.close()
        self._state.reader.close()
        self._store.close()


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass


def _make_folders(folder: Path, settings: QueueFile) -> None:
    """The queue's folders; others may pass through them to the socket and to what is theirs, and look at nothing."""
    if settings.shared and os.geteuid() != 0:
        raise ConfigError(
            "shared = true, but this daemon isn't run by root and can't run jobs as their owners; let root run it, or leave "
            "it out: each user's own queue sees what others do on the devices, and waits"
        )
    for part in (folder, folder / paths.LOGS, folder / paths.ATTEMPTS):
        paths.make_private(part)
        part.chmod(0o711 if settings.shared else 0o700)


def _open_store(folder: Path) -> QueueStore:
    """Opens the record; a daemon that is just ending is waited for."""
    deadline_s = time.monotonic() + _WRITER_GOES_S
    while True:
        try:
            return QueueStore(folder, holder="evenload daemon")
        except QueueError as error:
            if "already has its writer" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def run_daemon(folder: Path, log: DaemonLog, ready: Callable[[], None]) -> None:
    """Runs the daemon of a queue; `ready` is called once it answers."""
    daemon = Daemon(folder, log)
    ready()
    daemon.run()
