"""Hints for errors of Python and torch that follow from a known wrong use: what to write instead."""

from __future__ import annotations

import traceback

from evenload.errors import EvenloadError

_UNPREPARED = (
    "the loop runs over a plain DataLoader, which yields batches; write: model, loader = run.prepare(model, loader), then "
    "`for step in loader: step.backward(loss_fn)`"
)
_NO_GRADIENT = (
    "step.backward(loss_fn) has computed the gradients already, so leave loss.backward() out; or, if this was step.backward on a "
    f"batch: {_UNPREPARED}"
)
_MESSAGES = (
    (
        "Expected all tensors to be on the same device",
        "in loss_fn the batch is on run.device already, and run.prepare moves the model; create others with device=run.device",
    ),
    (
        "Default process group has not been initialized",
        "one rank alone has no process group; use run.barrier, run.reduce or run.gather, or run.group([0])",
    ),
    (
        "initialize the default process group twice",
        "evenload.init has made the process groups; leave dist.init_process_group out, or call it before evenload.init",
    ),
    ("element 0 of tensors does not require grad", _NO_GRADIENT),
)
_PREPARE = (
    "run.prepare returns what it was given, in the same order: model, loader = run.prepare(model, loader). Optimizers and "
    "schedulers stay your own and are not passed to it"
)
_NOT_STEPS = (list, tuple, dict)


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def hint_for(error: BaseException) -> str:
    """Return what to write instead; empty if nothing is known."""
    if isinstance(error, EvenloadError):
        return ""
    if isinstance(error, AttributeError) and error.name == "backward" and isinstance(error.obj, _NOT_STEPS):
        return _UNPREPARED
    text = str(error)
    if "values to unpack" in text and ".prepare(" in _last_line(error):
        return _PREPARE
    return next((hint for sign, hint in _MESSAGES if sign in text), "")
