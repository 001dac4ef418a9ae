"""`StateTransfer`: the state of one rank, sent to ranks that missed a step or join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from evenload.training.checkpoint import files
from evenload.training.checkpoint.registry import OWN_STATE
from evenload.training.checkpoint.retention import Retention
from evenload.training.step.context import TrainingContext


class CheckpointSchedule(Protocol):
    """When the last checkpoint was written, by which all ranks know when the next is due."""

    retention: Retention

    def last_save(self) -> tuple[float, int]: ...

    def set_last_save(self, saved: tuple[float, int]) -> None: ...

    def collect(self, *, waits: bool = False) -> None:
        """Wait for the checkpoint that is being written."""

    def save_best(self) -> None:
        """Write the best checkpoint if a better metric was logged for these weights."""


class StateTransfer:
    def __init__(self, context: TrainingContext, schedule: CheckpointSchedule) -> None:
        self._context = context
        self._schedule = schedule
        self._to: tuple[int, ...] = ()
        self._source = 0
        self._joins = False
        self.missed_loss: float | None = None
        """Loss of the step that this rank missed, until it has received the state."""

    @staticmethod
    def prepare() -> None:
        """Write and read a small state: the first time takes 20 ms. In another thread, while this rank trains."""
        files.from_bytes(files.to_bytes({"state": torch.zeros(1)}))

    @property
    def is_due(self) -> bool:
        """True until all ranks that need it have the state."""
        return bool(self._to)

    def plan(self, to: Sequence[int], source: int, joins: bool, missed_loss: float | None) -> None:
        """Note who needs the state of whom; equal on all ranks, but for whether this rank joins or has missed a step."""
        self._to, self._source = tuple(to), source
        self._joins, self.missed_loss = joins, missed_loss

    def run(self) -> None:
        """Send or receive; PeerLostError if the other end is lost. The other ranks do nothing."""
        groups = self._context.groups
        if groups.rank == self._source:
            self._send()
        elif groups.rank in self._to:
            self._receive()
        self._to, self.missed_loss, self._joins = (), None, False

    def _send(self) -> None:
        context, engine = self._context, self._context.engine
        extra = {
            "engine": engine.state_dict(),
            "precision": engine.precision.state_dict(),
            "num_backwards": engine.num_backwards,
            "elapsed_s": engine.elapsed_s,
            "saved": self._schedule.last_save(),
            "epoch": context.control.epoch,
        }
        context.registry.send(context.groups, self._to, extra)
        context.registry.wait_until_sent()

    def _receive(self) -> None:
        context, engine = self._context, self._context.engine
        # A rank that missed a step has its own position, which is the same: the end of the loop body.
        without = () if self._joins else (OWN_STATE,)
        received = context.registry.receive(context.groups, self._source, without=without)
        context.loop.unsound = ""
        engine.load_state_dict(received["engine"])
        engine.precision.load_state_dict(received["precision"])
        engine.num_backwards = received["num_backwards"]
        if self._joins:
            engine.continue_clock(received["elapsed_s"])
            self._schedule.set_last_save(received["saved"])
            context.control.set_position(received["epoch"], -1)
