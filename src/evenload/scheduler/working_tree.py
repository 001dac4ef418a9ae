"""`WorkingTree`: the files to copy from a working tree, and those that git ignores.

In a git work tree, all files that git does not ignore are copied; in a folder without git, all except caches and environments.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import ConfigError

EXCLUDED = frozenset((".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"))
"""Neither copied nor linked."""


@dataclass(frozen=True, slots=True)
class WorkingTree:
    """A tree's files and links to copy, and its ignored folders and files, as relative paths."""

    top: Path
    files: tuple[str, ...]
    ignored: tuple[str, ...]


def git_top(folder: Path) -> Path | None:
    """Return the top of the git work tree of `folder`; None if there is none or git ignores the folder."""
    output = _git(folder, "rev-parse", "--show-toplevel")
    if output is None or not output.strip():
        return None
    top = Path(output.rstrip("\n"))
    if folder.resolve() != top.resolve() and _git(folder, "check-ignore", "-q", ".") is not None:
        return None
    return top


def tree_of(folder: Path) -> WorkingTree:
    """Return the tree of `folder`: its git work tree, or the folder itself. Raise a `ConfigError` if it can't be listed."""
    top = git_top(folder)
    if top is None:
        if not folder.is_dir():
            raise ConfigError(f"folder {folder} does not exist")
        try:
            return _walked(folder)
        except OSError as error:
            raise ConfigError(
                f"the files of {folder} can't be listed ({error}); use --no-snapshot to run without a snapshot"
            ) from error
    tracked = _git(top, "ls-files", "-z", "--cached", "--recurse-submodules")
    if tracked is None:
        tracked = _git(top, "ls-files", "-z", "--cached")
    untracked = _git(top, "ls-files", "-z", "--others", "--exclude-standard")
    ignored = _git(top, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    if tracked is None or untracked is None or ignored is None:
        raise ConfigError(f"git can't list the files of {top}; use --no-snapshot to run without a snapshot")
    names = dict.fromkeys((tracked + untracked).split("\0"))
    files = [name for name in names if name and not name.endswith("/") and os.path.lexists(top / name)]
    files = [name for name in files if (top / name).is_symlink() or (top / name).is_file()]
    kept = (name.rstrip("/") for name in ignored.split("\0") if name)
    return WorkingTree(top, tuple(files), tuple(name for name in kept if not _is_excluded(name)))


def _walked(folder: Path) -> WorkingTree:
    """The tree of a folder without git; environments count as ignored."""
    files, ignored = [], []
    for place, folders, names in os.walk(folder):
        here = Path(place)
        for name in list(folders):
            path = here / name
            is_closed = not os.access(path, os.R_OK | os.X_OK)  # to this user, and so to the job
            is_python = not is_closed and ((path / "pyvenv.cfg").exists() or (path / "conda-meta").is_dir())
            if is_closed or is_python or name == "node_modules":
                ignored.append(str(path.relative_to(folder)))
            elif path.is_symlink():
                files.append(str(path.relative_to(folder)))
            if name in EXCLUDED or path.is_symlink() or str(path.relative_to(folder)) in ignored:
                folders.remove(name)
        for name in names:
            path = here / name
            if not name.endswith(".pyc") and (path.is_symlink() or path.is_file()):
                files.append(str(path.relative_to(folder)))
    return WorkingTree(folder, tuple(files), tuple(ignored))


def _is_excluded(name: str) -> bool:
    return name.endswith(".pyc") or any(part in EXCLUDED for part in Path(name).parts)


def check_size(top: Path, files: Sequence[str], max_bytes: int, max_files: int) -> None:
    """Raise a `ConfigError` if the tree is too large to copy."""
    sizes = {name: (top / name).lstat().st_size for name in files if os.path.lexists(top / name)}
    hint = "Add data to .gitignore or name its folders with --link (both are linked, not copied), or use --no-snapshot"
    if len(sizes) > max_files:
        raise ConfigError(f"{top} has {len(sizes)} files to copy; the limit is {max_files}. {hint}")
    if sum(sizes.values()) > max_bytes:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in largest)
        raise ConfigError(
            f"{top} has {sum(sizes.values()) / 1e6:.0f} MB to copy; the limit is {max_bytes / 1e6:.0f} MB. "
            f"Largest files: {listed}. {hint}"
        )


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
