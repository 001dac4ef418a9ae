"""Check that this Python is the intended one and finds the intended packages."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from evenload.doctor.checks.packages import REQUIRED, pip_install
from evenload.doctor.finding import Finding, Options, fail, ok, warn

NEEDED = ("torch", "numpy", "rich", "typer", "psutil", "pynvml", "tomli_w", "evenload")
"""Modules that a run imports; a file with such a name next to the script is imported instead."""
HARMLESS = frozenset({"test", "this", "antigravity", "__main__"})


def interpreter(options: Options) -> Finding:
    if hidden := _shadowing(Path.cwd()):
        names = [Path(name).stem for name in hidden]
        found = (
            f"{', '.join(hidden)} in this folder {'is' if len(names) == 1 else 'are'} imported instead of the module"
        )
        fix = " && ".join(f"mv {shlex.quote(name)} {shlex.quote('my_' + name)}" for name in hidden)
        return (fail if set(names) & set(NEEDED) else warn)(found, "no file here with the name of a module", fix)
    activated = os.environ.get("VIRTUAL_ENV", "")
    if activated and not _is_same(activated, sys.prefix):
        found = f"the shell has activated {activated}, but this Python is {sys.executable}"
        fix = f". {shlex.quote(str(Path(activated) / 'bin/activate'))} && hash -r   # then: which python; or deactivate"
        return warn(found, "one environment", fix)
    scripts = (sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user"))
    command = Path(shutil.which("evenload") or "").resolve()
    if command.is_file() and not any(_is_same(str(command.parent), folder) for folder in scripts):
        found = f"the command evenload is {command}, but this Python is {sys.executable}"
        fix = f"export PATH={shlex.quote(scripts[0])}:$PATH && hash -r"
        return warn(found, f"the command in {scripts[0]}", fix)
    if twice := _installed_twice():
        found = "; ".join(f"{name} is in {' and in '.join(folders)}" for name, folders in twice.items())
        again = pip_install("--force-reinstall", "--no-deps", *twice)
        removal = shlex.join([sys.executable, "-m", "pip", "uninstall", "-y", *twice])
        return warn(found, "each package installed once", f"{removal} && {again}")
    return ok(sys.executable)


def _installed_twice() -> dict[str, list[str]]:
    """Return required packages that are installed in two folders with different versions."""
    folders: dict[str, dict[str, str]] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name in REQUIRED:
            folder = str(Path(str(distribution.locate_file(""))).resolve())
            folders.setdefault(name, {}).setdefault(folder, distribution.version)
    return {name: list(found) for name, found in folders.items() if len(set(found.values())) > 1}


def _shadowing(folder: Path) -> list[str]:
    """Return files and packages that hide a module of the standard library, or one that a run needs."""
    hidden = (set(NEEDED) | set(sys.stdlib_module_names)) - HARMLESS
    return [
        path.name
        for path in sorted(folder.iterdir())
        if path.stem in hidden and ((path.suffix == ".py" and path.is_file()) or (path / "__init__.py").is_file())
    ]


def _is_same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()
