"""A job file as a batch script for ``sbatch``: which options ask Slurm for what, and how the program is started in it.

No text of the user's stands in an ``#SBATCH`` line unless it is a plain word (Slurm reads these lines by rules of its own,
and has no way to quote all that a shell can); everything else is quoted for the shell in the script's body. The body ends
in ``exec``, so that the signal that Slurm sends to the batch script reaches `slurm_job`, which knows what to do.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from evenload.errors import ConfigError
from evenload.scheduler.backends.interface import check_options, check_settled
from evenload.scheduler.core.values import After
from evenload.scheduler.job_file import INDEX_VARIABLE, JobFile
from evenload.scheduler.job_syntax import array_text

OPTIONS = {
    "partition": "of nodes",
    "account": "who pays",
    "qos": "quality of service",
    "constraint": "features of nodes",
    "reservation": "its name",
    "nodelist": "these nodes",
    "exclude": "not these nodes",
    "licenses": "as --licenses",
    "mem": "memory of a node, as --mem",
    "gres": "further resources of a node, as --gres",
    "cpus_per_device": "cores beside each GPU",
    "nice": "as --nice; else it follows from the priority",
    "tasks": "device: start the command once a device (each is a rank); node: once a node",
    "setup": "a line of shell before the program, such as module load cuda",
    "python": "the Python that has Evenload on the nodes; else the one that submits",
    "root": "a folder that all nodes share, for output and state",
}
"""What a job file's ``[slurm]`` table may hold."""

_PLAIN_OPTIONS = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "licenses", "mem")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;@=+\-/\[\]()&|*!]+")
_NICE_A_CLASS = 100
_MAX_NICE = 2_147_483_645
_MARGIN_S = 15
"""Between the end of the grace and Slurm's own end: to put the job back into the queue."""
_EARLY_S = 60
"""Slurm sends its signal up to so much earlier than asked for."""
_DEPENDENCIES = {"ok": "afterok", "any": "afterany", "failed": "afternotok"}
CPU = "cpu"


def script(job: JobFile, root: Path, python: str) -> str:
    """The batch script.

    Args:
        job: as `interface.settled` returns it.
        root: the folder of output and state where the job's options name none.
        python: runs `slurm_job` on the node where they name none.

    Raises:
        ConfigError: Slurm can't do what is asked for, or an option is unknown or no plain word.
    """
    check_settled(job)
    options = job.options.get("slurm", {})
    check_options("slurm", options, OPTIONS)
    _check_possible(job)
    root = Path(options.get("root", str(root)))
    lines = [
        "#!/bin/bash",
        "# Written by `evenload submit --backend slurm`; it is sent with `sbatch --parsable`.",
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
    """Where its output and state will be."""
    return Path(job.options.get("slurm", {}).get("root", str(root)))


def _check_possible(job: JobFile) -> None:
    if job.share_device:
        raise ConfigError("share_device: Slurm shares a device where its admin has set that up; ask for it with gres")
    if job.memory_bytes and job.kinds != (CPU,):
        raise ConfigError(
            f"memory = {job.memory_bytes} bytes a device: Slurm doesn't know the memory of a GPU; name a kind of GPU, or "
            f"the feature of its nodes: [slurm] constraint = ..."
        )
    if len(job.kinds) > 1:
        raise ConfigError(
            f"kind = {', '.join(job.kinds)}: a job of Slurm has one kind; name one, or a [slurm] constraint"
        )
    if others := [teller for teller in job.notify if not teller.startswith("mail:")]:
        raise ConfigError(f"notify = {others[0]!r}: Slurm notifies by mail alone; write mail:ADDRESS")
    for what, limit_s in (("soft", job.soft_limit_s), ("hard", job.hard_limit_s)):
        least_s = job.grace_s + _MARGIN_S + _EARLY_S
        if limit_s is not None and limit_s <= least_s:
            raise ConfigError(
                f"a {what} limit of {limit_s:g} s with a grace of {job.grace_s:g} s: Slurm would ask the program to save as "
                f"soon as it starts, because its signal may come {_EARLY_S} s early; expected more than {least_s:g} s"
            )


def _head(job: JobFile, root: Path) -> list[str]:
    options = job.options.get("slurm", {})
    name = job.name or Path(job.command[0]).name
    output = f"{_plain('the folder of output and state', str(root))}/{'%A_%a' if job.array else '%j'}.log"
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
        addresses = ",".join(teller.removeprefix("mail:") for teller in job.notify)
        lines += [f"--mail-user={_plain('notify', addresses)}", "--mail-type=END,FAIL"]
    lines += [f"--{key}={_plain(key, options[key])}" for key in _PLAIN_OPTIONS if key in options]
    if "nice" in options:
        lines.append(f"--nice={_number('nice', options['nice'], least=-_MAX_NICE)}")
    elif job.priority < 0:
        lines.append(f"--nice={-job.priority * _NICE_A_CLASS}")
    return lines


def _resources(job: JobFile) -> list[str]:
    """Devices are counted over all nodes; those of a job without a number of nodes are taken from one."""
    options, nodes = job.options.get("slurm", {}), job.nodes or 1
    per_node = job.min_devices // nodes
    is_cpu, per_device = job.kinds == (CPU,), "tasks" in options and options["tasks"] == "device"
    if options.get("tasks", "node") not in ("device", "node"):
        raise ConfigError(f"[slurm] tasks = {options['tasks']!r}: expected device or node")
    tasks = per_node if per_device else 1
    cores = 1 if is_cpu else _number("cpus_per_device", options.get("cpus_per_device", "0"))
    lines = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    if is_cpu and "cpus_per_device" in options:
        raise ConfigError("[slurm] cpus_per_device: the devices are CPUs themselves; leave it out")
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
    """What Slurm can't do as asked, for whoever reads the script."""
    notes = []
    if job.min_devices < job.max_devices:
        notes.append(f"devices {job.min_devices}:{job.max_devices}: Slurm doesn't change them later; it gets the least")
    if job.priority > 0:
        notes.append(f"priority {job.priority}: a user of Slurm can't go above the others; ask its admin for a qos")
    if job.soft_limit_s and job.hard_limit_s:
        notes.append(
            "the time limit is the soft one: then it saves and waits in line again, until the hard one is used up"
        )
    return notes


def _dependency(after: After) -> str:
    if not re.fullmatch(r"\d+(_\d+)?", after.job):
        raise ConfigError(f"after = {after.job!r}: expected the id of a job of Slurm, such as 1234 or 1234_5")
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
    """Quoted for the shell; an element's index is put in by it."""
    if not is_element or "{index}" not in word:
        return shlex.quote(word)
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split("{index}"))


def _plain(what: str, value: str) -> str:
    if not _PLAIN.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r}: expected letters, digits and . _ , : ; @ = + - / [ ] ( ) & | * ! alone, as Slurm reads it from "
            f"a line of its own"
        )
    return value


def _number(what: str, value: str, least: int = 0) -> int:
    if not re.fullmatch(r"-?\d{1,10}", value) or int(value) < least:
        raise ConfigError(f"[slurm] {what} = {value!r}: expected a whole number of at least {least}")
    return int(value)
