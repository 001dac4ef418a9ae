"""``evenload submit``: put a command, or a job file, into the queue."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from evenload.cli.jobs import Queue, folder_of
from evenload.cli.submitted import Wishes, submit_job
from evenload.errors import ConfigError
from evenload.scheduler.job_file import job_from, merged

CONTEXT_SETTINGS = {"allow_interspersed_args": False}


class SubmitCommand(TyperCommand):
    """Options, then the command and whatever is its own. Behind a job file options go on, up to ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Moves a job file behind the options that follow it."""
        index = self._first_word(args)
        if index < len(args) and args[index].endswith(".toml") and "--" not in args[:index]:
            rest = args[index + 1 :]
            end = rest.index("--") if "--" in rest else len(rest)
            args = [*args[:index], *rest[:end], "--", args[index], *rest[end + 1 :]]
        return super().parse_args(ctx, args)

    def _first_word(self, args: list[str]) -> int:
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.params
            for name in (*getattr(param, "opts", ()), *getattr(param, "secondary_opts", ()))
        }
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] != "--":
            index += 2 if takes_value.get(args[index], False) else 1
        return index


COMMAND_CLASS = SubmitCommand


def submit(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB.toml or -- COMMAND", help="The command, or a job file."),
    ] = None,
    devices: Annotated[
        str | None, typer.Option("-d", "--devices", metavar="N or MIN:MAX", help="How many devices; 1 if not given.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="A kind of device that may serve, such as a100; several with commas.")
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="At least so much on each device: 20G.")] = None,
    one_kind: Annotated[bool, typer.Option("--one-kind", help="All devices of one kind.")] = False,
    nodes: Annotated[int | None, typer.Option(help="Machines; 1: all devices in one of them.")] = None,
    priority: Annotated[
        int | None, typer.Option(help="Higher goes first; below 0 takes idle devices only and gives them back.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="SOFT[:HARD]", help="Goes to the end of the line after SOFT; ends after HARD.")
    ] = None,
    estimate: Annotated[str | None, typer.Option(metavar="TIME", help="How long it will run: 90m.")] = None,
    steps: Annotated[int | None, typer.Option(help="All of its steps, where it doesn't report them itself.")] = None,
    saves: Annotated[
        bool | None,
        typer.Option("--saves/--no-saves", help="Whether it saves and stops when asked; learned if not given."),
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(metavar="JOB[:ok|any|failed]", help="Start when that job ended so.")
    ] = None,
    array: Annotated[
        str | None, typer.Option(metavar="0-9[%4]", help="One job for each index, {index} in the command; % at once.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A variable for it; NAME alone: as in this shell.")
    ] = None,
    folder: Annotated[str | None, typer.Option(metavar="DIR", help="Where it runs; here if not given.")] = None,
    snapshot: Annotated[
        bool | None,
        typer.Option("--snapshot/--no-snapshot", help="Copy the working tree now; the default where it is under git."),
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(metavar="DIR", help="The snapshot links to this folder instead of a copy.")
    ] = None,
    grace: Annotated[str | None, typer.Option(metavar="TIME", help="From the request to stop to its end: 60s.")] = None,
    requeue: Annotated[bool, typer.Option("--requeue", help="It may be ended and started from the beginning.")] = False,
    retries: Annotated[int | None, typer.Option(help="Try it again so often where it fails.")] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help="command:COMMAND, webhook:URL or mail:ADDRESS, when it has ended."),
    ] = None,
    share_device: Annotated[
        bool, typer.Option("--share-device", help="It may share its device with jobs that ask the same.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="For lists, and for cancel, logs and show.")] = None,
    backend: Annotated[str | None, typer.Option(help="local, slurm, ray or kubernetes.")] = None,
    backend_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For the backend; may be repeated.")
    ] = None,
    queue: Queue = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; queue nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end, and end with its exit code.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the jobs' numbers as JSON.")] = False,
) -> None:
    """Queue a command, or a job file; print its number and how to watch it."""
    words = list(arguments or ())
    path, command = _split(words)
    given: dict[str, tuple[Any, str]] = {}

    def put(key: str, value: Any, written: str) -> None:
        if value is not None and value is not False and value != []:
            given[key] = (value, written)

    put("devices", devices, f"--devices {devices}")
    put("kind", [part for text in kind or [] for part in text.split(",")], f"--kind {','.join(kind or [])}")
    put("memory", memory, f"--memory {memory}")
    put("one_kind", one_kind, "--one-kind")
    put("nodes", nodes, f"--nodes {nodes}")
    put("priority", priority, f"--priority {priority}")
    put("time", time, f"--time {time}")
    put("estimate", estimate, f"--estimate {estimate}")
    put("steps", steps, f"--steps {steps}")
    put("after", after, f"--after {' --after '.join(after or [])}")
    put("array", array, f"--array {array}")
    put("folder", None if folder is None else str(Path(folder).expanduser().absolute()), f"--folder {folder}")
    put("links", link, f"--link {' --link '.join(link or [])}")
    put("grace", grace, f"--grace {grace}")
    put("requeue", requeue, "--requeue")
    put("retries", retries, f"--retries {retries}")
    put("notify", notify, f"--notify {' --notify '.join(notify or [])}")
    put("share_device", share_device, "--share-device")
    put("name", name, f"--name {name}")
    put("backend", backend, f"--backend {backend}")
    for key, value in (("saves", saves), ("snapshot", snapshot)):
        if value is not None:
            given[key] = (value, f"--{key}" if value else f"--no-{key}")
    given |= _environment(env or [])
    given |= _backend_options(backend, backend_option or [])
    if command and path is None:
        given["command"] = (command, "the command")
    values, sources = merged(given, path)
    if path is not None and command:
        values["command"] = _longer(values.get("command"), command)
    job = job_from(values, sources)
    wishes = Wishes(folder_of(queue), dry_run=dry_run, waits=wait, as_json=json)
    raise typer.Exit(submit_job(job, wishes, Path.cwd(), dict(os.environ), sys.stdout))


def _split(words: list[str]) -> tuple[Path | None, list[str]]:
    """A job file and what is added to its command, or a command."""
    if words and words[0].endswith(".toml"):
        return Path(words[0]), words[1:]
    return None, words


def _longer(command: Any, more: list[str]) -> list[str]:
    """The file's command with further words."""
    from evenload.scheduler.job_syntax import read_words

    if command is None:
        return more
    try:
        return [*read_words(command), *more]
    except ValueError as error:
        raise ConfigError(f"command = {command!r}: expected {error}") from None


def _environment(texts: list[str]) -> dict[str, tuple[Any, str]]:
    values: dict[str, str] = {}
    names: list[str] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if name in values or name in names:
            raise ConfigError(f"--env {text}: {name} is given twice; give it once")
        if equals:
            values[name] = value
        else:
            names.append(name)
    found: dict[str, tuple[Any, str]] = {}
    if values:
        found["environment"] = (values, " ".join(f"--env {name}" for name in values))
    if names:
        found["inherit"] = (names, " ".join(f"--env {name}" for name in names))
    return found


def _backend_options(backend: str | None, texts: list[str]) -> dict[str, tuple[Any, str]]:
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in options:
            raise ConfigError(f"--backend-option {text}: expected NAME=VALUE, each name once")
        options[name] = value
    if not options:
        return {}
    if backend is None:
        raise ConfigError(f"--backend-option {texts[0]} is for a backend: name it by --backend")
    return {backend: (options, f"--backend-option {' '.join(texts)}")}
