"""What belongs to a working tree: the files that a copy of it has, and those that git ignores.

Of a git work tree: all tracked files and all others that git doesn't ignore. Of a folder without git: all but caches and
environments.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import ConfigError

LEFT_OUT = frozenset((".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"))
"""Never copied nor linked."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree's files and links, and the folders and files that are ignored in it, by their paths."""

    top: Path
    files: tuple[str, ...]
    ignored: tuple[str, ...]


def git_top(folder: Path) -> Path | None:
    """The top of the git work tree that `folder` belongs to; None where it belongs to none or git ignores it."""
    told = _git(folder, "rev-parse", "--show-toplevel")
    if told is None or not told.strip():
        return None
    top = Path(told.rstrip("\n"))
    if folder.resolve() != top.resolve() and _git(folder, "check-ignore", "-q", ".") is not None:
        return None
    return top


def tree_of(folder: Path) -> Tree:
    """The tree that `folder` belongs to: its git work tree, or the folder itself.

    Raises:
        ConfigError: it can't be listed.
    """
    top = git_top(folder)
    if top is None:
        if not folder.is_dir():
            raise ConfigError(f"the folder {folder} is not there")
        return _walked(folder)
    tracked = _git(top, "ls-files", "-z", "--cached", "--recurse-submodules")
    if tracked is None:
        tracked = _git(top, "ls-files", "-z", "--cached")
    untracked = _git(top, "ls-files", "-z", "--others", "--exclude-standard")
    ignored = _git(top, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    if tracked is None or untracked is None or ignored is None:
        raise ConfigError(f"git can't list the files of {top}; --no-snapshot runs without a snapshot")
    names = dict.fromkeys((tracked + untracked).split("\0"))
    files = [name for name in names if name and not name.endswith("/") and os.path.lexists(top / name)]
    files = [name for name in files if (top / name).is_symlink() or (top / name).is_file()]
    kept = (name.rstrip("/") for name in ignored.split("\0") if name)
    return Tree(top, tuple(files), tuple(name for name in kept if not _is_left_out(name)))


def _walked(folder: Path) -> Tree:
    """A folder without git: all but caches; environments are linked as ignored folders are."""
    files, ignored = [], []
    for place, folders, names in os.walk(folder):
        here = Path(place)
        for name in list(folders):
            path = here / name
            if (path / "pyvenv.cfg").exists() or (path / "conda-meta").is_dir() or name == "node_modules":
                ignored.append(str(path.relative_to(folder)))
            elif path.is_symlink():
                files.append(str(path.relative_to(folder)))
            if name in LEFT_OUT or path.is_symlink() or str(path.relative_to(folder)) in ignored:
                folders.remove(name)
        for name in names:
            path = here / name
            if not name.endswith(".pyc") and (path.is_symlink() or path.is_file()):
                files.append(str(path.relative_to(folder)))
    return Tree(folder, tuple(files), tuple(ignored))


def _is_left_out(name: str) -> bool:
    return name.endswith(".pyc") or any(part in LEFT_OUT for part in Path(name).parts)


def check_size(top: Path, files: Sequence[str], max_bytes: int, max_files: int) -> None:
    """Refuses what is too much for a copy.

    Raises:
        ConfigError: naming the largest files.
    """
    sizes = {name: (top / name).lstat().st_size for name in files if os.path.lexists(top / name)}
    cure = "Let git ignore what is no source (it is then linked), name folders of data by --link, or use --no-snapshot"
    if len(sizes) > max_files:
        raise ConfigError(f"the tree {top} has {len(sizes)} files to copy, a snapshot at most {max_files}. {cure}")
    if sum(sizes.values()) > max_bytes:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        told = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in largest)
        raise ConfigError(
            f"the tree {top} has {sum(sizes.values()) / 1e6:.0f} MB to copy, a snapshot at most {max_bytes / 1e6:.0f} MB; "
            f"the largest: {told}. {cure}"
        )


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or isn't there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
