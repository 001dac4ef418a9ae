"""Contents and times of checkpoints: `run.resume` and `run.checkpoint`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from evenload.errors import CheckpointError, EvenloadError, StepError, UnwritableError
from evenload.training.adaptive_batch.growth import check_not_grown
from evenload.training.adaptive_batch.setup import AdaptiveBatch
from evenload.training.checkpoint import broadcast, files
from evenload.training.checkpoint.load import find_resumable
from evenload.training.checkpoint.options import STEPS, SavedValues, check_best, check_keep, check_values, parse_every
from evenload.training.checkpoint.registry import OWN_STATE
from evenload.training.checkpoint.retention import Retention, is_due
from evenload.training.checkpoint.writer import CheckpointWriter, WrittenCheckpoint
from evenload.training.comm.control import Operation
from evenload.training.compute import randomness
from evenload.training.data.cursor import Cursor
from evenload.training.islands.synchroniser import IslandSynchroniser
from evenload.training.launch import worker
from evenload.training.session.script_settings import ScriptSettings, changes_text, conflicts, is_data, resumed_text
from evenload.training.step.context import TrainingContext
from evenload.training.step.step_loader import StepLoader

_STORED, _RAISES, _NOT_STORED = 0.0, 1.0, 2.0
"""Rank 0 reports of a checkpoint: it is there or begun; an error for the script; the disk did not take it."""


class Saver:
    """Writes and reads the checkpoints of one job; its own state in them is the run's: cursors, randomness, shares."""

    def __init__(self, context: TrainingContext, loaders: list[StepLoader]) -> None:
        self._context = context
        self._loaders = loaders
        self._last_s, self._last_step = 0.0, -1
        """The last call of `run.checkpoint` that wrote or began to, as on all ranks."""
        self._written_step = -1
        """The step of the newest complete checkpoint of this session, or of the one that it resumed from."""
        self._finished = self.was_finished = False
        self._values: Mapping[str, Any] = {}
        self._has_new_values = False
        self._settings: Mapping[str, Any] = {}
        self._skips_rest = self._data_changed = self.resumed = False
        self.decisions: list[str] = []
        """Messages of the resume, for a dry run."""
        self.retention = Retention(context.folder)
        self._writer = CheckpointWriter(context.folder, self.retention)
        self._failed: CheckpointError | None = None
        """Error of the last write, unless a later one succeeded."""
        self._raised_step = -1
        """The step of the last checkpoint whose error the script received."""
        self._reason = ""
        """Of the checkpoint that is being written."""
        self.adaptive_batch: AdaptiveBatch | None = None
        self.before_write: Callable[[], object] = dict  # a rank that missed the step receives the state (elastic/)
        self.took_s = 0.0
        """Seconds that the last complete checkpoint of this session took on rank 0; 0 before the first."""
        self.islands: IslandSynchroniser | None = None
        self.in_optimizer = False
        """True while an optimizer steps: the weights may be half updated."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "finished": self._finished,
            "steps_done": self._context.loop.steps_done,
            "loaders": [
                {"cursor": loader.loader.cursor().state_dict(), "planner": loader.planner.state_dict()}
                for loader in self._loaders
            ],
            "precision": self._context.engine.precision.state_dict(),
            "generators": randomness.state_dict(self._context.device),
            "values": check_values(self._values),
            "settings": dict(self._settings),
            **({} if self.adaptive_batch is None else {"batch": self.adaptive_batch.growth.state_dict()}),
            **({} if self._context.wire is None else {"wire": self._context.wire.state_dict()}),
            **({} if self.islands is None else {"outer": self.islands.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["loaders"]) != len(self._loaders):
            raise CheckpointError(
                f"the checkpoint holds {len(state['loaders'])} prepared loaders, but this script prepared {len(self._loaders)}"
            )
        before = [loader.loader.cursor() for loader in self._loaders]
        try:
            for loader, saved in zip(self._loaders, state["loaders"], strict=True):
                cursor = Cursor.from_state_dict(saved["cursor"])
                others = self._data_changed or (self.adaptive_batch is None and "batch" in state)  # drop_last
                is_over = others and cursor.position == cursor.epoch_samples
                if cursor.in_epoch and (self._skips_rest or is_over):
                    cursor = cursor.of_next_epoch()
                loader.loader.load(cursor)
                self._load_batch(state.get("batch"), cursor)
                loader.planner.load_state_dict(saved["planner"], cursor.global_step)
        except EvenloadError:
            for loader, earlier in zip(self._loaders, before, strict=True):
                loader.loader.load(earlier)
            raise
        self._finished = bool(state["finished"])
        self._values = dict(state.get("values", {}))
        self._context.loop.steps_done = int(state["steps_done"])
        if self.islands is not None:
            self.islands.load_state_dict(state.get("outer", {}))
        self._context.engine.precision.load_state_dict(state["precision"])
        if self._context.wire is not None and "wire" in state:
            self._context.wire.load_state_dict(state["wire"])
        randomness.load_state_dict(state["generators"], self._context.device)

    def _load_batch(self, state: dict[str, Any] | None, cursor: Cursor) -> None:
        if self.adaptive_batch is not None:
            self.adaptive_batch.growth.load_state_dict(state, in_epoch=cursor.in_epoch)
        elif state is not None:
            check_not_grown(state, cursor)

    def resume(self, named: dict[str, Any]) -> SavedValues:
        context = self._context
        if self.resumed:
            raise CheckpointError("run.resume was called twice; pass all state in one call")
        for name, value in named.items():
            if name in ("evenload", "values"):  # load_checkpoint returns those of run.checkpoint as "values"
                raise CheckpointError(f"the name {name!r} is reserved; give this state another name")
            context.registry.register(name, value)
        context.registry.register(OWN_STATE, self)
        self.resumed = True
        settings = ScriptSettings(named, self._loaders, context.config.seed)
        self._settings = settings.values
        context.recorder.event("script_settings", "", settings=self._settings)
        found, unusable = (
            (None, None) if context.config.fresh else find_resumable(context.folder, may_clean=self._writes)
        )
        rows = context.control.exchange(
            Operation.RESUME, broadcast.checkpoint_key(None if found is None else found.folder, unusable is not None)
        )
        if unusable is not None and (context.groups.rank == 0 or rows[0][0] == broadcast.UNUSABLE):
            raise unusable
        # Rank 0 writes them, so its newest one counts, not one in a folder of the same name on another machine.
        missing = broadcast.ranks_without(rows, context.folder)
        if rows[0][0] < 0:
            return SavedValues({}, loaded=False)
        state = found.state if found is not None and context.groups.rank not in missing else None
        if missing:
            state = broadcast.broadcast_state(state if context.groups.rank == 0 else None, context.groups)
        state = state or {}
        changed = settings.compare(state.get(OWN_STATE, {}).get("settings", {}), state)
        cursors = [loader["cursor"] for loader in state.get(OWN_STATE, {}).get("loaders", [])]
        conflicting = conflicts(changed, cursors) if len(cursors) == len(self._loaders) else set()
        self._skips_rest = context.config.override and bool(conflicting)
        self._data_changed = any(is_data(row.name) for row in changed)
        text = partial(changes_text, changed, conflicting, override=context.config.override)
        try:
            settings.check_classes(changed)
            context.registry.load(state)
            notes = settings.take(changed)
        except EvenloadError:
            if changed:
                self._decide("settings", text(refused=True))
            raise
        step_index, finished = context.loop.steps_done, self._finished
        self._last_step = self._written_step = step_index
        self._finished, self.was_finished = False, finished
        if found is not None and found.damaged and context.rank == 0:
            self._decide("damaged_checkpoint", found.report(), damaged=[path.name for path, _ in found.damaged])
            if self._writes:
                files.set_aside(found.damaged)
        epochs = [loader.loader.epoch for loader in self._loaders]
        self._decide("resumed", resumed_text(step_index, epochs, missing, finished=finished))
        if changed:
            self._decide("settings", "\n".join([text(), *notes]), changed=[vars(row) for row in changed])
        return SavedValues(self._values, loaded=True)

    def _decide(self, kind: str, message: str, **fields: Any) -> None:
        self.decisions.append(message)
        self._context.recorder.event(kind, message, step=self._context.loop.steps_done, **fields)

    def checkpoint(
        self, every: str | int | None, keep: int | str, best: tuple[str, str] | None, values: Mapping[str, Any] | None
    ) -> bool:
        """Write a checkpoint now, or begin one when it is due; return whether there is one."""
        context = self._context
        if not self.resumed:
            raise CheckpointError(
                "run.checkpoint doesn't know what to save: call run.resume(model=model, optimizer=optimizer, ...) once "
                "before the loop; it also loads the newest checkpoint"
            )
        if context.loop.in_backward:
            raise StepError("run.checkpoint was called inside loss_fn; call it at the end of the loop body")
        interval = None if every is None else parse_every(every)
        self.retention.set_options(check_keep(keep), None if best is None else check_best(best))
        if best is not None:
            context.loop.leave_line()
        if values is not None:
            check_values(values, convert=False)  # an error now, not at the first checkpoint
            self._values, self._has_new_values = values, True
        if context.spec.mode == "verify" or (context.loop.step is not None and context.loop.step.arm):
            return False  # verify leaves the disk unchanged, and a measurement's step is no training
        context.loop.check_between_steps("run.checkpoint")
        if self.islands is not None and not self.islands.opens(now=interval is None):
            return False
        step = self._step_after_body()
        if interval is not None and not self._is_time(interval, step):
            return False
        return self._write(step, waits=interval is None, is_due=interval is not None)

    def save(self, *, is_due: bool = False) -> float:
        """Write a checkpoint between two steps, and return the seconds it took.

        One that the last loop body wrote is replaced: what the body did after it belongs to the step.
        """
        began_s = time.monotonic()
        self._write(self._context.loop.steps_done, waits=True, is_due=is_due)
        return time.monotonic() - began_s

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of these weights; a better one of ``best`` is acted on by `save_best`."""
        self.retention.log(metrics, self._step_after_body())

    def collect(self, *, waits: bool = False) -> None:
        """Report the checkpoint that was written beside the training, if it is complete or failed."""
        written = self._writer.take(waits=waits)
        if written is not None and written.error is None:
            self._record(written)
        elif written is not None and written.error is not None:
            self._report_failed(written.step, written.error)
        if text := self.retention.take_trouble():
            self._context.recorder.event("checkpoint_untidy", text)

    def _report_failed(self, step: int, error: CheckpointError) -> bool:
        then = "is tried when it is due" if isinstance(error, UnwritableError) else "raises this error"
        text = f"CHECKPOINT FAILED: {error}; training goes on, and the next one {then}"
        text, self._failed = "" if self._failed else text, error  # one line for a disk that stays full
        self._context.recorder.event("checkpoint_failed", text, step=step, error=str(error))
        self.retention.end(complete=False)  # a best one is tried again
        return False

    @property
    def rests(self) -> bool:
        return self.retention.best is None and not self._writer.is_writing

    def save_best(self) -> None:
        """Write the best checkpoint if a better metric was logged for these weights. Rank 0 writes, the others do nothing."""
        if self.retention.best is None or self._is_split:
            return
        step = self._context.loop.steps_done
        if self._saves and self.retention.needs_write(step):
            with self._context.clock.segment("other"):
                self._store(step, "the best so far", waits=False, is_due=True)

    def close(self, well: bool) -> None:
        """Save the last steps, and mark the run finished if its loop ran to the end. Rank 0 writes; all hold the same state.

        A script that did not end `well` must not wait for other ranks, which may be gone, and keeps its own error.
        """
        loop = self._context.loop
        if self._writer.is_writing:
            with contextlib.nullcontext() if well else worker.saving(self._context.spec):
                self.collect(waits=True)
        if not self._saves:
            return
        if well:
            # A script that leaves its loop early (time limit, stop request) may continue later.
            ended = loop.step is None and not loop.left_early and not loop.has_unused_gradients
            self._finished = ended and (loop.ran_out or self.was_finished)
            try:
                self._save_last("")
                if self._failed is not None:
                    raise self._failed
            except CheckpointError as error:
                if self._raised_step != loop.steps_done:
                    raise
                self._report_not_saved(f": {error}")  # the script received this error, and caught it
            if self.retention.misses_metric and (best := self.retention.best) is not None:
                self._context.recorder.event("best", f"no best checkpoint was kept: run.log never received {best[0]!r}")
            return
        why = "an optimizer had not finished its step" if self.in_optimizer else loop.unsound
        if why := why or ("the islands had not synchronised" if self._is_split else ""):
            newest = f"is of step {self._written_step}" if self._written_step >= 0 else "was never written"
            self._report_not_saved(f", the weights may be wrong: {why}; the newest checkpoint {newest}")
            return
        try:
            with worker.saving(self._context.spec):
                after = "; what follows the optimizer's step in the loop body did not run for the last step"
                used = loop.left_early and not loop.failed and not loop.has_unused_gradients
                self._save_last(f"the script ended by an error{after if used else ''}")
        except Exception as error:  # the script's own error is the one to report
            self._report_not_saved(f": {error}")

    def _report_not_saved(self, why: str) -> None:
        text, step = f"the last steps are not saved{why}", self._context.loop.steps_done
        self._context.recorder.event("not_saved", text, step=step)

    @property
    def _saves(self) -> bool:
        """True on the rank that writes, if the script registered anything to save."""
        return self._writes and self.resumed and len(self._context.registry.names) > 1

    @property
    def _writes(self) -> bool:
        context = self._context
        is_main = context.rank == 0 and not context.loop.left  # one that leaves: the others go on, and write
        return is_main and context.spec.mode == "train" and not context.config.dry_run

    @property
    def _is_split(self) -> bool:
        """True while islands hold different weights, which no checkpoint may hold."""
        return self.islands is not None and not self.islands.is_clean

    def _save_last(self, reason: str) -> None:
        """Write a last checkpoint, or bring the newest one up to date if it holds the last steps already."""
        loop = self._context.loop
        if self._is_split:
            return  # a round was left in the middle
        step = loop.steps_done if loop.has_unused_gradients else self._step_after_body()
        if loop.has_unused_gradients or loop.failed:
            self._context.engine.undo()
        if step > max(self._written_step, 0):
            if loop.step is not None and step > loop.steps_done:
                loop.step.commit()
            self._store(step, reason, waits=True)
            return
        self.save_best()
        self.collect(waits=True)
        newest = files.newest(self._context.folder)
        if newest is None or files.step_of(newest) != step or not (self._finished or self._has_new_values):
            return
        # Weights that the script changed since (averages swapped in) don't belong to the checkpoint. Schedulers that step
        # once an epoch do.
        changes: dict[str, dict[str, Any]] = {OWN_STATE: {"values": check_values(self._values)}}
        if self._finished:
            own = self.state_dict()
            changes[OWN_STATE] |= {name: own[name] for name in ("finished", "loaders", "batch") if name in own}
            for name, value in zip(self._context.registry.names, self._context.registry.values(), strict=True):
                if isinstance(value, LRScheduler):
                    changes[name] = value.state_dict()
        files.update_values(newest, changes)

    def _step_after_body(self) -> int:
        step = (loop := self._context.loop).step
        return step.index + step.batch.num_steps if step is not None and step.stats.calls else loop.steps_done

    def last_save(self) -> tuple[float, int]:
        """Return the seconds of the run and the step of the last checkpoint that all ranks wrote together."""
        return self._last_s, self._last_step

    def set_last_save(self, saved: tuple[float, int]) -> None:
        """Continue as a rank whose `last_save` is `saved`."""
        self._last_s, self._last_step = saved

    def _is_time(self, interval: tuple[float, str], step: int) -> bool:
        amount, unit = interval
        if unit == STEPS:
            return is_due(int(amount), step, self._last_step, skips=self.islands is not None)
        # The clock is rank 0's, as of the last exchange: the same number everywhere, so the same answer.
        return self._context.engine.elapsed_s - self._last_s >= amount

    def _write(self, step: int, *, waits: bool, is_due: bool = False) -> bool:
        """Write the state after `step` steps, as `_store` does; all ranks call it."""
        context = self._context
        self.before_write()
        context.loop.settle()
        if self.islands is not None:
            self.islands.finish()
        self._last_s, self._last_step = context.engine.elapsed_s, step
        if context.loop.step is not None and context.loop.step.stats.calls:
            context.loop.step.commit()
        failure, outcome = None, _STORED
        if context.wire is not None:
            context.control.leave_loops()
            context.wire.keep(context.control.guarded(context.wire.gather))
        if self.islands is not None:
            self.islands.gather()
        with context.clock.segment("other"):
            if context.groups.rank == 0:
                try:
                    self.collect(waits=True)
                    if not (waits or self._failed is None or isinstance(self._failed, UnwritableError)):
                        fault, self._failed = self._failed, None  # no error of the disk, which may pass
                        raise fault
                    outcome = _STORED if self._store(step, "", waits=waits, is_due=is_due) else _NOT_STORED
                except CheckpointError as error:
                    failure, outcome = error, _RAISES
            rows = context.control.exchange(Operation.CHECKPOINT, [outcome])
        if failure is not None:
            self._raised_step = step
            raise failure
        if rows[0][0] == _RAISES:
            raise CheckpointError("rank 0 failed to write the checkpoint", elsewhere=True)
        return bool(rows[0][0] == _STORED)

    def _store(self, step: int, reason: str, *, waits: bool, is_due: bool = False) -> bool:
        """Write the state to disk, on rank 0: beside the training, or now (`waits`). CheckpointError if it can't be.

        If it `is_due`, a disk that does not take it is reported, and False returned.
        """
        self.collect(waits=True)
        epoch = self._loaders[0].loader.epoch if self._loaders else None
        self._reason = reason
        try:
            self._writer.start(step, self._context.registry.capture(), {"epoch": epoch}, waits=waits)
            written = self._writer.take(waits=True) if waits else None
            if written is not None and written.error is not None:
                raise written.error
        except UnwritableError as error:
            if not is_due:
                raise
            return self._report_failed(step, error)
        if written is not None:
            self._record(written)
        return True

    def _record(self, written: WrittenCheckpoint) -> None:
        self._written_step, self._failed, self.took_s = written.step, None, written.seconds
        text = f"checkpoint at step {written.step}" + (f" ({self._reason})" if self._reason else "")
        sizes = {"seconds": written.held_s, "write_s": written.seconds, "size_bytes": written.num_bytes}
        self._context.recorder.event("checkpoint", text, step=written.step, **sizes)
