"""Errors of loops over a prepared loader, and of their bodies, that can't be right."""

from __future__ import annotations

from evenload.errors import StepError


def not_a_batch() -> StepError:
    return StepError(
        "a prepared loader yields steps, not batches; write\n"
        "    for step in loader:\n"
        "        loss = step.backward(loss_fn)\n"
        "where loss_fn(batch) receives each micro-batch, such as `x, y = batch`, and returns the loss. The size of a batch is "
        "loader.batch_size; one to look at, as next(iter(...)), comes from the DataLoader itself, before run.prepare"
    )


def step_is_over() -> StepError:
    return StepError(
        "this step is over; call step.backward inside the loop body of its own step. A list of steps, itertools.cycle(loader) "
        "and next(iter(loader)) keep old ones: loop over the epochs, and in each `for step in loader:`"
    )


def inside_loss_fn(what: str) -> StepError:
    return StepError(
        f"{what} was called inside loss_fn, which runs once for each micro-batch, and again if a step is redone; call it in the "
        "loop body, after step.backward(loss_fn). For averages over the global batch return the values with the loss: "
        "return {'loss': loss, 'accuracy': accuracy}, which become step.metrics"
    )


def second_loop(*, same_loader: bool) -> StepError:
    """Return the error of a loop that begins inside a step, of the same loader or of another."""
    if same_loader:
        return StepError(
            "a loop over a prepared loader began inside a loop over the same loader, which has one loop at a time; end the "
            "first by `break`, evaluate with run.batches(val_loader), or prepare a second DataLoader"
        )
    return StepError(
        "a step of one prepared loader began inside a step of another: a step has the batches of one loader, so zip and "
        "nested loops over prepared loaders don't work. Prepare them together: model, loader = run.prepare(model, "
        "(labeled, unlabeled)); then in `for step in loader`, loss_fn receives a tuple of their batches"
    )


def half_done(what: str) -> StepError:
    return StepError(
        f"{what} was called between step.backward and optimizer.step(), when the step is half done; call it at the end of the "
        "loop body. Step the optimizer in each step: the DataLoader's batch_size replaces gradient accumulation. (After an "
        "update by hand through .data, call model.zero_grad() first)"
    )


def not_a_function(value: object) -> StepError:
    return StepError(
        f"step.backward received a {type(value).__name__}; pass the function itself, without calling it: "
        "step.backward(loss_fn), where loss_fn(batch) returns the loss of a micro-batch"
    )
