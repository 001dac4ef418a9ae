"""`StepListener`: callbacks at the points of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from evenload.training.compute.micro_steps import LossFn

if TYPE_CHECKING:  # they call these
    from evenload.training.step.step import Step, StepLoader


class StepListener:
    """Callbacks at the defined points of a step. Subclasses override the ones they need; the defaults do nothing.

    begin -> backward -> gradients (once per call) -> trained -> end -> boundary -> extra_steps, if due
    """

    @property
    def rests(self) -> bool:
        """True if no callback has anything to do in the next steps of a rank alone, until `StepLoop.leave_line` is called.

        A listener that waits for something outside of the training may learn of it 0.2 s later (straight.py).
        """
        return False

    def on_begin(self, step: Step) -> None:
        """A loop body begins."""

    def on_backward(self, step: Step, loss_fn: LossFn) -> None:
        """`step.backward` was called and has not computed anything yet."""

    def on_gradients(self, step: Step) -> None:
        """`step.backward` is done without an error; `.grad` is final."""

    def on_trained(self, step: Step) -> None:
        """A step of training ended, before its commit."""

    def on_end(self, step: Step) -> None:
        """A loop body with a backward ended, in training or in a measurement, before the commit."""

    def on_boundary(self, step: Step) -> None:
        """A step of training is committed and the next has not begun; the callback may end the script.
        Not called while a stop is requested and the step's gradients are still unused: no checkpoint would hold them.
        """

    def on_loop_end(self) -> None:
        """A loop over a loader came to the end of its epoch, on all ranks."""

    def is_due(self, num_steps: int) -> bool:
        """Return whether `extra_steps` begins now, after `num_steps` steps of this session."""
        return False

    def extra_steps(self, loader: StepLoader) -> Iterator[Step]:
        """Yield steps of its own between two steps of training, and leave everything as it was."""
        return iter(())
