"""Write a job file as a batch script for `sbatch`.

An `#SBATCH` line contains only plain words, because Slurm parses these lines by its own rules and can't quote everything
that a shell can. All other text is quoted for the shell in the script's body. The body ends in `exec`, so that the signal
that Slurm sends to the batch script reaches `slurm.job`.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from evenload.errors import ConfigError
from evenload.scheduler.backends.interface import check_options, check_resolved
from evenload.scheduler.core.values import After
from evenload.scheduler.job_file import INDEX_VARIABLE, JobFile
from evenload.scheduler.job_syntax import array_text

OPTIONS = {
    "partition": "partition of nodes",
    "account": "account to charge",
    "qos": "quality of service",
    "constraint": "required node features",
    "reservation": "name of a reservation",
    "nodelist": "nodes to use",
    "exclude": "nodes to avoid",
    "licenses": "as --licenses",
    "mem": "memory per node, as --mem",
    "gres": "further resources per node, as --gres",
    "cpus_per_device": "cores per GPU",
    "nice": "as --nice; derived from the priority by default",
    "tasks": "device: start the command once per device (each is a rank); node: once per node",
    "setup": "a shell command to run first, such as module load cuda",
    "python": "the Python with Evenload on the nodes; by default the one that submits",
    "root": "folder for output and state, shared by all nodes",
}
"""Keys of a job file's `[slurm]` table."""

_PLAIN_OPTIONS = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "licenses", "mem")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;@=+\-/\[\]()&|*!]+")
_NICE_A_CLASS = 100
_MAX_NICE = 2_147_483_645
_MARGIN_S = 15
"""Time between the end of the grace period and Slurm's time limit, needed to requeue the job."""
_EARLY_S = 60
"""Slurm sends its signal up to this much earlier than requested."""
_DEPENDENCIES = {"ok": "afterok", "any": "afterany", "failed": "afternotok"}
CPU = "cpu"


def script(job: JobFile, root: Path, python: str) -> str:
    """Return the batch script, for the folder `root` and the interpreter `python` unless the job's options name others.

    Raises:
        ConfigError: Slurm does not support what the job requests, or an option is unknown or not a plain word.
    """
    check_resolved(job)
    options = job.options.get("slurm", {})
    check_options("slurm", options, OPTIONS)
    _check_possible(job)
    root = Path(options.get("root", str(root)))
    lines = [
        "#!/bin/bash",
        "# Written by `evenload submit --backend slurm`; submitted with `sbatch --parsable`.",
        *(f"#SBATCH {line}" for line in _head(job, root)),
        *(f"# {note}" for note in _notes(job)),
        f"cd {shlex.quote(job.folder)} || exit 1",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()),
        *([f'export {INDEX_VARIABLE}="$SLURM_ARRAY_TASK_ID"'] if job.array else []),
        *([options["setup"]] if "setup" in options else []),
        f"exec {' '.join(_call(job, root, options.get('python', python)))}",
    ]
    return "\n".join(lines) + "\n"


def root_of(job: JobFile, root: Path) -> Path:
    return Path(job.options.get("slurm", {}).get("root", str(root)))


def _check_possible(job: JobFile) -> None:
    if job.share_device:
        raise ConfigError(
            "share_device: on Slurm devices are shared only if the admin has configured it; request that with gres"
        )
    if job.memory_bytes and job.kinds != (CPU,):
        raise ConfigError(
            f"memory = {job.memory_bytes} bytes per device: Slurm does not know the memory of a GPU; set the kind of GPU, "
            f"or a feature of its nodes: [slurm] constraint = ..."
        )
    if len(job.kinds) > 1:
        raise ConfigError(
            f"kind = {', '.join(job.kinds)}: a Slurm job has one kind of device; set one, or a [slurm] constraint"
        )
    if others := [target for target in job.notify if not target.startswith("mail:")]:
        raise ConfigError(f"notify = {others[0]!r}: Slurm notifies only by mail; use mail:ADDRESS")
    for what, limit_s in (("soft", job.soft_limit_s), ("hard", job.hard_limit_s)):
        least_s = job.grace_s + _MARGIN_S + _EARLY_S
        if limit_s is not None and limit_s <= least_s:
            raise ConfigError(
                f"a {what} limit of {limit_s:g} s with a grace of {job.grace_s:g} s: Slurm would ask the program to save as "
                f"soon as it starts, because its signal may come {_EARLY_S} s early; set a limit above {least_s:g} s"
            )


def _head(job: JobFile, root: Path) -> list[str]:
    options = job.options.get("slurm", {})
    name = job.name or Path(job.command[0]).name
    output = f"{_plain('the folder for output and state', str(root))}/{'%A_%a' if job.array else '%j'}.log"
    lines = [
        f"--job-name={re.sub(r'[^A-Za-z0-9_.+=@,-]', '_', name)}",
        f"--output={output}",
        "--open-mode=append",
        "--requeue" if job.saves is not False or job.requeue or job.retries else "--no-requeue",
        f"--signal=B:TERM@{min(65535, math.ceil(job.grace_s) + _MARGIN_S)}",
        *_resources(job),
    ]
    if (limit_s := job.soft_limit_s or job.hard_limit_s) is not None:
        lines.append(f"--time={math.ceil(limit_s / 60)}")
    if job.array:
        lines.append(f"--array={array_text(job.array, job.array_limit)}")
    if job.after:
        lines += [f"--dependency={','.join(_dependency(after) for after in job.after)}", "--kill-on-invalid-dep=yes"]
    if job.notify:
        addresses = ",".join(target.removeprefix("mail:") for target in job.notify)
        lines += [f"--mail-user={_plain('notify', addresses)}", "--mail-type=END,FAIL"]
    lines += [f"--{key}={_plain(key, options[key])}" for key in _PLAIN_OPTIONS if key in options]
    if "nice" in options:
        lines.append(f"--nice={_number('nice', options['nice'], least=-_MAX_NICE)}")
    elif job.priority < 0:
        lines.append(f"--nice={-job.priority * _NICE_A_CLASS}")
    return lines


def _resources(job: JobFile) -> list[str]:
    """The lines for nodes, tasks and devices. Devices are counted over all nodes; without `nodes` there is one."""
    options, nodes = job.options.get("slurm", {}), job.nodes or 1
    per_node = job.min_devices // nodes
    is_cpu, per_device = job.kinds == (CPU,), "tasks" in options and options["tasks"] == "device"
    if options.get("tasks", "node") not in ("device", "node"):
        raise ConfigError(f"[slurm] tasks = {options['tasks']!r}: expected device or node")
    tasks = per_node if per_device else 1
    cores = 1 if is_cpu else _number("cpus_per_device", options.get("cpus_per_device", "0"))
    lines = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    if is_cpu and "cpus_per_device" in options:
        raise ConfigError("[slurm] cpus_per_device: the devices are CPUs; remove it")
    if cores:
        lines.append(f"--cpus-per-task={cores * per_node // tasks}")
    if is_cpu and job.memory_bytes:
        lines.append(f"--mem-per-cpu={math.ceil(job.memory_bytes / 2**20)}M")
    gres = [options["gres"]] if "gres" in options else []
    if not is_cpu:
        gres.insert(0, f"gpu:{f'{job.kinds[0]}:' if job.kinds else ''}{per_node}")
    if gres:
        lines.append(f"--gres={_plain('gres', ','.join(gres))}")
    return lines


def _notes(job: JobFile) -> list[str]:
    """Comments on what Slurm does differently from the request."""
    notes = []
    if job.min_devices < job.max_devices:
        notes.append(
            f"devices {job.min_devices}:{job.max_devices}: Slurm does not resize jobs; the job gets the minimum"
        )
    if job.priority > 0:
        notes.append(f"priority {job.priority}: only an admin can raise a job's priority in Slurm; ask for a qos")
    if job.soft_limit_s and job.hard_limit_s:
        notes.append(
            "the time limit is the soft limit: the job then saves and is requeued, until the hard limit is used up"
        )
    return notes


def _dependency(after: After) -> str:
    if not re.fullmatch(r"\d+(_\d+)?", after.job):
        raise ConfigError(f"after = {after.job!r}: expected the id of a Slurm job, such as 1234 or 1234_5")
    return f"{_DEPENDENCIES[after.condition]}:{after.job}"


def _call(job: JobFile, root: Path, python: str) -> list[str]:
    nodes, tasks = job.nodes or 1, job.options.get("slurm", {}).get("tasks", "node")
    call = [shlex.quote(python), "-m", "evenload.scheduler.backends.slurm.job", f"--root={shlex.quote(str(root))}"]
    call.append(f"--grace={job.grace_s:g}")
    if nodes > 1 and tasks == "node":
        call.append("--spread")
    if job.saves or job.requeue:
        call.append("--goes-on")
    if job.retries:
        call.append(f"--retries={job.retries}")
    if job.hard_limit_s is not None:
        call.append(f"--limit={job.hard_limit_s:g}")
    return [*call, "--", *(_word(word, is_element=bool(job.array)) for word in job.command)]


def _word(word: str, is_element: bool) -> str:
    """The word quoted for the shell, which inserts the index of an array's element."""
    if not is_element or "{index}" not in word:
        return shlex.quote(word)
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split("{index}"))


def _plain(what: str, value: str) -> str:
    if not _PLAIN.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r}: expected only letters, digits and . _ , : ; @ = + - / [ ] ( ) & | * !, because Slurm parses it "
            f"from an #SBATCH line"
        )
    return value


def _number(what: str, value: str, least: int = 0) -> int:
    if not re.fullmatch(r"-?\d{1,10}", value) or int(value) < least:
        raise ConfigError(f"[slurm] {what} = {value!r}: expected an integer >= {least}")
    return int(value)
