"""The position of training in its data: plain values, counted in committed global samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.errors import CheckpointError


@dataclass(frozen=True)
class Cursor:
    """The position after the last committed step; equal on all ranks, and valid for any number of them.

    Of a tuple of loaders it counts units instead of samples; see map_reader.py.
    """

    epoch: int = 0
    step: int = 0
    position: int = 0
    """Committed global samples of this epoch's order."""
    global_step: int = 0
    samples_total: int = 0
    seed: int = 0
    """Seed of the order; another seed would mix two orders in one epoch."""
    epoch_samples: int = -1
    """Samples of this epoch's order; -1 before it is drawn, and for streams."""
    order_key: int = -1
    """Checksum of this epoch's order, if it was drawn from the user's sampler."""
    generators: tuple[str, ...] = ()
    """States of the sampler's own generators before this epoch's order was drawn."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Steps of this epoch after `position` that are committed already, and their samples (strategy ``async``)."""

    @property
    def in_epoch(self) -> bool:
        """True if a part of this epoch is committed."""
        return self.position > 0 or bool(self.ahead)

    def state_dict(self) -> dict[str, Any]:
        state = {**dataclasses.asdict(self), "generators": list(self.generators)}
        ahead = state.pop("ahead")
        return {**state, "ahead": [list(pair) for pair in ahead]} if ahead else state

    def after(self, step: int, low: int, high: int) -> Cursor:
        """Return the position once this step of the epoch is committed, with the samples ``[low, high)`` of its order."""
        if low == self.position and not self.ahead:  # in order, as usual; `replace` would take ten times as long
            later = object.__new__(Cursor)
            num_steps, num_samples = self.global_step + 1, self.samples_total + high - low
            later.__dict__.update(
                vars(self), step=step + 1, position=high, global_step=num_steps, samples_total=num_samples
            )
            return later
        ahead = {**dict(self.ahead), step: high - low}
        done, position = self.step, self.position
        if low == position:
            del ahead[step]
            done, position = step + 1, high
        while done in ahead:
            position += ahead.pop(done)
            done += 1
        return dataclasses.replace(
            self,
            step=done,
            position=position,
            global_step=self.global_step + 1,
            samples_total=self.samples_total + high - low,
            ahead=tuple(sorted(ahead.items())),
        )

    def place(self) -> list[int]:
        """Return the position as integers, for `moved_to`."""
        moved = [self.epoch, self.step, self.position, self.global_step, self.samples_total]
        return [*moved, self.epoch_samples, self.order_key, len(self.ahead), *sum(self.ahead, ())]

    def moved_to(self, place: Sequence[int]) -> Cursor:
        """Return this cursor at the `place` of another; what follows it is left out."""
        epoch, step, position, global_step, samples_total, epoch_samples, order_key, num_ahead = place[:8]
        flat = place[8 : 8 + 2 * num_ahead]
        return dataclasses.replace(
            self,
            epoch=epoch,
            step=step,
            position=position,
            global_step=global_step,
            samples_total=samples_total,
            epoch_samples=epoch_samples,
            order_key=order_key,
            ahead=tuple(zip(flat[::2], flat[1::2], strict=True)),
        )

    def of_next_epoch(self) -> Cursor:
        """Return the position at the beginning of the next epoch; the rest of this one is left out."""
        return dataclasses.replace(
            self, epoch=self.epoch + 1, step=0, position=0, epoch_samples=-1, order_key=-1, generators=(), ahead=()
        )

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Cursor:
        """Read the values of `state_dict`; CheckpointError if one is missing or unknown."""
        try:
            ahead = tuple((int(step), int(count)) for step, count in state.get("ahead", ()))
            return cls(**{**state, "generators": tuple(state["generators"]), "ahead": ahead})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint's data cursor holds {', '.join(sorted(map(str, state)))}, which this version can't "
                f"read ({error}); resume with the version that wrote it, or start anew with --fresh"
            ) from error
