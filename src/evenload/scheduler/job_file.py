"""`JobFile`: a job request, read from a TOML file or from options; the same for every backend.

A file and the options of `evenload submit` form one table with the same keys (`KEYS`) and the same syntax. An unknown key, an
invalid value, or different values in two places are errors that name the place. `to_spec` and `to_program` convert a
`JobFile` to what the queue stores.
"""

from __future__ import annotations

import difflib
import time
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
"""The backends; a table of the same name in a job file holds a backend's own options."""

INDEX_VARIABLE = "EVENLOAD_ARRAY_INDEX"
"""Variable with the index of an array's element, which also replaces `{index}` in its command."""

DEFAULT_GRACE_S = 60.0
_LOCAL_ONLY = {
    "idle_end": ("idle_end_s", "watches its devices"),
    "begin": ("begin", "holds jobs until a time"),
    "deadline": ("deadline", "plans for deadlines"),
}
"""Keys that other backends can't do: the field of `JobFile`, and what the local queue does for it."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job request. Each field but the last three is a key of the file or a part of one."""

    command: tuple[str, ...]
    name: str = ""
    min_devices: int = 1
    max_devices: int = 1
    """Total number of devices, over all nodes."""
    kinds: tuple[str, ...] = ()
    memory_bytes: int = 0
    one_kind: bool = False
    nodes: int | None = None
    """Number of machines; 1: all devices in one machine; None: any number."""
    priority: int = 0
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
    estimate_s: float | None = None
    """Expected run time on the minimum number of devices."""
    begin: str = ""
    """It doesn't start before: `8h` from its submission, or a time of day (`job_syntax.moment_s`); empty for none."""
    deadline: str = ""
    """Time by which it is to have ended, likewise."""
    steps: int | None = None
    saves: bool | None = None
    """True if it saves and stops on request; None: detected by its first report (`evenload.job`, `evenload run`)."""
    after: tuple[After, ...] = ()
    array: tuple[int, ...] = ()
    array_limit: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[str, ...] = ()
    folder: str = ""
    """Absolute; empty: the folder in which the job is submitted."""
    image: str = ""
    """Container image in which the command runs; empty for none."""
    snapshot: bool | None = None
    """None: yes if the folder is in a git work tree."""
    links: tuple[str, ...] | None = None
    """Folders that a snapshot links to instead of copying them; None: `snapshots.LINKED`."""
    grace_s: float = DEFAULT_GRACE_S
    idle_end_s: float | None = None
    """It is ended once all of its devices have been idle for so long; None: never."""
    requeue: bool = False
    retries: int = 0
    notify: tuple[str, ...] = ()
    share_device: bool = False
    pty: bool = False
    """It has a terminal; no key of a file: somebody must sit at the other end."""
    backend: str = "local"
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def backend_options(self) -> Mapping[str, str]:
        return self.options.get(self.backend, {})

    def indices(self) -> tuple[int | None, ...]:
        """Return the index of each job: those of the array, or a single None."""
        return self.array or (None,)

    def command_of(self, index: int | None) -> tuple[str, ...]:
        """Return the command of an element; without an array, the command itself."""
        if index is None:
            return self.command
        return tuple(word.replace("{index}", str(index)) for word in self.command)

    def environment_of(self, index: int | None) -> dict[str, str]:
        return dict(self.environment) if index is None else {**self.environment, INDEX_VARIABLE: str(index)}

    def name_of(self, index: int | None) -> str:
        """Return `sweep[3]` for an element, otherwise the name."""
        return self.name if index is None or not self.name else f"{self.name}[{index}]"


def to_spec(job: JobFile, user: str, *, index: int | None = None, array: str = "") -> JobSpec:
    """Return the values that the queue schedules an element by.

    A daemon replaces `user` by the one that the kernel reports. `array` is the id of the array in the queue.
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
        not_before_s=read.moment_s(job.begin, time.time()) if job.begin else None,
        deadline_s=read.moment_s(job.deadline, time.time()) if job.deadline else None,
        delays=read.delays_of(not_before_s=job.begin, deadline_s=job.deadline),
        total=None if job.steps is None else float(job.steps),
        soft_limit_s=job.soft_limit_s,
        hard_limit_s=job.hard_limit_s,
        after=job.after,
        array=array if job.array else "",
        array_limit=job.array_limit if job.array and array else None,
        retries=job.retries,
        share_device=job.share_device,
    )


def to_program(job: JobFile, uid: int, folder: str, *, snapshot: str = "", index: int | None = None) -> JobProgram:
    """Return the program of an element; `folder` is absolute, `snapshot` the copy of the working tree, if any."""
    return JobProgram(
        command=job.command_of(index),
        folder=folder,
        uid=uid,
        snapshot=snapshot,
        image=job.image,
        environment=job.environment_of(index),
        grace_s=job.grace_s,
        idle_end_s=job.idle_end_s,
        requeue=job.requeue,
        pty=job.pty,
        notify=job.notify,
        backend=job.backend,
        options=dict(job.backend_options),
    )


KEYS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...], Callable[..., Any]]] = {
    "command": (read.read_words, ("command",), list),
    "name": (read.read_name, ("name",), str),
    "devices": (read.read_devices, ("min_devices", "max_devices"), read.devices_text),
    "kind": (read.read_kinds, ("kinds",), list),
    "memory": (read.read_bytes, ("memory_bytes",), read.bytes_text),
    "one_kind": (read.read_bool, ("one_kind",), bool),
    "nodes": (read.read_count(1, 10_000, "a number of machines"), ("nodes",), int),
    "priority": (read.read_count(-1000, 1000, "an integer"), ("priority",), int),
    "time": (read.read_limits_s, ("soft_limit_s", "hard_limit_s"), read.limits_text),
    "estimate": (read.read_duration_s, ("estimate_s",), read.duration_text),
    "begin": (read.read_moment, ("begin",), str),
    "deadline": (read.read_moment, ("deadline",), str),
    "steps": (read.read_count(1, 2**62, "a number of steps"), ("steps",), int),
    "saves": (read.read_bool, ("saves",), bool),
    "after": (read.read_after, ("after",), read.after_texts),
    "array": (read.read_array, ("array", "array_limit"), read.array_text),
    "environment": (read.read_environment, ("environment",), dict),
    "inherit": (read.read_variables, ("inherit",), list),
    "folder": (read.read_text, ("folder",), str),
    "image": (read.read_text, ("image",), str),
    "snapshot": (read.read_bool, ("snapshot",), bool),
    "links": (read.read_paths, ("links",), list),
    "grace": (read.read_grace_s, ("grace_s",), read.duration_text),
    "idle_end": (read.read_idle_end_s, ("idle_end_s",), read.duration_text),
    "requeue": (read.read_bool, ("requeue",), bool),
    "retries": (read.read_count(0, 1000, "a number of retries"), ("retries",), int),
    "notify": (read.read_notify, ("notify",), list),
    "share_device": (read.read_bool, ("share_device",), bool),
    "backend": (read.read_text, ("backend",), str),
}
"""Key → (its reader, the fields that its value becomes, the writer of these). A file also has tables named as `BACKENDS`."""


def read_table(path: Path) -> dict[str, Any]:
    """Read the table of a job file and make its folder absolute; its values are not parsed yet.

    Raises `ConfigError` if the file can't be read, is not TOML, or has an unknown key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read the job file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job file {path} is not valid TOML: {error}") from None
    for key in table:
        _known(key, [*KEYS, *BACKENDS], f"the job file {path}")
    if isinstance(table.get("folder"), str) and table["folder"]:
        table["folder"] = str(path.absolute().parent / Path(table["folder"]).expanduser())
    return table


def job_from(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> JobFile:
    """Parse a table of values from a file or from options, by the keys of `KEYS` and the names of `BACKENDS`.

    `sources` (key → how and where it was written) is for errors. Raises `ConfigError` if a key is unknown, a value is
    invalid, or two values contradict each other.
    """
    read_values: dict[str, Any] = {}
    options: dict[str, dict[str, str]] = {}
    for key, value in values.items():
        where = (sources or {}).get(key, f"{key} = {value!r}")
        _known(key, [*KEYS, *BACKENDS], where)
        try:
            if key in KEYS:
                reader, names, _ = KEYS[key]
                parsed = reader(value)
                read_values |= zip(names, (parsed,) if len(names) == 1 else parsed, strict=True)
            else:
                options[key] = read.read_options(value)
        except ValueError as error:
            raise ConfigError(f"{where}: expected {error}") from None
    if "command" not in read_values:
        raise ConfigError('no command given: write it after --, or set command = "python train.py" in the job file')
    job = JobFile(**read_values, options=options)
    _check(job, values, sources or {})
    return job


def _check(job: JobFile, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    where = {key: sources.get(key, f"{key} = {value!r}") for key, value in values.items()}
    if job.backend not in BACKENDS:
        raise ConfigError(f"{where['backend']}: expected one of {', '.join(BACKENDS)}{_nearest(job.backend, BACKENDS)}")
    if both := sorted(set(job.environment) & set(job.inherit)):
        raise ConfigError(f"{both[0]} is both set in environment and named in inherit; remove one of them")
    if job.nodes is not None and (job.min_devices % job.nodes or job.max_devices % job.nodes):
        raise ConfigError(
            f"{where['nodes']} with devices {job.min_devices}:{job.max_devices}: devices are counted over all nodes, so "
            f"both numbers must be multiples of {job.nodes}"
        )
    if job.backend == "local" and job.nodes is not None and job.nodes > 1:
        raise ConfigError(
            f"{where['nodes']}: the local queue has one machine; use another backend (slurm, ray, kubernetes)"
        )
    if job.share_device and job.max_devices > 1:
        raise ConfigError(
            f"{where['share_device']}: a job that shares a device can have only one; this job requests {job.max_devices}"
        )
    for key, (name, does) in _LOCAL_ONLY.items():
        if job.backend != "local" and getattr(job, name) not in (None, ""):
            raise ConfigError(f"{where[key]}: only the local queue {does}; remove it")
    if job.image and job.backend != "local":
        hint = (
            "write it as image below [kubernetes]"
            if job.backend == "kubernetes"
            else "start the container in the command"
        )
        raise ConfigError(f"{where['image']}: only the local queue starts containers; {hint}")
    if not job.array and any("{index}" in word for word in job.command):
        raise ConfigError('the command contains {index}, but the job is not an array: add array = "0-9" or --array 0-9')
    if job.estimate_s and job.hard_limit_s and job.estimate_s > job.hard_limit_s:
        raise ConfigError(f"{where['estimate']} exceeds the hard limit {where['time']}")
    now_s = time.time()
    if job.begin and job.deadline and read.moment_s(job.begin, now_s) >= read.moment_s(job.deadline, now_s):
        raise ConfigError(f"{where['begin']} is not before {where['deadline']}: the job could never meet its deadline")
    if job.deadline and job.share_device:
        raise ConfigError(f"{where['deadline']}: a job that may share its device isn't planned for; remove one of them")


def as_table(job: JobFile) -> dict[str, Any]:
    """Return the job as the table of a file, without default values; `job_from` reads it back."""
    default = JobFile(job.command)
    table = {}
    for key, (_, names, write) in KEYS.items():
        values = [getattr(job, name) for name in names]
        if key == "command" or values != [getattr(default, name) for name in names]:
            table[key] = write(*values)
    return table | {name: dict(options) for name, options in job.options.items()}


def merged(options: Mapping[str, tuple[Any, str]], path: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge options (key → value, how it was written) with a job file; return the table and each value's source.

    Raises `ConfigError` if the file can't be read, or contradicts an option.
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
            raise ConfigError(f"{key} has two different values: {sources[key]} and {written}; remove one of them")
        elif key not in values:
            values[key], sources[key] = value, written
    return values, sources


def _joined(file: dict[str, Any], option: dict[str, Any], written: str, source: str) -> dict[str, Any]:
    for name in file.keys() & option.keys():
        if str(file[name]) != str(option[name]):
            raise ConfigError(f"{name} has two different values: {source} and {written}; remove one of them")
    return {**file, **option}


def _meaning(key: str, value: Any) -> Any:
    """The parsed value, which is equal for two spellings of the same; the value itself if it is invalid."""
    try:
        return KEYS[key][0](value)
    except ValueError:
        return value


def _shown(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _known(key: str, names: list[str], where: str) -> None:
    if key not in names:
        raise ConfigError(f"{where}: unknown key {key!r}{_nearest(key, names)}; keys: {', '.join(names)}")


def _nearest(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""
