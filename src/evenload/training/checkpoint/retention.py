"""Keep the newest checkpoints and the best by a metric. Rank 0 alone decides: it holds the files."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evenload.atomic_file import write_atomically
from evenload.job.output import FULL_DISK_ERRORS
from evenload.records import checkpoints
from evenload.records.checkpoints import BestCheckpoint
from evenload.records.integrity import INFO_FILE, read_info, write_info

_RECENT = 1000


class Retention:
    """Follows the metric of ``best``, and removes what ``keep`` does not cover."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._logged_file = run / checkpoints.CHECKPOINT_FOLDER / ".logged.json"
        """The metric that was logged while its checkpoint was being written, until that has it."""
        self._keep = 0.0
        self.best: tuple[str, str] | None = None
        """Name and mode of the metric."""
        self._logged: dict[str, tuple[Any, int]] = {}
        self._recent: deque[tuple[Any, int]] = deque(maxlen=_RECENT)
        """The last values of the metric of ``best``, which may lie on a device."""
        self._judged: tuple[int, float] | None = None
        self._writing_step: int | None = None
        self._unnoted: float | None = None
        """The metric of the checkpoint that is being written, or was."""
        self._trouble = ""
        """The error of the newest note or removal; a later one tries again."""
        self._is_reported = False
        self._has_noted = False
        self._lock = threading.Lock()
        """For the files: a thread writes them too."""

    def set_options(self, keep: float, best: tuple[str, str] | None) -> None:
        """Take the options of a call of `run.checkpoint`; of several calls the one that keeps most counts."""
        self._keep = max(self._keep, keep)
        self.best = best or self.best

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Note metrics of the weights after `step` steps."""
        self._logged.update({str(name): (value, step) for name, value in metrics.items()})
        if self.best is not None and self.best[0] in metrics:
            value = metrics[self.best[0]]
            # Not the tensor itself, which may be changed later, and may hold the graph of its forward.
            self._recent.append((value.detach().clone() if isinstance(value, torch.Tensor) else value, step))

    @property
    def misses_metric(self) -> bool:
        """True if the metric of ``best`` was never logged, in no earlier session either."""
        if self.best is None or self.best[0] in self._logged:
            return False
        best = checkpoints.read_best(self._run)
        return best is None or best.metric != self.best[0]

    def begin(self, step: int) -> dict[str, Any]:
        """Note that the checkpoint of `step` is being written, in any thread; a metric logged until `end` belongs to it.

        Return the metric that it has now, for its `info.json`.
        """
        self._note_newest()
        self._writing_step, self._unnoted = step, self._value(step)
        if self.best is None or self._unnoted is None:
            return {}
        self._judged = (step, self._unnoted)
        return {"metric": self.best[0], "value": self._unnoted}

    def needs_write(self, step: int) -> bool:
        """Return, once for each value, whether the weights after `step` steps are the best so far and not on disk.

        If they are on disk, note the metric there; if they are being written, note it at the `end`. The metric may be of
        earlier weights, on disk, if the rank 0 was lost that would have noted it.
        """
        self._note_newest()
        at = self._logged.get(self.best[0], (None, step))[1] if self.best is not None else step
        value = self._value(at)
        if self.best is None or value is None or self._judged == (at, value):
            return False
        self._judged = (at, value)
        if self._writing_step == at:
            self._unnoted = value
            with contextlib.suppress(OSError):
                write_atomically(self._logged_file, json.dumps({"step": at, "metric": self.best[0], "value": value}))
            return False
        with self._lock:
            if not checkpoints.step_folder(self._run, at).is_dir():
                return at == step and self._beats(value)
            self._note_and_prune(at, value)
        return False

    def lost_best(self, now: int) -> str:
        """Return which best weights, of before step `now`, went with a rank 0 that was killed while it wrote them; else empty."""
        values = [(value, step) for logged, step in self._recent if math.isfinite(value := float(logged))]
        if self.best is None or not values:
            return ""
        value, step = (min if self.best[1] == "min" else max)(values, key=lambda found: found[0])
        if step >= now or checkpoints.step_folder(self._run, step).is_dir() or not self._beats(value):
            return ""
        what = f"the best weights so far, of step {step} ({self.best[0]} {value:g})"
        return f"rank 0 was lost while it wrote {what}: training has gone on, so the best of those on the disk counts"

    def _note_newest(self) -> None:
        """Note, once, the metric of the newest checkpoint if the process that wrote it was killed before it had."""
        if self._has_noted or self.best is None:
            return
        self._has_noted = True
        if not (found := checkpoints.checkpoint_folders(self._run)):
            return
        info, step = read_info(found[-1]), checkpoints.step_of(found[-1])
        with contextlib.suppress(OSError, ValueError):
            logged = json.loads(self._logged_file.read_text())
            info = info | logged if logged["step"] == step else info
        if info.get("metric") == self.best[0] and self._writing_step != step:
            with self._lock:
                self._note_and_prune(step, info["value"])

    def settle(self, step: int) -> None:
        """Note the metric of the checkpoint of `step`, which is complete, and remove those that are not kept."""
        with self._lock:
            value, self._unnoted = self._unnoted, None
            self._note_and_prune(step, value)

    def take_trouble(self) -> str:
        """Return why a metric was not noted or old checkpoints were not removed, once until that succeeds; else empty text."""
        text, self._is_reported = "" if self._is_reported else self._trouble, bool(self._trouble)
        return text

    def end(self, *, complete: bool) -> None:
        """Note how the write ended: complete and settled, or with nothing on the disk."""
        step, self._writing_step = self._writing_step, None
        if not complete:
            self._judged = None
        elif step is not None and self._unnoted is not None:
            self.settle(step)

    def _note_and_prune(self, step: int, value: float | None) -> None:
        is_best = value is not None and self._beats(value)
        try:
            try:
                self._note(step, value, is_best=is_best)
            except OSError as error:
                is_full = error.errno in FULL_DISK_ERRORS
                self._prune(step if is_best and is_full else None)  # makes room for the note
                self._note(step, value, is_best=is_best)
            self._prune()
            if value is not None or self.best is None:
                self._trouble, self._is_reported = "", False
        except OSError as error:
            self._trouble = f"checkpoint {step} is complete; noting its metric or removing old ones failed: {error}"

    def _note(self, step: int, value: float | None, *, is_best: bool) -> None:
        if self.best is None or value is None:
            return
        folder = checkpoints.step_folder(self._run, step)
        write_info(folder, {**read_info(folder), "metric": self.best[0], "value": value})
        self._logged_file.unlink(missing_ok=True)
        if is_best:
            checkpoints.write_best(self._run, BestCheckpoint(step, *self.best, value))

    def _value(self, step: int) -> float | None:
        if self.best is None or self.best[0] not in self._logged or self._logged[self.best[0]][1] != step:
            return None
        value = float(self._logged[self.best[0]][0])
        return value if math.isfinite(value) else None

    def _beats(self, value: float) -> bool:
        before = checkpoints.read_best(self._run)
        return before is None or (before.metric, before.mode) != self.best or before.is_beaten_by(value)

    def _prune(self, best_step: int | None = None) -> None:
        if not 0 < self._keep < math.inf:
            return
        if best_step is None and (best := checkpoints.read_best(self._run)) is not None:
            best_step = best.step
        # Those without the file are an earlier version's, which kept all.
        found = [folder for folder in checkpoints.checkpoint_folders(self._run) if any(folder.glob(INFO_FILE))]
        for folder in found[: -int(self._keep)]:
            if checkpoints.step_of(folder) == best_step:
                continue
            aside = folder.with_name(f".{folder.name}.removed")  # a reader sees all of it or nothing
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def is_due(every: int, step: int, last_step: int, *, skips: bool) -> bool:
    """Return whether a checkpoint of every so many steps is due; `skips`: not every step may write one."""
    if skips:
        return step // every > max(last_step, 0) // every
    return step > 0 and step % every == 0 and step != last_step
