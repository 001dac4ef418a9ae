"""The folder of a run when it is opened: its records, ``--fresh``, and the lock that keeps other runs out."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from evenload.atomic_file import write_atomically
from evenload.config import Config, as_table
from evenload.errors import ConfigError
from evenload.job import attempt
from evenload.records.folder_lock import LOCK_FILE, lock_folder
from evenload.records.reader import last_step_in
from evenload.records.recorder import Recorder, print_lines
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.run_control import RUN_FOLDER_FILE
from evenload.training.step.step_recorder import StepRecorder

_FRESH_FOR = "fresh_for_job"
"""File in the run folder that names the queue's job whose ``--fresh`` was applied there."""


class RunFolder:
    """The run folder on this rank, and the recorder of its steps; with ``--fresh`` the old contents stay until `open`.

    Raises:
        ConfigError: another run is in progress in a folder that is to begin anew, or it holds the script's own folder.
    """

    def __init__(self, path: Path, spec: WorkerSpec, config: Config, *, on_device: bool) -> None:
        self.path = path
        self._spec, self._config = spec, config
        writes = spec.rank == 0 and not config.dry_run and spec.mode != "verify"
        begins_anew = config.fresh and writes
        if begins_anew and (path / LOCK_FILE).exists():
            lock_folder(path).close()  # before anything of another run is moved
        if config.fresh and Path.cwd().is_relative_to(path.resolve()):
            raise ConfigError(
                f"--fresh would move {path} aside, which holds the folder of this script; set a project_dir of its own, such "
                "as runs/name"
            )
        self._old = _contents(path) if begins_anew else {}
        self.recorder = StepRecorder(None if self._old else self._records(writes), writes, on_device=on_device)
        if begins_anew and not self._old:
            _note_fresh(path)

    def open(self) -> None:
        """Make the folder ready at the end of all checks: with ``--fresh`` move the old contents away."""
        if self._old:
            with lock_folder(self.path):  # from here on no other run begins in the folder that is moved
                _locks.append(_move_aside(self.path, self._old))
            self._old = {}
            self.recorder.open(self._records(writes=True))

    def take_records(self) -> None:
        """Let this rank write the records, whose writer is gone."""
        self.recorder.take_over(self._records(writes=True, takes_over=True), last_step_in(self.path))

    def _records(self, writes: bool, *, takes_over: bool = False) -> Recorder:
        records = Recorder(
            self.path if writes else None,
            loggers=self._config.loggers,
            logger_options=self._config.logger_options,
            hyperparameters=as_table(self._config),
            console=self._spec.origin != "evenload",
            log_every_s=self._config.log_every_s,
            job=None if (now := attempt()) is None else now[0],
            takes_over=takes_over,
        )
        if writes:
            # The rank before has written both; a full disk is no reason to end the run.
            with contextlib.suppress(OSError) if takes_over else contextlib.nullcontext():
                records.settings(as_table(self._config))
                if self._spec.launch_dir:
                    write_atomically(Path(self._spec.launch_dir) / RUN_FOLDER_FILE, str(self.path))
        return records


def fresh_is_done(folder: Path) -> bool:
    """Return whether an earlier attempt of this queue's job applied ``--fresh``, which holds once per job."""
    now = attempt()
    if now is None or now[1] == 1:
        return False
    try:
        return (folder / _FRESH_FOR).read_text() == now[0]
    except OSError:
        return False


def _note_fresh(folder: Path) -> None:
    now = attempt()
    if now is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FRESH_FOR).write_text(now[0])


def _contents(folder: Path) -> dict[str, int]:
    """Return the names in a folder, with the times of their last change."""
    return {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()} if folder.is_dir() else {}


_locks: list[IO[str]] = []
"""Of folders that were begun anew; to close one would end the lock that the recorder holds on the same file."""


def _move_aside(folder: Path, old: Mapping[str, int]) -> IO[str]:
    """Move a folder away, but leave the files that the script wrote since its contents were `old`; return the new one's lock."""
    name, folder = folder.name, folder.resolve()  # of a link the target is moved, and the link stays
    aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    index = 1
    while aside.exists():
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}-{index}")
        index += 1
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    new.mkdir(exist_ok=True)
    lock = lock_folder(new)  # no other run may begin in it before this one
    shutil.move(folder, aside)
    try:
        new.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} is in use by another process, which begins it anew ({error})"
        ) from error
    for entry, changed_ns in _contents(aside).items():
        is_new = entry not in old or (changed_ns != old[entry] and not (aside / entry).is_dir())
        if is_new and entry != LOCK_FILE:
            (aside / entry).rename(folder / entry)
    _note_fresh(folder)
    print_lines([f"evenload: --fresh: moved the contents of {name} to {aside.name if name == folder.name else aside}"])
    return lock
