"""The file of a script or module, found without running any of it, and the command that goes on with it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evenload.errors import LaunchError

_PYTHON = re.compile(r"python[\d.]*")


_OTHER_PROGRAMS = (".sh", ".bash", ".toml", ".yaml", ".yml", ".json", ".txt", ".md")
_SHADOWED = ("torch", "numpy", "evenload")
"""Packages that every script imports."""


def target_file(arguments: Sequence[str]) -> Path:
    """Return the file that would run; for a module without a source file, its name; LaunchError if it does not exist."""
    if not arguments or tuple(arguments) == ("-m",):
        command = next((word for word in sys.argv[1:2] if word.isalpha()), "run")
        raise LaunchError(f"there is no script to run; write `evenload {command} train.py`")
    if arguments[0] == "-m":
        return _module_file(arguments[1])
    path = Path(arguments[0])
    if path.is_dir():
        raise LaunchError(f"{path} is a folder; give the script in it, or `-m package.module`")
    if path.suffix == ".ipynb":
        raise LaunchError(
            f"{path} is a notebook; start ranks from a cell of it: evenload.spawn(train, devices='cpu:2')"
        )
    if not path.exists():
        words = [word for word in arguments[1:] if not word.startswith("-")]
        if _PYTHON.fullmatch(arguments[0]) and words:
            raise LaunchError(
                f"there is no script {path}; leave it out, each rank is a python: evenload run {words[0]}"
            )
        if arguments[0].isdecimal() and words:
            raise LaunchError(
                f"there is no script {path}; a number belongs to the device: -d cpu:{path}, or GPUs as -d 0,1"
            )
        near = sorted(other.name for other in path.absolute().parent.glob("*.py"))[:8]
        here = f"; scripts in that folder: {', '.join(near)}" if near else ""
        raise LaunchError(f"there is no script {path}{here}")
    if path.suffix in _OTHER_PROGRAMS:
        raise LaunchError(
            f"{path} is no Python script; write evenload run train.py in it, or run its Python script itself"
        )
    if path.stem in _SHADOWED:
        raise LaunchError(
            f"{path}: `import {path.stem}` would find this script in place of the package; rename it, to train.py"
        )
    return path


def _module_file(name: str) -> Path:
    # Part by part: `importlib.util.find_spec` would import the parent packages, possibly torch.
    where: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    found = ""
    spec = None
    for part in name.split("."):
        found = f"{found}.{part}" if found else part
        spec = importlib.machinery.PathFinder.find_spec(part, list(where) if where is not None else [])
        if spec is None and found == part:
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(part)
        if spec is None:
            if name.endswith(".py") and Path(name).is_file():
                raise LaunchError(
                    f"-m {name}: -m takes a module, without .py; write `evenload run {name}` for the file"
                )
            raise LaunchError(f"-m {name}: there is no module {found} here or on the path")
        where = spec.submodule_search_locations
    if where is not None:
        spec = importlib.machinery.PathFinder.find_spec("__main__", list(where))
        if spec is None:
            raise LaunchError(f"-m {name}: {name} is a package without a __main__.py, so it can't be run")
    return Path((spec.origin if spec is not None else None) or name)


def resume_command(arguments: Sequence[str], *, is_call: bool) -> str:
    """Return the command line of this process, as it is written to go on with the run."""
    if is_call:
        return shlex.join(sys.orig_argv)
    own = sys.argv[1:]
    options = own[: own.index(arguments[0])] if arguments[0] in own else own
    return shlex.join(
        ["evenload", *(word for word in options if word not in ("--fresh", "--override")), *own[len(options) :]]
    )
