"""What ``evenload submit`` does with a job that was read: checks it, takes the snapshot, queues it, tells, waits."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from evenload.errors import ConfigError, EvenloadError, QueueError
from evenload.scheduler import snapshots
from evenload.scheduler.client import Client, connect
from evenload.scheduler.core.states import JobState
from evenload.scheduler.job_file import JobFile, as_table
from evenload.scheduler.submit import check
from evenload.scheduler.submit.check import Order

SNAPSHOT_KEPT_S = 7 * 86400.0
"""So long after its last use a snapshot is kept; then the next submit removes it."""
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is to be done with the job."""

    queue: Path
    dry_run: bool
    waits: bool
    as_json: bool


def submit_job(job: JobFile, wishes: Wishes, here: Path, variables: Mapping[str, str], out: TextIO) -> int:
    """Submits; the exit code of the command.

    Raises:
        ConfigError: something can't be as it was asked for; nothing is queued then.
        QueueError: the queue refuses it, or can't be reached.
    """
    order = check.check(job, here, variables)
    if job.backend != "local":
        return _to_backend(order, wishes, variables, out)
    user = pwd.getpwuid(os.geteuid()).pw_name
    if wishes.dry_run:
        return _dry_run(order, wishes, user, out)
    with connect(wishes.queue) as line:
        check.check_devices(order.job, user, line.call("status"))
        named = _after_by_number(order, wishes.queue)
        store = check.store_of(wishes.queue)
        taken = check.take_snapshot(named, store)
        answer = line.call("submit", **_message(named, taken))
        ids = [str(answer["job"])] if "job" in answer else [str(name) for name in answer["jobs"]]
        if taken is not None:
            snapshots.note_jobs(taken.folder, wishes.queue, ids)
        _tell(line, ids, named, taken, wishes, out)
        _clean(line, wishes.queue, store)
        return _wait(line, ids, out) if wishes.waits else 0


def _message(order: Order, taken: snapshots.Snapshot | None) -> dict[str, Any]:
    rows = check.rows(order, "" if taken is None else taken.folder)
    if order.job.array:
        return {"jobs": rows, "array": True}
    return rows[0]


def _after_by_number(order: Order, queue: Path) -> Order:
    """Jobs that it waits for, by number: names are people's."""
    from evenload.cli.jobs import ids_of

    found = []
    for after in order.job.after:
        found += [replace(after, job=number) for number in ids_of([after.job], queue)]
    return replace(order, job=replace(order.job, after=tuple(found)))


def _dry_run(order: Order, wishes: Wishes, user: str, out: TextIO) -> int:
    """Prints the request as it would be sent. A daemon that runs is asked whether it has such devices."""
    import tomli_w

    try:
        with connect(wishes.queue, start=False) as line:
            check.check_devices(order.job, user, line.call("status"))
            known = ""
    except QueueError:
        known = "no daemon runs: whether there are such devices is not known yet"
    if wishes.as_json:
        print(json.dumps(_message(order, None), indent=1), file=out)
        return 0
    num = len(order.job.array)
    notes = [
        f"queue: {wishes.queue}",
        f"jobs: {num}, an array" if num else "jobs: 1",
        f"snapshot: {'yes' if order.takes_snapshot else 'no'} ({order.why})",
        f"variables from this shell: {', '.join(order.environment) or 'none'}",
        *([known] if known else []),
    ]
    print("".join(f"# {note}\n" for note in notes) + tomli_w.dumps(as_table(order.job)), end="", file=out)
    return 0


def _to_backend(order: Order, wishes: Wishes, variables: Mapping[str, str], out: TextIO) -> int:
    """Hands the job to somebody else's scheduler."""
    from evenload.scheduler import backends

    if wishes.waits:
        raise ConfigError("--wait is for the local queue; ask with evenload show --backend")
    backend = backends.get(order.job.backend)
    job = backends.settled(order.job, order.job.folder, variables)
    carried = {name: value for name, value in order.environment.items() if name not in job.environment}
    job = replace(job, environment={**carried, **job.environment})
    if wishes.dry_run:
        print(backend.materialise(job), end="", file=out)
        if order.takes_snapshot:
            print(f"evenload: it would run in a snapshot of {job.folder} ({order.why})", file=sys.stderr)
        return 0
    backend.materialise(job)  # refuses what can't be, before anything is copied
    taken = check.take_snapshot(order, check.store_of(Path("/nonexistent")))
    if taken is not None:
        snapshots.lay_out(taken.folder)
        job = replace(job, folder=taken.folder)
    number = backend.submit(backend.materialise(job))
    if taken is not None:
        snapshots.note_jobs(taken.folder, Path(job.backend), [number])
    if wishes.as_json:
        print(json.dumps({"backend": job.backend, "job": number}), file=out)
        return 0
    told = f"job {number} is submitted to {job.backend}; evenload show --backend {job.backend} {number}"
    print(told, file=out)
    if taken is not None:
        print(_snapshot_line(taken), file=out)
    return 0


def _tell(
    line: Client, ids: Sequence[str], order: Order, taken: snapshots.Snapshot | None, wishes: Wishes, out: TextIO
) -> None:
    """The number, the place in line, how to watch."""
    if wishes.as_json:
        told = {"jobs": list(ids), "queue": str(wishes.queue), "snapshot": "" if taken is None else taken.folder}
        print(json.dumps(told), file=out, flush=True)
        return
    first = ids[0]
    option = "" if wishes.queue == _default_queue() else f" --queue {shlex.quote(str(wishes.queue))}"
    name = f" ({order.job.name})" if order.job.name else ""
    if len(ids) > 1:
        print(f"jobs {first}-{ids[-1]}{name} are queued, {len(ids)} of an array", file=out)
    else:
        print(f"job {first}{name} is queued{_place(line, first)}", file=out)
    if taken is not None:
        print(_snapshot_line(taken), file=out)
    elif order.job.snapshot is None:
        print(f"no snapshot: {order.why}; later edits change a job that waits", file=out)
    print(f"watch: evenload ps{option} · evenload logs{option} -f {first} · evenload cancel{option} {first}", file=out)
    out.flush()


def _default_queue() -> Path:
    from evenload.scheduler import paths

    return paths.default_folder()


def _place(line: Client, job: str) -> str:
    """``, 2nd of those that wait, starts in about 12 min``."""
    from evenload.views.queue.text import span

    row = line.call("job", job=job)["job"]
    if row["state"] != JobState.PENDING:
        return " and starts now"
    answer = line.call("list", states=[str(JobState.PENDING)], limit=1000)
    place = 1 + sum(1 for other in answer["jobs"] if other["number"] < row["number"])
    told = f", {place}{'+' if answer['more'] else _ordinal(place)} of those that wait"
    if row["start_s"] is not None and (start_s := row["start_s"] - time.time()) > 1:
        told += f", starts in about {span(start_s)}"
    return told


def _ordinal(number: int) -> str:
    return "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _snapshot_line(taken: snapshots.Snapshot) -> str:
    told = f"snapshot: {taken.num_files} files, {taken.size_bytes / 1e6:.1f} MB"
    if taken.linked:
        told += f"; linked to the originals: {', '.join(_few(taken.linked))}"
    if taken.outside:
        told += f"; links that lead outside stay: {', '.join(_few(taken.outside))}"
    return f"{told}. It runs in {taken.folder}"


def _few(names: Sequence[str], num: int = 6) -> list[str]:
    return list(names) if len(names) <= num else [*names[: num - 1], f"and {len(names) - num + 1} more"]


def _clean(line: Client, queue: Path, store: Path) -> None:
    """Removes snapshots that ended jobs left long ago; what can't be told now is left for the next submit."""
    with contextlib.suppress(QueueError, OSError):
        snapshots.clean(store, have_ended(line, queue), older_than_s=SNAPSHOT_KEPT_S, now_s=time.time())


def have_ended(line: Client, queue: Path) -> Callable[[Path, Sequence[str]], bool]:
    """A function that tells whether jobs have ended; no for those of another queue."""

    def ask(other: Path, jobs: Sequence[str]) -> bool:
        from evenload.scheduler import backends

        if str(other) in backends.NAMES:
            try:
                return all(row.has_ended for row in backends.get(str(other)).describe(jobs))
            except EvenloadError:
                return False  # nobody there can be asked now
        if other != queue:
            return False
        return all(check.is_over(line.call("job", job=job)["job"]["state"]) for job in jobs)

    return ask


def _wait(line: Client, ids: Sequence[str], out: TextIO) -> int:
    """Until all have ended; the exit code of the first that didn't succeed."""
    left, worst = list(ids), 0
    last = 0
    try:
        while left:
            last = line.call("wait", after=last, timeout_s=_WAIT_S)["last"]
            still = []
            for job in left:
                row = line.call("job", job=job)["job"]
                if not check.is_over(row["state"]):
                    still.append(job)
                    continue
                why = f": {row['reason']}" if row["reason"] else ""
                print(f"job {job} {row['state'].lower()}{why}", file=sys.stderr, flush=True)
                worst = worst or check.exit_code_of(row)
            left = still
    except KeyboardInterrupt:
        print(f"evenload: not waiting any more; the jobs stay in the queue: {', '.join(left)}", file=sys.stderr)
        return 130
    return worst
