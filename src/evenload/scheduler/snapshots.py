"""Snapshots of a working tree, so that later edits do not affect a waiting job.

Each content is stored once, by its hash (`objects/`), and each submission has a list of its files (`trees/`). When the job
first starts, the files are laid out in a folder of its own (`work/`), in which all its attempts run. Ignored files (data,
environments, outputs) are linked to the original instead of copied, and so are the folders that the job names, by default
`runs`. Links inside the tree stay relative; links that point outside the tree still do.

::

    snapshots/objects/3f/9a…     a file's bytes, read only
    snapshots/trees/ID.json      path → hash and mode, or target of a link
    snapshots/work/ID/           laid out at the first start
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.working_tree import EXCLUDED, WorkingTree, check_size, tree_of

MAX_BYTES = 500 * 10**6
MAX_FILES = 20_000
LINKED = ("runs",)
"""Folders of outputs that are linked by default."""
_SCHEMA = 1
_CHUNK = 1 << 20
_MANY_FILES = 200
_ORPHAN_S = 3600.0


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    folder: str
    """The job's folder in the copy; created by `lay_out`."""
    num_files: int
    size_bytes: int
    linked: tuple[str, ...]
    """Paths that the copy links to in the original."""
    outside: tuple[str, ...]
    """Links that point outside the tree."""


@dataclass(frozen=True, slots=True)
class SnapshotCleanup:
    """Result of `clean`."""

    num_removed: int
    kept: tuple[str, ...]
    """Folders of ended jobs that contain files created by the job."""


def take(
    folder: Path,
    store: Path,
    *,
    links: Sequence[str] | None = None,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
) -> TreeSnapshot:
    """Copy the working tree of `folder`: its git work tree, or the folder itself if there is none.

    `store` is created if missing, accessible to this user only. `links` are folders, relative to `folder`, to link to the
    original (outputs, data), created when the job starts; None: `LINKED`, unless they are under version control.

    Raises:
        ConfigError: the tree is too large, or can't be read or copied.
    """
    tree = tree_of(folder.resolve())
    linked = {**dict.fromkeys(tree.ignored, False), **_linked_folders(tree, folder.resolve(), links)}
    files = [name for name in tree.files if not any(name == path or name.startswith(f"{path}/") for path in linked)]
    check_size(tree.top, files, max_bytes, max_files)
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(store):
            entries, outside, size_bytes = _stored(tree.top, files, store / "objects")
            name = f"{time.strftime('%Y%m%d')}-{secrets.token_hex(6)}"
            below = folder.resolve().relative_to(tree.top)
            listed = {
                "schema": _SCHEMA,
                "source": str(tree.top),
                "below": str(below),
                "entries": entries,
                "linked": {path: str(tree.top / path) for path in linked},
                "made": [path for path, is_made in linked.items() if is_made],
            }
            _write_json(store / "trees" / f"{name}.json", listed)
    except OSError as error:
        raise ConfigError(
            f"can't take a snapshot of {tree.top}: {error}; use --no-snapshot to run without one"
        ) from error
    return TreeSnapshot(
        str(store / "work" / name / below), sum("hash" in entry for entry in entries.values()), size_bytes,
        tuple(linked), tuple(outside),
    )  # fmt: skip


def lay_out(folder: str) -> Path:
    """Create a snapshot's folder if it does not exist, and return it; to be called by its owner.

    Later attempts find the files that earlier ones left there. Raise a `QueueError` if it is missing or damaged.
    """
    work, tree_file = _places(Path(folder))
    if not work.is_dir():
        tree = _read_tree(tree_file)
        rough = work.with_name(f".{work.name}.{secrets.token_hex(4)}")
        try:
            rough.mkdir(mode=0o700, parents=True)
            _fill(rough, tree, tree_file.parent.parent / "objects")
            with suppress(OSError):  # another element of the array was faster
                rough.rename(work)
        except OSError as error:
            raise QueueError(f"can't lay out the snapshot {folder}: {error}") from error
        finally:
            if rough.exists():
                shutil.rmtree(rough, ignore_errors=True)
    return Path(folder)


def ready(folder: str) -> None:
    """Lay out the snapshot that contains `folder`, if it is one and does not exist yet; for a runner, as the owner."""
    path = Path(folder)
    if not path.is_dir() and any(place.parent.name == "work" for place in (path, *path.parents)):
        lay_out(folder)


def new_files(folder: str, limit: int = 20) -> list[str]:
    """Return the files that the job created in its snapshot, as paths from its top; at most `limit`."""
    try:
        work, tree_file = _places(Path(folder))
        entries = _read_tree(tree_file)["entries"]
    except QueueError:
        return []
    found: list[str] = []
    for place, folders, names in os.walk(work):
        folders[:] = sorted(name for name in folders if name not in EXCLUDED and not Path(place, name).is_symlink())
        for name in sorted(names):
            path = str(Path(place, name).relative_to(work))
            if path not in entries and not Path(place, name).is_symlink() and not name.endswith(".pyc"):
                found.append(path)
                if len(found) >= limit:
                    return found
    return found


def note_jobs(folder: str, queue: Path, jobs: Sequence[str]) -> None:
    """Record which jobs use the snapshot, so that `clean` can remove it after they have ended."""
    _, tree_file = _places(Path(folder))
    _write_json(tree_file.with_suffix(".jobs"), {"queue": str(queue), "jobs": list(jobs)})


def clean(
    store: Path,
    have_ended: Callable[[Path, Sequence[str]], bool],
    *,
    older_than_s: float,
    now_s: float,
    with_new_files: bool = False,
) -> SnapshotCleanup:
    """Remove the snapshots of ended jobs, and content that no snapshot uses.

    `older_than_s` counts since a snapshot was taken and its top folder last written. `with_new_files` also removes
    those in which jobs created files.
    """
    if not (store / "trees").is_dir():
        return SnapshotCleanup(0, ())
    removed, kept = 0, []
    with _locked(store):
        for tree_file in sorted((store / "trees").glob("*.json")):
            work = store / "work" / tree_file.stem
            times_s = [path.stat().st_mtime for path in (tree_file, work) if path.exists()]
            if now_s - max(times_s, default=now_s) < older_than_s or not _is_over(tree_file, have_ended, now_s):
                continue
            if not with_new_files and work.is_dir() and new_files(str(work), limit=1):
                kept.append(str(work))
                continue
            shutil.rmtree(work, ignore_errors=True)
            tree_file.unlink()
            tree_file.with_suffix(".jobs").unlink(missing_ok=True)
            removed += 1
        if removed:
            _sweep(store)
    return SnapshotCleanup(removed, tuple(kept))


def _is_over(tree_file: Path, have_ended: Callable[[Path, Sequence[str]], bool], now_s: float) -> bool:
    """Return True if its jobs have ended. A snapshot without jobs belongs to a submission that failed or is under way."""
    try:
        noted = json.loads(tree_file.with_suffix(".jobs").read_text())
        return have_ended(Path(noted["queue"]), noted["jobs"])
    except FileNotFoundError:
        return now_s - tree_file.stat().st_mtime > _ORPHAN_S
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _linked_folders(tree: WorkingTree, folder: Path, links: Sequence[str] | None) -> dict[str, bool]:
    """The folders to link that the job, or the default, names: path in the tree → True (create if missing)."""
    found = {}
    for text in LINKED if links is None else links:
        path = Path(os.path.normpath(folder / text))
        if Path(text).is_absolute() or not path.is_relative_to(tree.top) or path in (tree.top, folder):
            raise ConfigError(f"link {text}: expected a path below the folder {folder}")
        name = str(path.relative_to(tree.top))
        is_copied = any(file == name or file.startswith(f"{name}/") for file in tree.files)
        if links is None and is_copied:
            continue  # under version control: part of the tree
        if not any(name == other or name.startswith(f"{other}/") for other in tree.ignored):
            found[name] = True
    return found


def _stored(top: Path, files: Sequence[str], objects: Path) -> tuple[dict[str, Any], list[str], int]:
    """Store the files' content in `objects`; return (path → entry, links that point outside, bytes)."""
    entries: dict[str, Any] = {}
    outside, new, size_bytes = [], [], 0
    for name in files:
        path = top / name
        try:
            if path.is_symlink():
                entries[name], is_outside = _link_entry(top, path)
                outside += [name] if is_outside else []
                continue
            key, size, is_new = _store(path, objects)
        except FileNotFoundError:  # removed since it was listed
            continue
        new += [objects / key[:2] / key[2:]] if is_new else []
        size_bytes += size
        entries[name] = {"hash": key, "mode": 0o755 if path.stat().st_mode & 0o100 else 0o644}
    _to_disk(new)
    return entries, outside, size_bytes


def _link_entry(top: Path, path: Path) -> tuple[dict[str, str], bool]:
    """(The entry of a link, does it point outside the tree?) Links inside become relative, others absolute."""
    leads = Path(os.path.normpath(path.parent / path.readlink()))
    if leads.is_relative_to(top):
        return {"link": os.path.relpath(leads, path.parent)}, False
    return {"link": str(leads)}, True


def _store(path: Path, objects: Path) -> tuple[str, int, bool]:
    """Copy a file while hashing it, so that the stored content matches its hash; return (hash, bytes, is it new)."""
    objects.mkdir(mode=0o700, exist_ok=True)
    rough = objects / f".{os.getpid()}.{secrets.token_hex(4)}"
    digest, size = hashlib.sha256(), 0
    try:
        descriptor = os.open(rough, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with path.open("rb") as source, os.fdopen(descriptor, "wb") as copy:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
                size += len(chunk)
        key = digest.hexdigest()
        kept = objects / key[:2] / key[2:]
        if kept.exists():
            return key, size, False
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        rough.rename(kept)
        return key, size, True
    finally:
        rough.unlink(missing_ok=True)


def _to_disk(paths: Sequence[Path]) -> None:
    """Sync to disk: a queued job survives a power failure, so its files must too."""
    if len(paths) > _MANY_FILES:
        os.sync()
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_json(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    rough = path.with_name(f".{path.name}.part")
    with rough.open("w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(row, file)
        file.flush()
        os.fsync(file.fileno())
    rough.rename(path)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, ValueError) as error:
        raise QueueError(f"the snapshot {path.stem} is missing or damaged ({error}): submit the job again") from error
    if not isinstance(tree, dict) or tree.get("schema") != _SCHEMA:
        raise QueueError(f"the snapshot {path} was written by another version of Evenload: submit the job again")
    return tree


def _fill(target: Path, tree: dict[str, Any], objects: Path) -> None:
    (target / tree["below"]).mkdir(parents=True, exist_ok=True)
    for name, entry in tree["entries"].items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "link" in entry:
            path.symlink_to(entry["link"])
            continue
        kept = objects / entry["hash"][:2] / entry["hash"][2:]
        try:
            content = kept.read_bytes()
        except FileNotFoundError:
            content = b""
        if hashlib.sha256(content).hexdigest() != entry["hash"]:
            raise QueueError(f"the snapshot of {name} ({kept}) is missing or damaged: submit the job again")
        path.write_bytes(content)
        path.chmod(entry["mode"])
    for name, original in tree["linked"].items():
        if name in tree["made"]:
            Path(original).mkdir(parents=True, exist_ok=True)
        path = target / name
        if os.path.lexists(original) and not os.path.lexists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(original)


def _places(folder: Path) -> tuple[Path, Path]:
    """(The snapshot's folder in `work`, the list of its files.)"""
    for place in (folder, *folder.parents):
        if place.parent.name == "work":
            tree_file = place.parent.parent / "trees" / f"{place.name}.json"
            if tree_file.exists() or place.parent.parent.name == "snapshots":
                return place, tree_file
    raise QueueError(f"{folder} is not in a snapshot")


def _sweep(store: Path) -> None:
    """Remove content that no tree uses."""
    wanted = {
        entry["hash"]
        for tree_file in (store / "trees").glob("*.json")
        for entry in _read_tree(tree_file)["entries"].values()
        if "hash" in entry
    }
    for kept in (store / "objects").glob("??/*"):
        if kept.parent.name + kept.name not in wanted:
            kept.unlink(missing_ok=True)


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Let one process at a time take or clean snapshots, so that content is not removed while another reuses it."""
    with (store / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
