"""Commands that run a job in a container, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.scheduler.container import container_command, find_runtime
from evenload.scheduler.job_file import job_from
from evenload.scheduler.submit.check import check_job

VARIABLES = {"PATH": "/usr/bin", "SECRET": "x1", "PYTHONPATH": "/here", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}


def test_podman_gets_folders_gpus_and_names_of_variables() -> None:
    command, variables = container_command(
        "/usr/bin/podman", "img", ["python", "t.py"], folder="/w", mounts=("/w", "/a", "/w"), variables=VARIABLES
    )
    assert command[:2] == ["/usr/bin/podman", "run"] and command[-3:] == ["img", "python", "t.py"]
    assert [word for word in command if word.startswith("--volume")] == ["--volume=/w:/w", "--volume=/a:/a"]
    assert [word for word in command if word.startswith("--device")] == [
        "--device=nvidia.com/gpu=GPU-1", "--device=nvidia.com/gpu=GPU-2",
    ]  # fmt: skip
    assert "--env=SECRET" in command and "--env=PYTHONPATH" not in command and "x1" not in " ".join(command)
    assert variables == {"PATH": "/usr/bin", "SECRET": "x1", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}


def test_apptainer_shows_gpus_where_there_are_some() -> None:
    command, _ = container_command(
        "/opt/apptainer", "a.sif", ["true"], folder="/w", mounts=("/w",), variables={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert command == ["/opt/apptainer", "exec", "--bind=/w:/w", "--no-home", "--pwd=/w", "a.sif", "true"]
    command, _ = container_command("/x/singularity", "a.sif", ["true"], folder="/w", mounts=(), variables=VARIABLES)
    assert "--nv" in command


def test_without_a_runtime_nothing_is_submitted(tmp_path: Path) -> None:
    job = job_from({"command": ["a-program-of-the-image"], "image": "img", "folder": str(tmp_path), "snapshot": False})
    with pytest.raises(ConfigError, match="none of podman, apptainer, singularity"):
        check_job(job, tmp_path, {"PATH": str(tmp_path)})
    runtime = tmp_path / "apptainer"
    runtime.write_text("#!/bin/sh\n")
    runtime.chmod(0o755)
    assert find_runtime(str(tmp_path)) == str(runtime)
    assert check_job(job, tmp_path, {"PATH": str(tmp_path)}).job.image == "img"
    with pytest.raises(ConfigError, match="only the local queue starts containers"):
        job_from({"command": ["true"], "image": "img", "backend": "slurm"})


def test_an_interactive_job_has_its_terminal_in_the_container() -> None:
    """Podman closes the input of a container that doesn't ask for it, and gives it no terminal."""
    for has_terminal in (True, False):
        command, _ = container_command(
            "/usr/bin/podman", "img", ["bash"], folder="/w", mounts=(), variables={}, has_terminal=has_terminal
        )
        options = command[: command.index("img")]
        assert ("--interactive" in options, "--tty" in options) == (has_terminal, has_terminal)
