"""Snapshots: what a waiting job keeps, whatever is done to the working tree; what is linked, refused, removed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import snapshots, working_tree
from evenload.scheduler.working_tree import git_top


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A git work tree with a subfolder, an ignored folder of data, links inside and outside."""
    top = tmp_path / "project"
    (top / "code" / "data").mkdir(parents=True)
    (top / ".gitignore").write_text("data/\n*.log\n")
    (top / "code" / "train.py").write_text("print('first')\n")
    (top / "code" / "tool.sh").write_text("#!/bin/sh\n")
    (top / "code" / "tool.sh").chmod(0o755)
    (top / "code" / "same").symlink_to("train.py")
    (top / "absolute").symlink_to(top / "code" / "train.py")
    (top / "outside").symlink_to("/etc/hostname")
    (top / "code" / "data" / "x.bin").write_bytes(b"data")
    for command in (["init", "-q"], ["add", "code/train.py", "code/same", "absolute", "outside"]):
        subprocess.run(["git", "-C", str(top), *command], check=True, timeout=30)
    return top


def take(folder: Path, tmp_path: Path, **more: object) -> snapshots.Snapshot:
    return snapshots.take(folder, tmp_path / "snapshots", **more)  # type: ignore[arg-type]


def test_later_edits_do_not_change_it(tree: Path, tmp_path: Path) -> None:
    (tree / "new.txt").write_text("untracked, not ignored")
    taken = take(tree / "code", tmp_path)
    (tree / "code" / "train.py").write_text("print('second')\n")
    (tree / "new.txt").unlink()
    folder = snapshots.lay_out(taken.folder)
    assert (folder / "train.py").read_text() == "print('first')\n"
    assert (folder.parent / "new.txt").exists()
    assert os.access(folder / "tool.sh", os.X_OK) and not os.access(folder / "train.py", os.X_OK)
    assert not (folder.parent / ".git").exists()
    (folder / "train.py").write_text("a job may write in its copy")
    again = take(tree / "code", tmp_path)
    assert again.folder != taken.folder
    assert (snapshots.lay_out(again.folder) / "train.py").read_text() == "print('second')\n"


def test_links_stay_links(tree: Path, tmp_path: Path) -> None:
    taken = take(tree, tmp_path)
    folder = snapshots.lay_out(taken.folder)
    assert (folder / "code" / "same").readlink() == Path("train.py")
    assert (folder / "absolute").resolve() == folder / "code" / "train.py", "inside the copy, not the original"
    assert (folder / "outside").readlink() == Path("/etc/hostname") and taken.outside == ("outside",)


def test_what_git_ignores_and_outputs_are_the_originals(tree: Path, tmp_path: Path) -> None:
    (tree / "code" / "old.log").write_text("x")
    taken = take(tree / "code", tmp_path)
    folder = snapshots.lay_out(taken.folder)
    assert (folder / "data").is_symlink() and (folder / "data" / "x.bin").read_bytes() == b"data"
    assert set(taken.linked) == {"code/data", "code/runs", "code/old.log"}
    (folder / "runs" / "gpt").mkdir()
    assert (tree / "code" / "runs" / "gpt").is_dir(), "outputs come home"


def test_folders_named_as_links_are_not_copied(tree: Path, tmp_path: Path) -> None:
    (tree / "big").mkdir()
    (tree / "big" / "file").write_bytes(b"0" * 2000)
    with pytest.raises(ConfigError, match=r"the limit is 0 MB. Largest files: big/file"):
        take(tree, tmp_path, max_bytes=1000)
    taken = take(tree, tmp_path, max_bytes=1000, links=["big"])
    assert (snapshots.lay_out(taken.folder) / "big").readlink() == tree / "big"
    with pytest.raises(ConfigError, match="files to copy; the limit is 2"):
        take(tree, tmp_path, max_files=2)


def test_equal_content_is_kept_once(tree: Path, tmp_path: Path) -> None:
    for _ in range(3):
        take(tree, tmp_path)
    kept = [path for path in (tmp_path / "snapshots" / "objects").rglob("*") if path.is_file()]
    assert len(kept) == 3, "train.py, tool.sh, .gitignore"


def test_a_folder_without_git_is_copied_without_caches(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "__pycache__" / "a.pyc").write_text("")
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "pyvenv.cfg").write_text("")
    (folder / "a.py").write_text("1")
    assert git_top(folder) is None
    taken = take(folder, tmp_path)
    copy = snapshots.lay_out(taken.folder)
    assert taken.num_files == 1 and (copy / "env").readlink() == folder / "env"
    assert not (copy / "__pycache__").exists()


def test_damage_is_told(tree: Path, tmp_path: Path) -> None:
    taken = take(tree, tmp_path)
    (kept,) = [p for p in (tmp_path / "snapshots" / "objects").rglob("*") if p.is_file() and b"first" in p.read_bytes()]
    kept.chmod(0o600)
    kept.write_text("damaged")
    with pytest.raises(QueueError, match=r"train\.py .* is missing or damaged: submit the job again"):
        snapshots.lay_out(taken.folder)
    assert not Path(taken.folder).exists()


def test_it_is_removed_when_its_jobs_have_ended(tree: Path, tmp_path: Path) -> None:
    store, now_s = tmp_path / "snapshots", time.time() + 10
    plain, written, running = (take(tree, tmp_path) for _ in range(3))
    for number, taken in enumerate((plain, written, running)):
        snapshots.lay_out(taken.folder)
        snapshots.note_jobs(taken.folder, tmp_path / "queue", [str(number)])
    (Path(written.folder) / "model.pt").write_text("weights")
    assert snapshots.new_files(written.folder) == ["model.pt"] and not snapshots.new_files(plain.folder)

    def have_ended(queue: Path, jobs: object) -> bool:
        return jobs != ["2"]

    assert snapshots.clean(store, have_ended, older_than_s=3600, now_s=now_s).num_removed == 0
    cleaned = snapshots.clean(store, have_ended, older_than_s=0, now_s=now_s)
    assert cleaned.num_removed == 1 and cleaned.kept == (written.folder,), "what a job made is not thrown away"
    assert not Path(plain.folder).exists() and Path(running.folder).exists()
    cleaned = snapshots.clean(store, have_ended, older_than_s=0, now_s=now_s, with_new_files=True)
    assert cleaned.num_removed == 1 and (snapshots.lay_out(running.folder) / "code" / "train.py").exists()


def test_its_folders_are_its_owners_alone(tree: Path, tmp_path: Path) -> None:
    taken = take(tree, tmp_path)
    snapshots.lay_out(taken.folder)
    assert (tmp_path / "snapshots").stat().st_mode & 0o777 == 0o700
    with pytest.raises(QueueError, match="is not in a snapshot"):
        snapshots.lay_out(str(tree / "code" / "missing"))
    with pytest.raises(ConfigError, match="expected a path below the folder"):
        take(tree, tmp_path, links=["../other"])


def test_a_folder_that_its_owner_cannot_read_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a container's data below the project. Where looking into it fails otherwise, that is said."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "train.py").touch()
    with monkeypatch.context() as closed:
        closed.setattr(working_tree.os, "access", lambda path, mode: Path(path).name != "closed")
        assert working_tree.tree_of(tmp_path) == working_tree.WorkingTree(tmp_path, ("train.py",), ("closed",))

    def refuse(path: Path) -> bool:
        raise PermissionError(f"Permission denied: {path}")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ConfigError, match=r"can't be listed .*--no-snapshot"):
        working_tree.tree_of(tmp_path)
