"""Is this the Python that a user believes to use, and does it find the packages that were meant?"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from evenload.doctor.checks.packages import REQUIRED, pip_install
from evenload.doctor.finding import Finding, Options, Status

NAME = "Python"
NEEDED = ("torch", "numpy", "rich", "typer", "psutil", "pynvml", "tomli_w", "evenload")
"""What a run imports; a file of that name beside the script is imported in their place."""
HARMLESS = frozenset({"test", "this", "antigravity", "__main__"})


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs, and what surrounds it."""

    executable: str
    prefix: str
    activated: str = ""
    """The environment that the shell has activated (VIRTUAL_ENV); empty where none is."""
    command: str = ""
    """Where the shell finds ``evenload``; empty where it finds none."""
    scripts: Sequence[str] = ()
    """Where this Python's own commands lie, the first being the usual place."""
    twice: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Packages that are installed twice, and where."""
    shadows: Sequence[str] = ()
    """Files in this folder that have the name of a module."""


def interpreter(options: Options) -> Finding:
    """Looks at the running Python, the shell's variables, the search path and this folder."""
    del options
    return judge_interpreter(
        Interpreter(
            executable=sys.executable,
            prefix=sys.prefix,
            activated=os.environ.get("VIRTUAL_ENV", ""),
            command=str(Path(command).resolve()) if (command := shutil.which("evenload")) else "",
            scripts=(sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")),
            twice=installed_twice(),
            shadows=shadowing(Path.cwd()),
        )
    )


def judge_interpreter(found: Interpreter) -> Finding:
    """What that means."""
    if found.shadows:
        names = [Path(name).stem for name in found.shadows]
        are = "is" if len(names) == 1 else "are"
        story = f"{', '.join(found.shadows)} in this folder {are} imported in place of the real one"
        mend = " && ".join(f"mv {shlex.quote(name)} {shlex.quote('my_' + name)}" for name in found.shadows)
        status: Status = "fail" if set(names) & set(NEEDED) else "warn"
        return Finding(NAME, status, story, "no file here that has the name of a module", mend)
    if found.activated and not _same(found.activated, found.prefix):
        story = f"the shell has activated {found.activated}, but this Python is {found.executable}"
        activate = Path(found.activated) / "bin/activate"
        mend = f". {shlex.quote(str(activate))} && hash -r   # then: which python; or deactivate"
        return Finding(NAME, "warn", story, "one environment", mend)
    if found.command and not any(_same(str(Path(found.command).parent), place) for place in found.scripts):
        story = f"the command evenload is {found.command}, but this Python is {found.executable}"
        mend = f"export PATH={shlex.quote(found.scripts[0])}:$PATH && hash -r"
        return Finding(NAME, "warn", story, f"the command in {found.scripts[0]}", mend)
    if found.twice:
        story = "; ".join(f"{name} is in {' and in '.join(places)}" for name, places in found.twice.items())
        again = pip_install("--force-reinstall", "--no-deps", *found.twice)
        removal = shlex.join([found.executable, "-m", "pip", "uninstall", "-y", *found.twice])
        return Finding(NAME, "warn", story, "each package once", f"{removal} && {again}")
    return Finding(NAME, "ok", found.executable)


def installed_twice() -> dict[str, list[str]]:
    """Required packages that the search path holds in two places, with different versions."""
    places: dict[str, dict[str, str]] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name in REQUIRED:
            where = str(Path(str(distribution.locate_file(""))).resolve())
            places.setdefault(name, {}).setdefault(where, distribution.version)
    return {name: list(found) for name, found in places.items() if len(set(found.values())) > 1}


def shadowing(folder: Path) -> list[str]:
    """Python files and packages in a folder that hide a module of the standard library, or one that a run needs."""
    hidden = (set(NEEDED) | set(sys.stdlib_module_names)) - HARMLESS
    found = []
    for path in sorted(folder.iterdir()):
        is_module = (path.suffix == ".py" and path.is_file()) or (path / "__init__.py").is_file()
        if is_module and path.stem in hidden:
            found.append(path.name)
    return found


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()
