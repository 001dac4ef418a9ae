"""Commands that run a job's program in a container image, by podman or apptainer."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from evenload.errors import ConfigError

RUNTIMES = ("podman", "apptainer", "singularity")
"""The first that is installed runs a job; no daemon with the rights of root is needed for any."""

_OF_THE_MACHINE = frozenset(
    ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "HOME", "SHELL")
)
"""Variables that name files of the machine: the image has its own."""


def find_runtime(path: str) -> str:
    """Return the path of the container runtime; a `ConfigError` without one. `path`: the job's PATH."""
    for name in RUNTIMES:
        if found := shutil.which(name, path=path):
            return found
    raise ConfigError(f"image: this machine has none of {', '.join(RUNTIMES)} in the job's PATH; install one of them")


def container_command(
    runtime: str,
    image: str,
    command: Sequence[str],
    *,
    folder: str,
    mounts: Iterable[str],
    variables: Mapping[str, str],
    has_terminal: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `command` in the image, and the variables to start it with.

    The program sees the folders `mounts` under their own paths, starts in `folder`, uses the machine's network and shared memory,
    and gets `variables` except those that name files of the machine. Their values are not on the command line, which others
    can read. Of GPUs it sees those of CUDA_VISIBLE_DEVICES.
    """
    passed = [name for name in variables if name not in _OF_THE_MACHINE]
    started_with = {name: variables[name] for name in variables if name in passed or name in ("PATH", "HOME")}
    gpus = [name for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    shown = list(dict.fromkeys(mounts))
    if Path(runtime).name == "podman":
        options = ["--rm", "--network=host", "--ipc=host", "--security-opt=label=disable", f"--workdir={folder}"]
        options += [f"--volume={mount}:{mount}" for mount in shown]
        options += [f"--env={name}" for name in passed]
        options += [f"--device=nvidia.com/gpu={gpu}" for gpu in gpus]
        options += ["--interactive", "--tty"] if has_terminal else []  # apptainer has that in which it is started
        return [runtime, "run", *options, image, *command], started_with
    options = [f"--bind={mount}:{mount}" for mount in shown]
    options += ["--no-home", f"--pwd={folder}", *(["--nv"] if gpus else [])]
    return [runtime, "exec", *options, image, *command], started_with
