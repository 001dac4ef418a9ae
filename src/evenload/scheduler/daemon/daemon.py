"""The daemon's loop: requests are recorded, decided on and committed together, and only then replied to and acted on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, EvenloadError, QueueError, StaleError
from evenload.scheduler import messages, paths, presence, validation
from evenload.scheduler.clock import QueueClock
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.daemon.alive_file import AliveFile
from evenload.scheduler.daemon.attempts import Attempts
from evenload.scheduler.daemon.backups import HourlyBackups
from evenload.scheduler.daemon.devices import LocalDevice, find_devices
from evenload.scheduler.daemon.external_processes import GpuMonitor
from evenload.scheduler.daemon.handlers import READING, DelayedReply, RequestHandlers
from evenload.scheduler.daemon.log import DaemonLog
from evenload.scheduler.daemon.maintenance import (
    clock_events,
    device_events,
    external_process_events,
    file_events,
    recurring_events,
)
from evenload.scheduler.daemon.queue_file import QueueFile, read_queue_file
from evenload.scheduler.daemon.requests import caller_of
from evenload.scheduler.daemon.runners import EndedAttempt, Runners
from evenload.scheduler.daemon.server import ClientConnection, RequestServer
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.notify import Notifier
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore

TICK_S = 1.0
_WRITER_EXIT_S = 10.0
_FULL_DISK_S = 2.0


class Daemon:
    def __init__(self, folder: Path, log: DaemonLog) -> None:
        """Open the queue and adopt running attempts; called in a running event loop. Raise if the queue can't be used."""
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        settings = read_queue_file(folder)
        _make_folders(folder, settings)
        self._store = _open_store(folder)
        self._alive = AliveFile(folder)
        self._backups = HourlyBackups(folder, log.write)
        presence.note_stopped(folder, False)
        reader = Reader(folder)
        alive_s = max(self._alive.last_s, self._store.queue_state.time_s)
        clock = QueueClock(self._store.anchor, alive_s)
        self._state = DaemonState(
            folder=folder,
            store=self._store,
            reader=reader,
            runners=Runners(folder, self._wake.set, clock),
            settings=settings,
            devices={},
            next_number=_next_number(reader, folder),
            clock=clock,
            alive_s=alive_s,
        )
        self._handlers = RequestHandlers(self._state)
        self._notifier = Notifier(log.write)
        self._attempts = Attempts(self._state, log, self._scan_soon)
        self._gpu_monitor: GpuMonitor | None = None
        self._closed_recorded_s: dict[str, float] = {}
        self._delayed: list[tuple[ClientConnection, DelayedReply]] = []
        self._decide_at_s = self._tick_at_s = 0.0
        self._stalled_until_s = 0.0
        self._has_anchor = False
        self._must_reload = True
        self._attempts.adopt_running()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._end)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._server = RequestServer(folder, self._wake.set, shared=settings.shared)
        log.write(
            f"the daemon {os.getpid()} has the queue {folder}: "
            f"{len(self._store.queue_state.jobs)} jobs, epoch {self._store.epoch}"
        )

    async def run(self, ready: Callable[[], None]) -> None:
        """Work until a stop is requested, and call `ready` once requests are accepted. Jobs go on without the daemon."""
        try:
            await self._server.start()
            ready()
            while not self._handlers.is_over:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._wake.wait()
                        await asyncio.sleep(0)
                self._wake.clear()
                self._run_once()
        finally:
            self._close()

    def _end(self) -> None:
        self._handlers.is_over = True
        self._wake.set()

    def _reload(self) -> None:
        self._must_reload = True
        self._wake.set()

    def _pause_s(self) -> float:
        now_s = time.monotonic()
        if now_s < self._stalled_until_s:
            return self._stalled_until_s - now_s
        if self._must_reload:
            return 0.0
        if self._state.runners.is_sweeping:
            return 0.05
        due_s = self._decide_at_s if self._state.has_changed else self._tick_at_s
        if self._attempts.next_request_s is not None:
            due_s = min(due_s, self._attempts.next_request_s)
        return max(0.0, min(due_s, self._tick_at_s) - now_s)

    def _run_once(self) -> None:
        """Handle everything that has arrived: one commit, then the replies and actions."""
        if time.monotonic() < self._stalled_until_s:
            return
        if self._must_reload:
            self._read_settings()
        is_tick = time.monotonic() >= self._tick_at_s
        if is_tick:
            self._tick_at_s = time.monotonic() + TICK_S
            self._server.check_times()
            self._follow_clock()
            for event in recurring_events(self._store.queue_state, self._state.clock):
                self._state.record(event)
            self._alive.write(self._state.clock.now_s())
            self._backups.run_if_due(self._state.clock.now_s(), self._store.last)
            self._state.problems.pop("backup", None)
            if self._backups.problem:
                self._state.problems["backup"] = self._backups.problem
            self._attempts.note_reports(self._state.record)
        replies: list[tuple[ClientConnection, dict[str, Any] | DelayedReply]] = []
        requests = self._server.requests()
        for connection, message in requests:
            reply = self._handle(connection, message)
            if reply is not None:
                replies.append((connection, reply))
        ended = self._attempts.end_gone(self._state.record)
        self._attempts.follow_resizes(self._state.record)
        self._apply_scan()  # right before: runners are admitted by the newest there is
        replies += self._attempts.admit(self._state.record)
        self._decide(is_tick)
        try:
            self._store.commit()
        except StaleError:
            raise
        except QueueError as error:
            self._roll_back(error)
            reads = [(connection, message) for connection, message in requests if message.get("verb") in READING]
            self._send([(connection, self._handle(connection, message)) for connection, message in reads])
            readers = {connection for connection, _ in reads}
            self._send(
                [(connection, messages.error_row(error)) for connection, _ in replies if connection not in readers]
            )
            return
        self._state.problems.pop("disk", None)
        self._act(ended)
        self._send(replies)
        self._send_delayed()

    def _send(self, replies: Iterable[tuple[ClientConnection, dict[str, Any] | DelayedReply | None]]) -> None:
        for connection, reply in replies:
            if isinstance(reply, DelayedReply):
                self._delayed.append((connection, reply))
            elif reply is not None:
                connection.reply(reply)

    def _follow_clock(self) -> None:
        """Note that the wall clock was set: durations go on, and what people gave as a time of day keeps that time."""
        clock, store = self._state.clock, self._store
        step_s = 0.0 if store.anchor is None else clock.step_s(store.anchor)
        if step_s:
            self._log.write(f"the machine's clock was set by {step_s:+.0f} s; the queue's durations don't follow it")
            for event in clock_events(store.queue_state, step_s, clock.now_s()):
                self._state.record(event)
        if step_s or not self._has_anchor:
            store.anchor, self._has_anchor = clock.anchor(), True

    def _roll_back(self, error: QueueError) -> None:
        """Nothing of this turn is on disk, so nothing of it has happened."""
        self._log.write(f"nothing can be recorded: {error}")
        self._state.problems["disk"] = str(error)
        self._stalled_until_s = time.monotonic() + _FULL_DISK_S
        self._state.roll_back()
        self._attempts.roll_back()
        self._handlers.to_kill.clear()
        self._has_anchor = False
        self._state.next_number = _next_number(self._state.reader, self._state.folder)
        self._must_reload = True

    def _handle(self, connection: ClientConnection, message: dict[str, Any]) -> dict[str, Any] | DelayedReply | None:
        """Return the reply; None where it follows once a device was scanned."""
        verb = message.get("verb")
        message = {name: value for name, value in message.items() if name not in ("verb", "id")}
        try:
            if verb == "runner":
                register = self._attempts.register
                return register(connection, **validation.arguments(register, message, verb))
            caller = caller_of(connection.pid, connection.uid, self._state.settings)
            reply = self._handlers.handle(caller, verb, message)
        except EvenloadError as error:
            return messages.error_row(error)
        except Exception as error:  # a defect here must not end the queue of all users
            self._log.write(f"a request of user {connection.uid} failed: {traceback.format_exc()}")
            return messages.error_row(
                QueueError(f"the daemon failed at this: {type(error).__name__}; its log has more")
            )
        return reply if isinstance(reply, DelayedReply) else {"ok": True, "result": reply}

    def _apply_scan(self) -> None:
        scan = None if self._gpu_monitor is None else self._gpu_monitor.last
        if scan is None or scan is self._state.scan:
            return
        self._state.scan = scan
        seen = {
            (device, process.pid)
            for device, found in self._state.devices.items()
            if found.is_gpu and (held := scan.held.get(device)) is not None
            for process in held.external
        }
        since = self._state.external_since_s
        self._state.external_since_s = {key: since.get(key, time.time()) for key in seen}
        for event in external_process_events(
            self._store.queue_state,
            self._state.devices,
            scan,
            self._state.settings.ghost_bytes,
            self._closed_recorded_s,
            self._state.clock.now_s(),
            self._attempts.runner_pids(),
        ):
            self._state.record(event)
            label = self._state.devices[event.device].label
            self._log.write(f"{label}: {event.reason if isinstance(event, events.DeviceClosed) else 'free again'}")

    def _decide(self, is_tick: bool) -> None:
        """Have the core decide. The time that it takes limits how often it runs."""
        began_s = time.monotonic()
        if began_s < self._decide_at_s or not (self._state.has_changed or is_tick):
            return
        self._state.budgets.read(self._store.queue_state.users, self._state.settings.groups, self._state.clock)
        snapshot, _ = self._state.snapshot()
        if unseen := self._attempts.unseen():
            snapshot = replace(snapshot, closed={**dict.fromkeys(unseen, "it is being scanned"), **snapshot.closed})
        now_s = self._state.clock.now_s()
        for command in self._commands(snapshot, now_s):
            (job, *_) = self._state.record(command)
            if isinstance(command, events.ResizeRequested) and (refusal := self._attempts.resizes.refusal(job)):
                self._state.record(refusal)
        self._state.has_changed = False
        took_s = time.monotonic() - began_s
        self._decide_at_s = began_s + took_s + min(2.0, 2 * took_s)

    def _commands(self, snapshot: QueueSnapshot, now_s: float) -> tuple[events.Command, ...]:
        """Return what the core decides; nothing where it fails: the queue goes on, and its owner can change what it fails at."""
        try:
            commands = decide(snapshot, now_s)
        except Exception as error:
            problem = f"nothing is decided ({type(error).__name__}: {error}); the daemon's log has more"
            if self._state.problems.get("decide") != problem:
                self._log.write(f"{problem}: {traceback.format_exc()}")
            self._state.problems["decide"] = problem
            return ()
        self._state.problems.pop("decide", None)
        return commands

    def _act(self, ended: list[EndedAttempt]) -> None:
        """Act on what is on disk now."""
        self._attempts.forget(ended)
        for job in self._state.ended:
            found = self._state.program_of(job.id)
            if found is not None and found.program.notify:
                self._notifier.send(found.program, job, ahead_s=self._state.clock.ahead_s)
        self._state.ended.clear()
        self._attempts.launch()
        self._attempts.request_stops(self._handlers.to_kill)
        if self._gpu_monitor is not None:
            self._gpu_monitor.runners = self._state.runners.pids()

    def _send_delayed(self) -> None:
        now_s, last = time.monotonic(), self._store.last
        left = []
        for connection, delayed in self._delayed:
            if connection.is_closed:
                continue
            if last > delayed.after or now_s >= delayed.until_s:
                connection.reply({"ok": True, "result": {"last": last}})
            else:
                left.append((connection, delayed))
        self._delayed = left

    def _read_settings(self) -> None:
        """Read `queue.toml` and find the devices again; on an error everything stays as it was."""
        self._must_reload = False
        try:
            settings = read_queue_file(self._state.folder)
            found = {one.device.id: one for one in find_devices(settings)}
        except (EvenloadError, OSError, TypeError) as error:
            self._state.problems["settings"] = str(error)
            self._log.write(f"settings: {error}")
            settings, found = self._state.settings, dict(self._state.devices)
            if not found:  # the file was changed since it was read at the start
                with contextlib.suppress(EvenloadError, OSError, TypeError):
                    found = {one.device.id: one for one in find_devices(settings)}
        else:
            self._state.problems.pop("settings", None)
        self._state.settings, self._state.devices = settings, found
        now_s, queue_state = self._state.clock.now_s(), self._store.queue_state
        for event in (*file_events(queue_state, settings, now_s), *device_events(queue_state, found, now_s)):
            with contextlib.suppress(QueueError):
                self._state.record(event)
        self._start_gpu_monitor(found, settings)

    def _start_gpu_monitor(self, found: Mapping[str, LocalDevice], settings: QueueFile) -> None:
        if self._gpu_monitor is None and any(one.is_gpu for one in found.values()):
            self._gpu_monitor = GpuMonitor(settings.look_every_s, self._wake_from_thread)
            self._gpu_monitor.start()

    def _wake_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake.set)

    def _scan_soon(self) -> None:
        if self._gpu_monitor is not None:
            self._gpu_monitor.scan_soon()

    def _close(self) -> None:
        self._log.write(f"the daemon {os.getpid()} ends; {len(self._state.runners.live)} jobs go on")
        if self._gpu_monitor is not None:
            self._gpu_monitor.close()
        self._server.close()
        self._state.runners.close()
        self._backups.close()
        self._alive.close()
        with contextlib.suppress(OSError):
            presence.note_stopped(self._state.folder, self._handlers.is_over)
        self._state.reader.close()
        self._store.close()


def _make_folders(folder: Path, settings: QueueFile) -> None:
    """Make the queue's folders; other users may pass through them to the socket and their own files, and list nothing."""
    if settings.shared and os.geteuid() != 0:
        raise ConfigError(
            "shared = true, but this daemon isn't run by root and can't run jobs as their owners; let root run it, or leave "
            "it out: each user's own queue sees what others do on the devices, and waits"
        )
    for part in (folder, folder / paths.LOGS, folder / paths.ATTEMPTS):
        paths.make_private(part)
        part.chmod(0o711 if settings.shared else 0o700)


def _open_store(folder: Path) -> QueueStore:
    """Open the store; wait for a daemon that is just ending."""
    deadline_s = time.monotonic() + _WRITER_EXIT_S
    while True:
        try:
            return QueueStore(folder, holder="evenload daemon")
        except QueueError as error:
            if "already has its writer" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _next_number(reader: Reader, folder: Path) -> int:
    """Return the number of the next job: above those of the queue, and of outputs whose jobs a repaired queue has lost."""
    newest = reader.jobs(newest_first=True, limit=1)
    outputs = [int(path.stem) for path in (folder / paths.LOGS).glob("*.log") if path.stem.isdecimal()]
    return max([newest[0].number if newest else 0, *outputs]) + 1


def run_daemon(folder: Path, log: DaemonLog, ready: Callable[[], None]) -> None:
    async def run() -> None:
        await Daemon(folder, log).run(ready)

    asyncio.run(run())
