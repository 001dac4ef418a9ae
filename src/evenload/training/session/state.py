"""Contents and times of checkpoints: `run.resume` and `run.checkpoint`."""

from __future__ import annotations

import re
import time
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from evenload.errors import CheckpointError, ConfigError
from evenload.training.adaptive_batch.setup import AdaptiveBatch
from evenload.training.checkpoint import broadcast, files
from evenload.training.checkpoint.registry import OWN_STATE
from evenload.training.comm.control import Operation
from evenload.training.compute import randomness
from evenload.training.data.cursor import Cursor
from evenload.training.session.live_objects import live_objects
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import StepLoader

_EVERY = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(s|sec|min|h|step|steps)\s*$")
_UNIT_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


class Saver:
    """Writes and reads the checkpoints of one job; its own state in them is the run's: cursors, randomness, shares."""

    def __init__(self, context: TrainingContext, loaders: list[StepLoader]) -> None:
        self._context = context
        self._loaders = loaders
        self._last_s = 0.0
        self._last_step = -1
        self._called = False
        self._loaded = False
        self._finished = False
        self.adaptive_batch: AdaptiveBatch | None = None
        self.took_s = 0.0
        """Seconds that the last checkpoint of this session took; 0 before the first."""
        self.resumed = False

    def state_dict(self) -> dict[str, Any]:
        generators = randomness.capture(self._context.device)
        if generators["numpy"] is not None:
            kind, keys, *rest = generators["numpy"]
            generators["numpy"] = [kind, keys.tolist(), *rest]
        return {
            "finished": self._finished,
            "steps_done": self._context.loop.steps_done,
            "loaders": [
                {"cursor": loader.loader.cursor().state_dict(), "planner": loader.planner.state_dict()}
                for loader in self._loaders
            ],
            "precision": self._context.engine.precision.state_dict(),
            "generators": generators,
            **({} if self.adaptive_batch is None else {"batch": self.adaptive_batch.growth.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["loaders"]) != len(self._loaders):
            raise CheckpointError(
                f"the checkpoint holds {len(state['loaders'])} prepared loaders, but this script prepared {len(self._loaders)}"
            )
        self._finished = bool(state["finished"])
        self._context.loop.steps_done = int(state["steps_done"])
        for loader, saved in zip(self._loaders, state["loaders"], strict=True):
            cursor = Cursor.from_state_dict(saved["cursor"])
            loader.loader.load(cursor)
            self._load_batch(state.get("batch"), in_epoch=cursor.position > 0)
            loader.planner.load_state_dict(saved["planner"], cursor.global_step)
        self._context.engine.precision.load_state_dict(state["precision"])
        generators = dict(state["generators"])
        if generators["numpy"] is not None:
            generators["numpy"] = tuple(generators["numpy"])
        randomness.restore(generators, self._context.device)

    def _load_batch(self, state: dict[str, Any] | None, *, in_epoch: bool) -> None:
        if self.adaptive_batch is not None:
            self.adaptive_batch.growth.load_state_dict(state, in_epoch=in_epoch)
        elif state is not None and in_epoch and state["batch_size"] != state["base"]:
            raise CheckpointError(
                f"the checkpoint stands inside an epoch in batches of {state['batch_size']}, which batch_max let grow from "
                f"{state['base']}: keep batch_max until the epoch is over, or start from scratch with --fresh"
            )

    def resume(self, named: dict[str, Any]) -> bool:
        context = self._context
        if self.resumed:
            raise CheckpointError("run.resume was called twice; pass all state in one call")
        for name, value in named.items():
            if name == "evenload":
                raise CheckpointError("the name 'evenload' is reserved; give this state another name")
            context.registry.register(name, value)
        context.registry.register(OWN_STATE, self)
        self.resumed = True
        found = None if context.config.fresh else files.newest(context.folder)
        rows = context.control.exchange(Operation.RESUME, broadcast.checkpoint_key(found))
        # Rank 0 writes them, so its newest one counts, not one in a folder of the same name on another machine.
        missing = broadcast.ranks_without(rows, context.folder)
        if rows[0][0] < 0:
            return False
        state = files.read(found) if found is not None and (context.groups.rank == 0 or not missing) else None
        if missing:
            state = broadcast.broadcast_state(state, context.groups)
        context.registry.load(state or {})
        self._loaded = True
        step_index, finished = context.loop.steps_done, self._finished
        self._last_step, self._finished = step_index, False
        epochs = ", ".join(str(loader.epoch) for loader in self._loaders)
        context.recorder.event(
            "resumed",
            f"this run is finished at step {step_index} (epoch {epochs}); --fresh starts from scratch"
            if finished
            else f"resuming at step {step_index}"
            + (f"; sent to ranks {missing}, which can't see rank 0's run folder" if missing else ""),
            step=step_index,
        )
        return True

    def checkpoint(self, every: str | int | None) -> bool:
        """Write a checkpoint now, or when it is due; return whether one was written."""
        context = self._context
        if not self.resumed:
            raise CheckpointError(
                "run.checkpoint doesn't know what to save: call run.resume(model=model, optimizer=optimizer, ...) once "
                "before the loop; it also loads the newest checkpoint"
            )
        if context.loop.step is not None and context.loop.step.arm:
            return False  # a measurement's step is no training
        if context.spec.mode == "verify":
            return False  # verify leaves the disk unchanged
        self._called = True
        step = self._step_after_body()
        context.loop.check_between_steps("run.checkpoint")
        if every is not None and not self._is_time(every, step):
            return False
        self._write(step)
        return True

    def save(self) -> float:
        """Write a checkpoint between two steps, and return the seconds it took.

        One that the last loop body wrote is replaced: what the body did after it belongs to the step.
        """
        self._write(self._context.loop.steps_done)
        return self.took_s

    def close(self) -> None:
        """Save the last steps of a script that ended without an error; mark the run finished if its loop ran to the end."""
        context, loop = self._context, self._context.loop
        if not self.resumed or loop.is_half_done:
            return
        # Without run.checkpoint this session may have resumed from a checkpoint that a stop request wrote: the next start must
        # not begin there again.
        continued = self._loaded and (loop.ran_out or loop.steps_done > self._last_step)
        if not self._called and not continued:
            return
        # A script that leaves its loop early (time limit, stop request) may continue later.
        self._finished = loop.step is None and not loop.left_early
        step = self._step_after_body()
        if step > self._last_step:
            self._write(step)
        elif not self._finished:
            return
        elif (
            context.groups.rank == 0
            and not context.config.dry_run
            and (newest := files.newest(context.folder)) is not None
        ):
            # The last steps are saved already; only mark them as the last. Later changes of the script's objects (averaged
            # weights swapped in) don't belong to the checkpoint.
            files.update_values(newest, "evenload", {"finished": True})

    def _step_after_body(self) -> int:
        step = self._context.loop.step
        return step.index + 1 if step is not None and step.stats.calls else self._context.loop.steps_done

    def _is_time(self, every: str | int, step: int) -> bool:
        amount, unit = _parse_every(every)
        if unit == "steps":
            return step > 0 and step % int(amount) == 0 and step != self._last_step
        # The clock is rank 0's, as of the last exchange: the same number everywhere, so the same answer.
        return self._context.engine.elapsed_s - self._last_s >= amount * _UNIT_S[unit]

    def _write(self, step: int) -> None:
        context = self._context
        began_s = time.monotonic()
        self._last_s, self._last_step = context.engine.elapsed_s, step
        if context.loop.step is not None and context.loop.step.stats.calls:
            context.loop.step.commit()
        failure: CheckpointError | None = None
        with context.clock.segment("other"):
            state = context.registry.capture()
            if context.groups.rank == 0 and not context.config.dry_run:
                try:
                    files.write(context.folder, step, state)
                except CheckpointError as error:
                    failure = error
            rows = context.control.exchange(Operation.CHECKPOINT, [float(failure is not None)])
        if failure is not None:
            raise failure
        if rows[0][0]:
            raise CheckpointError("rank 0 failed to write the checkpoint")
        self.took_s = time.monotonic() - began_s
        context.recorder.event("checkpoint", f"checkpoint at step {step}", step=step)

    def unregistered(self) -> list[str]:
        """Return the types of existing schedulers and averaged models that were not passed to `run.resume`."""
        if not self.resumed:
            return []
        held = {id(value) for value in self._context.registry.values()} | {
            id(part) for value in self._context.registry.values() for part in getattr(value, "_schedulers", [])
        }
        return sorted(
            type(value).__name__ for value in live_objects(LRScheduler, AveragedModel) if id(value) not in held
        )


def _parse_every(every: str | int) -> tuple[float, str]:
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return float(every), "steps"
    match = _EVERY.match(every) if isinstance(every, str) else None
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"run.checkpoint(every={every!r}): expected '10min', '90s', '2h', '500steps' or a number of steps"
        )
    unit = "steps" if match[2].startswith("step") else match[2]
    if unit == "steps" and not match[1].isdecimal():
        raise ConfigError(f"run.checkpoint(every={every!r}): expected a whole number of steps")
    return float(match[1]), unit
