"""Interpretation of a runner's result and the program's last report: the event that ends an attempt. Pure."""

from __future__ import annotations

import signal

from evenload.job import EXIT_CODE
from evenload.job.protocol import ProgressReport
from evenload.scheduler.core import events
from evenload.scheduler.runner.files import RunnerResult

_BY_REQUEST = (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""Exit codes of a program that obeys a signal, also through a shell."""


def ending(
    job: str, now_s: float, result: RunnerResult, report: ProgressReport | None, done_before: float
) -> events.QueueEvent:
    """Return the event that ends an attempt.

    `done_before` is the work done when it began: a job that stops without a request must have made progress, or it would
    restart forever.
    """
    has_saved = report is not None and report.state == "stopped"
    if result.code is None:
        if result.requested:
            return events.Yielded(now_s, job, result.problem, has_saved=False)
        return events.Ended(now_s, job, is_success=False, reason=result.problem or "it could not be started")
    if result.requested:
        has_finished = report is not None and report.state == "finished"
        return _requested_ending(job, now_s, result, has_saved=has_saved, has_finished=has_finished)
    if result.code == EXIT_CODE:
        if has_saved and report is not None and report.step > done_before:
            return events.Yielded(now_s, job, f"it saved at step {report.step} and ended by itself")
        reason = f"exit code {EXIT_CODE} (saved, to go on later), but there was no stop request and no progress"
        return events.Ended(now_s, job, is_success=False, reason=reason)
    return events.Ended(now_s, job, is_success=result.code == 0, reason=describe_code(result.code))


def _requested_ending(
    job: str, now_s: float, result: RunnerResult, *, has_saved: bool, has_finished: bool
) -> events.QueueEvent:
    """After a request only the program's own report says that it is done: many a handler of SIGTERM exits with 0."""
    code = result.code
    if code == EXIT_CODE or has_saved:
        return events.Yielded(now_s, job)
    if code == 0 and has_finished:
        return events.Ended(now_s, job, is_success=True)
    if code == 0:
        return events.Yielded(
            now_s, job, "it ended at the request with exit code 0, without a report that it had finished"
        )
    if result.was_killed:
        reason = "it didn't end within its grace and was killed; it goes on from its last save"
        return events.Yielded(now_s, job, reason, has_saved=False)
    if code in _BY_REQUEST:
        return events.Yielded(now_s, job, "it ended at the request without saving", has_saved=False)
    return events.Ended(
        now_s, job, is_success=False, reason=f"requested to stop, it ended with {describe_code(code or 0)}"
    )


def describe_code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
