"""`evenload queue`: show and change a queue's settings, limits and reservations, or stop its daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenload.cli.jobs import Queue, folder_of
from evenload.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from evenload.scheduler.client import Client

_WEB_POLL_S = 2.0
_STOP_S = 10.0
_USAGE = {
    "show": "evenload queue [show]",
    "stop": "evenload queue stop",
    "start": "evenload queue start",
    "service": "evenload queue service",
    "repair": "evenload queue repair",
    "report": "evenload queue report [MONTH], such as 2026-11",
    "set": "evenload queue set NAME=VALUE..., such as policy=fifo",
    "limit": "evenload queue limit USER NAME=VALUE..., such as max_devices=2",
    "reserve": "evenload queue reserve DEVICE[,DEVICE...] TIME [USER...] [--at TIME] [--every day], such as gpu0,gpu1 2h ann",
    "release": "evenload queue release RESERVATION",
}


def queue(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ACTION [ARGUMENT]...]",
            help="show (the default), stop, start, service, repair, report, set, limit, reserve or release.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Begin of a reservation: 09:00, mon 09:00, 2026-12-01 09:00.")
    ] = None,
    every: Annotated[str | None, typer.Option(metavar="day|weekday|week", help="Repeat a reservation.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print the report as CSV.")] = False,
    by: Annotated[
        str | None, typer.Option(metavar="KEYS", help="Sum the report by some of month,group,user. Default: all.")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve a page of the queue to browsers of this machine, until Ctrl-C.")
    ] = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Start a queue over several machines, on Ray, or join that at ADDRESS: --ray [HOST:PORT]."
        ),
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port for --web (default: a free one) or for --ray (6379).")
    ] = None,
    queue: Queue = None,
) -> None:
    """Show or change the queue's settings. Only its owner and its admins may change them.

    stop: stop the daemon; jobs continue, and the next submit (or start) restarts it. service: have systemd start
    the daemon at boot and whenever it dies. repair: make a damaged queue whole from its backups. report [MONTH]: list
    jobs, device-hours, waits and preemptions by month, group and user. set NAME=VALUE: change a setting. limit USER
    NAME=VALUE: set max_devices, max_running, max_queued, share or budget_device_hours (a month). reserve DEVICES
    TIME [USER...]: reserve devices for these users, or for nobody, from now on (or --at a time, --every day). release
    RESERVATION: end a reservation.
    """
    if port is not None and not (web or ray):
        raise ConfigError("--port needs --web or --ray")
    if json and csv:
        raise ConfigError("--json and --csv contradict each other; give one of them")
    if ray:
        if web or json or csv or queue is not None or len(words or ()) > 1 or (words and port is not None):
            raise ConfigError("--ray takes only the address of the cluster to join, or --port to start one")
        _ray(words[0] if words else None, port)
        return
    if web:
        if words or json or csv or by is not None:
            raise ConfigError("--web shows the queue and takes no action, no --json, no --csv and no --by")
        _serve_page(folder_of(queue), port or 0)
        return
    action, *given = words or ["show"]
    if action not in _USAGE:
        raise ConfigError(f"evenload queue {action}: unknown action; actions: {', '.join(_USAGE)}")
    if action == "report":
        _report(folder_of(queue), given, by, "json" if json else "csv" if csv else "")
        return
    if csv or by is not None:
        raise ConfigError(f"--csv and --by are for evenload queue report, not for {action}")
    if (at or every) and action != "reserve":
        raise ConfigError(f"--at and --every are for evenload queue reserve, not for {action}")
    if given and action in ("show", "stop", "start", "service", "repair"):
        raise ConfigError(f"expected {_USAGE[action]}")
    if action in ("service", "repair"):
        (_service if action == "service" else _repair)(folder_of(queue))
        return
    from evenload.scheduler.client import connect

    with connect(folder_of(queue), start=action == "start") as client:
        try:
            if action == "reserve":
                answer, text = _reserve(client, given, at, every)
            else:
                answer, text = _ACTIONS[action](client, given)
        except (ValueError, IndexError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"expected {_USAGE[action]}") from None
    if json:
        import json as writer

        print(writer.dumps(answer, indent=1, ensure_ascii=False))
    else:
        print(text)


def _serve_page(folder: Path, port: int) -> None:
    from evenload.views.queue.page import QueuePage
    from evenload.views.queue.view import JobFilter, view_of
    from evenload.views.server import serve_until_interrupt

    view_of(folder, JobFilter())  # a queue that is not there is an error at once
    page = QueuePage(folder)
    serve_until_interrupt(page.title, f"the queue {folder}", page.update, port, _WEB_POLL_S)


def _ray(address: str | None, port: int | None) -> None:
    from evenload.scheduler.backends.ray import cluster
    from evenload.scheduler.backends.ray.backend import BACKEND

    if address is not None:
        cluster.join(address)
        print(f"this machine's devices are in the queue at {address}; ray stop takes them out")
        return
    address = cluster.start_head(port or cluster.PORT)
    folder = BACKEND.start_queue(address)
    print(
        f"a queue on Ray runs at {address}, with its log in {folder}\n"
        f"on each other machine:   evenload queue --ray {address}\n"
        f"submit:                  evenload submit --backend ray -- COMMAND\n"
        f"list:                    evenload ps --backend ray\n"
        f"stop, on each machine:   ray stop"
    )


def _service(folder: Path) -> None:
    from evenload.scheduler.client import connect
    from evenload.scheduler.presence import is_running
    from evenload.scheduler.user_service import install

    has_run = (folder / "queue.sqlite").exists() and is_running(folder)

    def stop() -> None:
        if not has_run:
            return
        with connect(folder, start=False) as client:
            client.call("stop")  # systemd starts its own; jobs go on meanwhile
        until_s = time.monotonic() + _STOP_S
        while is_running(folder) and time.monotonic() < until_s:
            time.sleep(0.05)

    def start() -> None:
        if has_run:
            connect(folder).close()

    print(f"the queue's daemon starts at boot, and again if it dies: {install(folder, stop, start)}")


def _report(folder: Path, given: list[str], by: str | None, form: str) -> None:
    """Print the report from the queue's file if it can be read, else from the daemon."""
    from evenload.scheduler.job_lookup import has_readable_file
    from evenload.scheduler.store.reader import Reader
    from evenload.scheduler.store.usage import REPORT_KEYS, report_table, usage_rows
    from evenload.views.queue.usage import report_csv, report_json, report_lines

    if len(given) > 1:
        raise ConfigError(f"expected {_USAGE['report']}")
    keys, month = REPORT_KEYS if by is None else tuple(by.split(",")), given[0] if given else ""
    if has_readable_file(folder):
        from evenload.scheduler.daemon.queue_file import groups_of_users, read_queue_file

        with Reader(folder) as reader:
            groups = groups_of_users(read_queue_file(folder).groups)
            table = report_table(usage_rows(reader, groups, keys, month), keys)
    else:
        from evenload.scheduler.client import connect

        with connect(folder, start=False) as client:
            table = client.call("report", by=list(keys), month=month)
    print({"json": report_json, "csv": report_csv, "": report_lines}[form](table))


def _repair(folder: Path) -> None:
    from evenload.scheduler.store.backup import repair

    done = repair(folder)
    if done.damaged is None:
        print(f"the queue {folder} is whole: nothing was changed")
        return
    print("\n".join(["found:", *(f"  {problem}" for problem in done.problems[:10])]))
    source = f"{done.num_from_backup} from the backup {done.backup}, the others" if done.backup else "all"
    print(
        f"the queue has {done.num_events} events now: {source} from the damaged file, which is kept as {done.damaged}"
    )
    print("jobs and changes after the last of these events are lost; evenload queue start starts the daemon")
    if done.held:
        print(
            f"held back, because they have begun since, and may still run or have ended: job {', '.join(done.held)}; "
            f"evenload change JOB --release starts one again"
        )


def _show(client: Client, _: list[str]) -> tuple[Mapping[str, Any], str]:
    status = client.call("status")
    return status, _status_text(status)


def _stop(client: Client, _: list[str]) -> tuple[Mapping[str, Any], str]:
    answer = client.call("stop")
    from evenload.scheduler.paths import SYSTEM_FOLDER

    starts = "systemctl start evenload-queue" if client.folder == SYSTEM_FOLDER else "the next submit"
    return answer, f"the daemon (pid {answer['pid']}) is stopping; jobs continue, and {starts} starts it again"


def _start(client: Client, _: list[str]) -> tuple[Mapping[str, Any], str]:
    status = client.call("status")
    return status, f"the daemon (pid {status['pid']}) runs for the queue {status['folder']}"


def _set(client: Client, given: list[str]) -> tuple[Mapping[str, Any], str]:
    changes = _pairs(given)
    answer = client.call("set", settings=changes)
    return answer, ", ".join(f"{name} = {answer['settings'][name]}" for name in changes)


def _limit(client: Client, given: list[str]) -> tuple[Mapping[str, Any], str]:
    user, *rest = given
    read: dict[str, Callable[[str], Any]] = {
        "share": float,
        **dict.fromkeys(("max_devices", "max_running", "max_queued"), int),
        "budget_device_hours": float,
    }
    changes = {}
    for name, value in _pairs(rest).items():
        if name not in read:
            raise ConfigError(f"{name}: unknown limit; limits: {', '.join(read)}")
        try:
            changes[name] = None if value == "none" else read[name](value)
        except ValueError:
            raise ConfigError(f"{name}={value}: expected a {'whole ' * (read[name] is int)}number, or none") from None
    answer = client.call("limits", user=user, **changes)
    values = {name: answer["user"][name] for name in read}
    return answer, f"{user}: " + ", ".join(f"{n} {'none' if v is None else v}" for n, v in values.items())


def _reserve(client: Client, given: list[str], at: str | None, every: str | None) -> tuple[Mapping[str, Any], str]:
    from evenload.scheduler.job_syntax import read_duration_s, read_time_of_day_s
    from evenload.views.queue.text import moment

    devices, lasts, *users = given
    now_s = time.time()
    names = devices.split(",")
    try:
        start_s = now_s if at is None else read_time_of_day_s(at, now_s)
        end_s = start_s + read_duration_s(lasts)
    except ValueError as error:
        raise ConfigError(f"{lasts if at is None else f'{lasts} --at {at}'}: expected {error}") from None
    fields = {} if every is None else {"every": every}
    answer = client.call("reserve", devices=names, start_s=start_s, end_s=end_s, users=users, **fields)
    for_whom = ", ".join(users) or "nobody (maintenance)"
    made = answer["reservation"]
    is_now = at is None and made["start_s"] <= now_s + 1.0
    start_s, end_s = made["start_s"], made["end_s"]  # of a weekday's, the first may be on Monday
    begin = "now on" if is_now else moment(start_s)
    repeated = "" if every is None else f", every {every}"
    lines = [f"reservation {made['id']}: {devices} for {for_whom}, {lasts} from {begin}{repeated}"]
    for other in client.call("status")["reservations"]:
        both = sorted(set(other["devices"]) & set(made["devices"]))
        if not both or other["id"] == made["id"]:
            continue
        if max(other["start_s"], start_s) < min(other["end_s"], end_s):
            whose = ", ".join(other["users"]) or "nobody"
            lines.append(
                f"it overlaps {other['id']}, for {whose}: meanwhile only users of both may use {', '.join(both)}"
            )
        elif every or other["every"]:
            lines.append(f"{other['id']} is for {', '.join(both)} too: only the next windows of both were compared")
    return answer, "\n".join(lines)


def _release(client: Client, given: list[str]) -> tuple[Mapping[str, Any], str]:
    (name,) = given
    return client.call("unreserve", reservation=name), f"reservation {name} released"


_ACTIONS: dict[str, Callable[[Client, list[str]], tuple[Mapping[str, Any], str]]] = {
    "show": _show,
    "stop": _stop,
    "start": _start,
    "set": _set,
    "limit": _limit,
    "release": _release,
}


def _pairs(texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in found:
            raise ConfigError(f"{text}: expected NAME=VALUE, each name once")
        found[name] = value
    if not found:
        raise ValueError
    return found


def _status_text(status: Mapping[str, Any]) -> str:
    from evenload.views.queue.text import aligned, moment, span

    now_s = time.time()
    head = (
        f"queue {status['folder']}: daemon {status['pid']} of user {status['uid']}, Evenload {status['version']}, up for "
        f"{span(now_s - status['since_s'])}"
    )
    parts = [head, *(f"problem: {problem}" for problem in status["problems"])]
    parts.append("\n".join(aligned([("setting", "value"), *((n, str(v)) for n, v in status["settings"].items())])))
    if status["users"]:
        names = ("max_devices", "max_running", "max_queued", "share")
        rows = [
            (u["user"], str(u["num_devices"]), f"{u['usage_device_s'] / 3600:.1f}", *(str(u[n] or "") for n in names))
            for u in status["users"]
        ]
        parts.append("\n".join(aligned([("user", "devices", "recent device-hours", *names), *rows])))
    if budgets := [
        group for group in (*status["users"], *status["groups"]) if group["budget_device_hours"] is not None
    ]:
        rows = [
            (
                f"group {row['group']}" if "group" in row else row["user"],
                f"{row['month_device_hours']:.2f}",
                f"{row['budget_device_hours']:g}",
            )
            for row in budgets
        ]
        parts.append("\n".join(aligned([("budget of", "device-hours this month", "budget"), *rows])))
    if status["reservations"]:
        rows = [
            (
                r["id"],
                ",".join(r["devices"]),
                moment(r["start_s"]),
                moment(r["end_s"]),
                ",".join(r["users"]) or "nobody",
                r.get("every", ""),
            )
            for r in status["reservations"]
        ]
        parts.append("\n".join(aligned([("reservation", "devices", "from", "to", "for", "every"), *rows])))
    return "\n\n".join(parts)
