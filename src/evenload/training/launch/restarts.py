"""Start all ranks again where a run can't go on without one that was lost: from its newest checkpoint.

Only `evenload run` on one machine does so, and only after a loss: never after an error of the script, the end of a process by
itself, or a request to stop. Restarts of single ranks and of all count together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from evenload.job import stop_requested
from evenload.records.checkpoints import list_checkpoints
from evenload.records.reader import is_run, last_step_in
from evenload.records.recorder import append_event
from evenload.records.values import RunEvent
from evenload.rendezvous.peer_monitor import FailureCause
from evenload.training.launch.failure import FailureReport
from evenload.training.launch.membership_decider import restart_delay_s
from evenload.training.launch.request import LaunchRequest

_NO_ACCIDENT = ("it ended with exit code", *(f"killed by SIG{name}" for name in ("TERM", "INT", "HUP", "QUIT")))
_NO_CHECKPOINT = "there is no complete checkpoint to start again from: run.checkpoint(every='10min') writes them"


def cause_of(failure: FailureReport, text: str) -> FailureCause:
    lost = failure.lost and not failure.kind.startswith(_NO_ACCIDENT)
    return FailureCause(text, failure.exit_code, failure.consequence, failure.time_s, lost)


def can_start_again(request: LaunchRequest, num_restarts: int, folder: Path | None, began_s: float) -> bool:
    """Return True if `restart` would return a launch; `num_restarts`: those of the place that has had most."""
    if not _may_start_again(request) or num_restarts >= request.max_restarts:
        return False
    if folder is None or last_step_in(folder, since_s=began_s) < 0:
        return True
    return any(found.is_last for found in list_checkpoints(folder))


def _may_start_again(request: LaunchRequest) -> bool:
    is_training = request.mode == "train" and not request.call and not request.settings.get("dry_run")
    return is_training and request.max_restarts > 0 and not stop_requested()


def restart(
    request: LaunchRequest,
    text: str,
    folder: Path | None,
    began_s: float,
    before: LaunchRequest,
    print_line: Callable[[str], None],
) -> tuple[LaunchRequest | None, str]:
    """Return the next launch, after a line and an event, or None; and the report: `text`, and why it doesn't start again.

    `folder`: the run's, None before `evenload.init`; `began_s`: when these ranks started (since 1970); `before`: what
    `ChangeableMembers.for_restart` returned before the ranks were ended.
    """
    used, limit = before.num_restarts, request.max_restarts
    if not _may_start_again(request):
        return None, text
    if used >= limit:
        return None, f"{text}\nit doesn't start again: its {used} restarts are used up (--max-restarts {limit})"
    last_step = -1 if folder is None else last_step_in(folder, since_s=began_s)
    settings = {key: value for key, value in before.settings.items() if key != "fresh" or last_step < 0}
    checkpoints = [] if folder is None or settings.get("fresh") else list_checkpoints(folder)
    saved = next((found for found in checkpoints if found.is_last), None)
    if last_step >= 0 and saved is None:
        return None, f"{text}\n{_NO_CHECKPOINT}"
    step, num_steps = (saved.step, max(0, last_step + 1 - saved.step)) if saved is not None else (0, 0)
    where = f"from the checkpoint of step {step}" if saved is not None else "from the beginning"
    again = f", {num_steps} step{'s are' if num_steps > 1 else ' is'} done again" if num_steps else ""
    head, _, why = text.partition("\nthe run can't go on: ")
    reason = head.splitlines()[0] + (f"; the run can't go on: {why}" if why else "")
    for name, old, new in (
        ("throttle", request.throttle, before.throttle),
        ("balance", request.settings.get("balance"), before.settings.get("balance")),
    ):
        if old != new:
            again += f", with --{name} {','.join(f'{value:g}' for value in new or ())} for the devices that remain"
    line = f"{reason}; {'it' if why else 'the run'} starts again {where}{again} (restart {used + 1} of {limit})"
    print_line(f"evenload: {line}")
    seconds = time.time() - max(began_s, saved.time if saved is not None else 0.0)
    fields = {"reason": reason, "seconds": seconds, "steps": num_steps}
    event = RunEvent("restarted", line, time.time(), step, fields)
    unwritten = write_events(folder, (*before.unwritten_events, event))
    return replace(before, settings=settings, num_restarts=used + 1, unwritten_events=unwritten), text


def write_events(folder: Path | None, events: Sequence[RunEvent]) -> tuple[RunEvent, ...]:
    """Write events into a run folder; return those that must wait: there is no such folder yet, or its disk is full."""
    if folder is None or not is_run(folder):
        return tuple(events)
    written = 0
    with suppress(OSError):  # the ranks report a full disk
        for event in events:
            append_event(folder, replace(event, time=time.time()))
            written += 1
    return tuple(events[written:])


def wait_before(request: LaunchRequest, received_signals: Sequence[int]) -> None:
    """Wait before a restart, the longer the more there were; a signal ends the wait, and then the launch."""
    used = request.num_restarts
    end_s = time.monotonic() + (restart_delay_s(used - 1) if used else 0.0)
    while time.monotonic() < end_s and not received_signals:
        time.sleep(0.04)
