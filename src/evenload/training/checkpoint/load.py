"""Read a checkpoint outside of a run: for inference, or for another program. No process group is needed."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from evenload.errors import CheckpointError
from evenload.records.checkpoints import checkpoint_folders, read_best, step_folder, step_of
from evenload.training.checkpoint import files
from evenload.training.checkpoint.registry import OWN_STATE
from evenload.training.launch.print_once import warn_once


def load_checkpoint(run: str | PathLike[str], which: str | int = "last") -> dict[str, Any]:
    """Read a checkpoint: ``model.load_state_dict(evenload.load_checkpoint("runs/gpt", "best")["model"])``.

    Args:
        run: run folder (project_dir), or the folder of one checkpoint.
        which: ``"last"``, ``"best"``, or a number of steps. The last is the newest complete one: a warning names newer ones
            that are damaged.

    Returns:
        The states by the names that `Run.resume` was given, tensors on the CPU; under ``"values"`` those of `Run.checkpoint`.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    state = read_checkpoint(Path(run), which)
    own = state.pop(OWN_STATE, {})
    return {"values": own.get("values", {}), **state}


def read_checkpoint(run: Path, which: str | int) -> dict[str, Any]:
    """Read a checkpoint; ``"last"`` is the newest complete one, and a warning names newer ones that are damaged."""
    if which != "last" or (run / files.SKELETON).is_file():
        return files.read(_find(run, which))
    found = files.read_newest(run)
    if found is None:
        return files.read(_find(run, which))  # the error lists what there is
    if found.damaged:
        warn_once(found.report())
    return found.state


def find_resumable(run: Path, *, may_clean: bool) -> tuple[files.FoundCheckpoint | None, CheckpointError | None]:
    """Return the newest complete checkpoint that this rank sees, and the error if none can be used.

    With `may_clean` (the rank that writes) it first removes what a writer left that was killed.
    """
    try:
        if may_clean:
            files.clean_up(run)
        return files.read_newest(run), None
    except CheckpointError as error:
        return None, error


def _find(run: Path, which: str | int) -> Path:
    """Return the folder of a checkpoint; CheckpointError if there is none."""
    if (run / files.SKELETON).is_file():
        return run
    if not run.is_dir():
        raise CheckpointError(f"there is no folder {run}; give the project_dir of a run")
    found = checkpoint_folders(run)
    steps = ", ".join(str(step_of(folder)) for folder in found) or "none"
    if which == "best" and (best := read_best(run)) is not None:
        return step_folder(run, best.step)
    if str(which).isdecimal() and step_folder(run, int(which)).is_dir():
        return step_folder(run, int(which))
    why = (
        ""
        if which != "best"
        else "; run.checkpoint(best=('val_loss', 'min')) chooses a best one by a metric of run.log"
    )
    raise CheckpointError(
        f"{run} has no checkpoint {which!r}; expected 'last', 'best' or a step, and found the steps: {steps}{why}"
    )
