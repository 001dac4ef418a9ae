"""`JobFile`: what a person asks of a queue, read from a TOML file or from options; the same for every backend.

A file and the options of `evenload submit` are one table of values by the same keys (`KEYS`), each spelled alike. A key
that is unknown, of a wrong form, or set differently in two places is an error that says where. What is read is plain and
checked; `to_spec` and `to_program` make of it what the queue keeps.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.scheduler import job_syntax as read
from evenload.scheduler.core.values import After, JobSpec, Needs
from evenload.scheduler.program import JobProgram

BACKENDS = ("local", "slurm", "ray", "kubernetes")
"""Where a job can go; the tables of the same name hold what only that backend knows."""

INDEX_VARIABLE = "EVENLOAD_ARRAY_INDEX"
"""An array's element finds its index here, and in place of ``{index}`` in its command."""

DEFAULT_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class JobFile:
    """What was asked for, all backends alike. Each field but the last two is a key of the file or part of one."""

    command: tuple[str, ...]
    name: str = ""
    min_devices: int = 1
    max_devices: int = 1
    """Devices in all, over all nodes."""
    kinds: tuple[str, ...] = ()
    """Any of these; empty for any kind."""
    memory_bytes: int = 0
    """At least so much on each device."""
    one_kind: bool = False
    nodes: int | None = None
    """Machines; 1: all devices in one of them; None: as it comes."""
    priority: int = 0
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
    estimate_s: float | None = None
    """How long it will run on its least devices."""
    steps: int | None = None
    """All of its work."""
    saves: bool | None = None
    """Whether it saves and stops when asked; None: learned when it first reports (`evenload.job`, `evenload run`)."""
    after: tuple[After, ...] = ()
    array: tuple[int, ...] = ()
    array_limit: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[str, ...] = ()
    """Variables taken from the submitting shell."""
    folder: str = ""
    """Absolute; empty: where it is submitted."""
    snapshot: bool | None = None
    """None: where the folder is a git work tree."""
    links: tuple[str, ...] | None = None
    """Folders that a snapshot links to instead of having its own; None: `snapshots.LINKED`."""
    grace_s: float = DEFAULT_GRACE_S
    requeue: bool = False
    retries: int = 0
    notify: tuple[str, ...] = ()
    share_device: bool = False
    backend: str = "local"
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Backend → its own table."""

    @property
    def backend_options(self) -> Mapping[str, str]:
        """The table of the backend that is used."""
        return self.options.get(self.backend, {})

    def indices(self) -> tuple[int | None, ...]:
        """One index a job: those of the array, or a single None."""
        return self.array or (None,)

    def command_of(self, index: int | None) -> tuple[str, ...]:
        """The command of one element; the command itself without an array."""
        if index is None:
            return self.command
        return tuple(word.replace("{index}", str(index)) for word in self.command)

    def environment_of(self, index: int | None) -> dict[str, str]:
        """The variables set in the file, and the index of an element."""
        return dict(self.environment) if index is None else {**self.environment, INDEX_VARIABLE: str(index)}

    def name_of(self, index: int | None) -> str:
        """``sweep[3]`` for an element; else the name."""
        return self.name if index is None or not self.name else f"{self.name}[{index}]"


def to_spec(job: JobFile, user: str, *, index: int | None = None, array: str = "") -> JobSpec:
    """What the queue decides by, for one element.

    Args:
        job: what was asked for.
        user: its owner; a daemon takes the one that its socket names.
        index: of the array's element.
        array: the array's own name in the queue.
    """
    return JobSpec(
        user=user,
        needs=Needs(
            min_devices=job.min_devices,
            max_devices=job.max_devices,
            kinds=job.kinds,
            memory_bytes=job.memory_bytes,
            one_host=job.nodes == 1,
            one_kind=job.one_kind,
        ),
        name=job.name_of(index),
        priority=job.priority,
        preemptible=bool(job.saves) or job.requeue,
        estimate_s=job.estimate_s,
        total=None if job.steps is None else float(job.steps),
        soft_limit_s=job.soft_limit_s,
        hard_limit_s=job.hard_limit_s,
        after=job.after,
        array=array if job.array else "",
        array_limit=job.array_limit if job.array and array else None,
        retries=job.retries,
        share_device=job.share_device,
    )


def to_program(
    job: JobFile,
    uid: int,
    folder: str,
    *,
    inherited: Mapping[str, str] | None = None,
    snapshot: str = "",
    index: int | None = None,
) -> JobProgram:
    """What runs, for one element.

    Args:
        job: what was asked for.
        uid: its owner.
        folder: absolute; where it was submitted.
        inherited: variables of the submitting shell by name; those set in the file win.
        snapshot: the copy of the working tree, if one was taken.
        index: of the array's element.
    """
    return JobProgram(
        command=job.command_of(index),
        folder=folder,
        uid=uid,
        snapshot=snapshot,
        environment={**(inherited or {}), **job.environment_of(index)},
        grace_s=job.grace_s,
        requeue=job.requeue,
        notify=job.notify,
        backend=job.backend,
        options=dict(job.backend_options),
    )


def _into(*names: str) -> Callable[[Any], dict[str, Any]]:
    """A reader's value as one field, or its tuple as several."""
    return lambda value: {names[0]: value} if len(names) == 1 else dict(zip(names, value, strict=True))


KEYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], dict[str, Any]]]] = {
    "command": (read.read_words, _into("command")),
    "name": (read.read_name, _into("name")),
    "devices": (read.read_devices, _into("min_devices", "max_devices")),
    "kind": (read.read_kinds, _into("kinds")),
    "memory": (read.read_bytes, _into("memory_bytes")),
    "one_kind": (read.read_bool, _into("one_kind")),
    "nodes": (read.read_count(1, 10_000, "a number of machines"), _into("nodes")),
    "priority": (read.read_count(-1000, 1000, "a whole number"), _into("priority")),
    "time": (read.read_limits_s, _into("soft_limit_s", "hard_limit_s")),
    "estimate": (read.read_duration_s, _into("estimate_s")),
    "steps": (read.read_count(1, 2**62, "a number of steps"), _into("steps")),
    "saves": (read.read_bool, _into("saves")),
    "after": (read.read_after, _into("after")),
    "array": (read.read_array, _into("array", "array_limit")),
    "environment": (read.read_environment, _into("environment")),
    "inherit": (read.read_variables, _into("inherit")),
    "folder": (read.read_text, _into("folder")),
    "snapshot": (read.read_bool, _into("snapshot")),
    "links": (read.read_paths, _into("links")),
    "grace": (read.read_duration_s, _into("grace_s")),
    "requeue": (read.read_bool, _into("requeue")),
    "retries": (read.read_count(0, 1000, "a number of tries"), _into("retries")),
    "notify": (read.read_notify, _into("notify")),
    "share_device": (read.read_bool, _into("share_device")),
    "backend": (read.read_text, _into("backend")),
}
"""Key → its reader, and the fields that its value becomes. Beside these a file has tables by the names of `BACKENDS`."""


def read_table(path: Path) -> dict[str, Any]:
    """The table of a job file, its folder made absolute; its values are not read yet.

    Raises:
        ConfigError: the file can't be read, is no TOML, or has an unknown key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the job file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job file {path} is no TOML: {error}") from None
    for key in table:
        _known(key, [*KEYS, *BACKENDS], f"the job file {path}")
    if isinstance(table.get("folder"), str) and table["folder"]:
        table["folder"] = str(path.absolute().parent / Path(table["folder"]).expanduser())
    return table


def job_from(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> JobFile:
    """Reads a table of values, of a file or of options.

    Args:
        values: by the keys of `KEYS` and the names of `BACKENDS`.
        sources: key → how and where it was written, for errors.

    Raises:
        ConfigError: a key is unknown, a value can't be, or two don't go together.
    """
    read_values: dict[str, Any] = {}
    options: dict[str, dict[str, str]] = {}
    for key, value in values.items():
        where = (sources or {}).get(key, f"{key} = {value!r}")
        _known(key, [*KEYS, *BACKENDS], where)
        try:
            if key in KEYS:
                reader, into = KEYS[key]
                read_values |= into(reader(value))
            else:
                options[key] = read.read_options(value)
        except ValueError as error:
            raise ConfigError(f"{where}: expected {error}") from None
    if "command" not in read_values:
        raise ConfigError('there is no command: write it after --, or as command = "python train.py" in the job file')
    job = JobFile(**read_values, options=options)
    _check(job, values, sources or {})
    return job


def _check(job: JobFile, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """What no key alone can tell."""
    where = {key: sources.get(key, f"{key} = {value!r}") for key, value in values.items()}
    if job.backend not in BACKENDS:
        raise ConfigError(f"{where['backend']}: expected one of {', '.join(BACKENDS)}{_nearest(job.backend, BACKENDS)}")
    read.check_no_overlap(job.environment, job.inherit)
    if job.nodes is not None and (job.min_devices % job.nodes or job.max_devices % job.nodes):
        raise ConfigError(
            f"{where['nodes']} with devices {job.min_devices}:{job.max_devices}: devices are counted over all nodes, so "
            f"both numbers must be multiples of {job.nodes}"
        )
    if job.backend == "local" and job.nodes is not None and job.nodes > 1:
        raise ConfigError(
            f"{where['nodes']}: the local queue has one machine; name another backend (slurm, ray, kubernetes)"
        )
    if job.share_device and job.max_devices > 1:
        raise ConfigError(
            f"{where['share_device']}: jobs that share a device have one; this asks for {job.max_devices}"
        )
    if not job.array and any("{index}" in word for word in job.command):
        raise ConfigError('{index} stands in the command, but the job is no array: add array = "0-9", or --array 0-9')
    if job.estimate_s and job.hard_limit_s and job.estimate_s > job.hard_limit_s:
        raise ConfigError(f"{where['estimate']}: it would be ended before, by {where['time']}")


def as_table(job: JobFile) -> dict[str, Any]:
    """The job as a table by the keys of a file; `job_from` reads it back. What has its default is left out."""
    table, plain = _written(job), _written(JobFile(job.command))
    kept = {key: value for key, value in table.items() if key == "command" or value != plain[key]}
    return kept | {name: dict(options) for name, options in job.options.items()}


def _written(job: JobFile) -> dict[str, Any]:
    """Each key as a person would write it; None, empty or false where there is nothing to say."""
    least, most = job.min_devices, job.max_devices
    soft, hard = ("" if s is None else read.duration_text(s) for s in (job.soft_limit_s, job.hard_limit_s))
    return {
        "command": list(job.command),
        "name": job.name,
        "devices": least if least == most else f"{least}:{most}",
        "kind": list(job.kinds),
        "memory": read.bytes_text(job.memory_bytes),
        "one_kind": job.one_kind,
        "nodes": job.nodes,
        "priority": job.priority,
        "time": f"{soft}:{hard}" if hard else soft,
        "estimate": None if job.estimate_s is None else read.duration_text(job.estimate_s),
        "steps": job.steps,
        "saves": job.saves,
        "after": [read.spelled(after) for after in job.after],
        "array": read.array_text(job.array, job.array_limit),
        "environment": dict(job.environment),
        "inherit": list(job.inherit),
        "folder": job.folder,
        "snapshot": job.snapshot,
        "links": None if job.links is None else list(job.links),
        "grace": read.duration_text(job.grace_s),
        "requeue": job.requeue,
        "retries": job.retries,
        "notify": list(job.notify),
        "share_device": job.share_device,
        "backend": job.backend,
    }


def merged(options: Mapping[str, tuple[Any, str]], path: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Options and a job file as one table, and where each value was written.

    Args:
        options: key → (value, how it was written on the command line).
        path: the job file, if one is named.

    Raises:
        ConfigError: the file can't be read, or says otherwise than an option.
    """
    values = {key: value for key, (value, _) in options.items()}
    sources = {key: written for key, (_, written) in options.items()}
    if path is None:
        return values, sources
    for key, value in read_table(path).items():
        written = f"{key} = {_shown(value)} in {path}"
        if key in values and key in ("environment", *BACKENDS) and isinstance(value, dict):
            values[key] = _joined(value, values[key], written, sources[key])
            sources[key] = f"{sources[key]} and {written}"
        elif key in values and _meaning(key, values[key]) != _meaning(key, value):
            raise ConfigError(f"{key} is set twice, differently: {sources[key]} and {written}; remove one of them")
        elif key not in values:
            values[key], sources[key] = value, written
    return values, sources


def _joined(file: dict[str, Any], option: dict[str, Any], written: str, spelled: str) -> dict[str, Any]:
    for name in file.keys() & option.keys():
        if str(file[name]) != str(option[name]):
            raise ConfigError(f"{name} is set twice, differently: {spelled} and {written}; remove one of them")
    return {**file, **option}


def _meaning(key: str, value: Any) -> Any:
    """Equal where two ways of writing mean the same; the value itself where it can't be read (an error of its own)."""
    try:
        return KEYS[key][0](value)
    except ValueError:
        return value


def _shown(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _known(key: str, names: list[str], where: str) -> None:
    if key not in names:
        raise ConfigError(f"{where}: there is no key {key!r}{_nearest(key, names)}; the keys are {', '.join(names)}")


def _nearest(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""
