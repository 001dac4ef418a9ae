"""The measure itself: what is wrong on purpose must be seen, far above the bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evenload.testing import run_ranks
from evenload.training.compute import batchnorm, micro_steps
from evenload.training.parallel import ddp
from tests.ranks.exact.measure import BOUND, check, difference
from tests.ranks.exact.ranks import Setting, train
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS

BACKWARD = ddp._backward


def _change_losses(change: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
    """Change the loss of each micro-batch before its backward, until `train_wrongly` puts it back."""

    def wrong(reducer: Any, loss: torch.Tensor, *, last: bool, idle: bool) -> None:
        BACKWARD(reducer, change(loss, last), last=last, idle=idle)

    ddp._backward = wrong


def _weigh_all_ranks_equally(run: Any) -> None:
    """What DistributedDataParallel does: a mean over ranks of local means."""
    step = run._loaders[0]
    _change_losses(lambda loss, last: loss * (32 / 3 / max(1, step.planner.shares[run.rank])))


def _leave_a_micro_batch_out(run: Any) -> None:
    _change_losses(lambda loss, last: loss if last or run.rank != 2 else loss * 0)


def _normalise_locally(run: Any) -> None:
    class Local(batchnorm.Statistics):
        world_size = 1  # type: ignore[assignment]

    run._context.engine.strategy._statistics.__class__ = Local
    run._context.engine._consistency.check = lambda step, keys: (
        None
    )  # it would see that buffers differ, and end the run


WRONG = {
    "equal weights": ("Clipped", Setting((24, 6, 2), 8), _weigh_all_ranks_equally),
    "a micro-batch less": ("Clipped", Setting((24, 6, 2), 8), _leave_a_micro_batch_out),
    "local BatchNorm": ("Normed", Setting((16, 8, 8)), _normalise_locally),
}


def train_wrongly(folder: str, strategy: str) -> list[Any]:
    torch.set_num_threads(1)
    records = []
    for index, (name, setting, wrong) in enumerate(WRONG.values()):
        setting = replace(setting, strategy=strategy)
        records.append(train(TASKS[name](), setting, f"{folder}/{index}", wrong=wrong))
        ddp._backward = BACKWARD
    nominal = micro_steps.nominal_units
    micro_steps.nominal_units = lambda *args: nominal(*args) * 1.000001  # type: ignore[assignment]
    records.append(
        train(TASKS["Tokens"](), Setting((24, 6, 2), 8, strategy=strategy), f"{folder}/ok")
    )  # nominal cancels: still right
    return records


def test_wrong_arithmetic_is_seen(strategy: str, tmp_path: Path) -> None:
    ranks = run_ranks(train_wrongly, 3, str(tmp_path), strategy)
    for index, (what, (name, _, _)) in enumerate(WRONG.items()):
        records = [results[index] for results in ranks]
        expected = Reference(TASKS[name](), records[0].num_micro).train()
        found = difference(records[0], expected)
        assert found.grads > 1e-3, f"{what}: {found}"
        assert found.params > 1e-3, f"{what}: {found}"
        with pytest.raises(AssertionError):
            check(what, records, expected, listed=False)
    check("Tokens other nominal units", [results[-1] for results in ranks], Reference(TASKS["Tokens"](), 3).train())


def test_the_reference_depends_on_what_it_should() -> None:
    """K matters with BatchNorm and not without; the order of samples and the clipping matter."""
    assert difference(Reference(TASKS["Normed"](), 3).train(), Reference(TASKS["Normed"](), 1).train()).params > 1e-4
    plain = Reference(TASKS["Clipped"](), 1).train()
    assert difference(Reference(TASKS["Clipped"](), 3).train(), plain).worst < BOUND
    other = TASKS["Clipped"]()
    other.order = lambda epoch: list(range(other.num_samples))  # type: ignore[method-assign]
    assert difference(Reference(other, 1).train(), plain).params > 1e-4
    assert difference(Reference(TASKS["Task"](), 1).train(), plain).params > 1e-4
