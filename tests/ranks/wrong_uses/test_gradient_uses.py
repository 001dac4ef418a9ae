"""Uses of gradients, hooks and optimizers: each gives the values of one process to 1e-12, or is refused by name."""

from __future__ import annotations

import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch

from evenload.testing import run_ranks
from tests.ranks.wrong_uses import gradient_scripts, loss_fn_scripts
from tests.ranks.wrong_uses import refused_gradient_scripts as wrong
from tests.ranks.wrong_uses.gradient_jobs import SHARES, Script, in_one_process, on_ranks, scripts_of

BOUND = 1e-12
THREE = {"micro_batch": 5}
"""Three micro-batches."""

RIGHT: dict[str, tuple[Script, dict[str, Any]]] = {
    script.__name__: (script, {}) for right in (gradient_scripts, loss_fn_scripts) for script in scripts_of(right)
} | {
    f"{script.__name__} in three": (script, THREE)
    for script in (loss_fn_scripts.zero_grad_in_loss_fn, gradient_scripts.raised_in_backward)
}

REFUSED: dict[str, tuple[Script, str]] = {
    script.__name__: (script, told)
    for script, told in (
        (wrong.raised_and_not_caught_by_all, r"PeerLostError: (rank 1 raised an exception|another rank is gone)"),
        (wrong.optimizer_in_a_hook, r"StepError: .*hook"),
        (wrong.optimizer_in_a_hook_of_before, r"Error: .*hook"),
        (wrong.accumulate_hook_that_clamps, r"Error: .*hook"),
        (wrong.teacher_not_prepared, r"StepError: .*prepare"),
        (wrong.own_scaler, r"StepError: .*precision=.fp16"),
        (wrong.optimizer_of_the_head_alone, r"StepError: .*requires_grad_\(False\)"),
        (wrong.accumulated_by_hand, r"StepError: gradients are already present before the step's first backward"),
        (wrong.two_loaders_in_zip, r"StepError: .*prepare\(.*\("),
        (
            wrong.parameters_that_nobody_sums,
            r"StepError: SGD steps 2 parameters that are in no model given to run.prepare",
        ),
        (wrong.sparse_gradient, r"StepError: the gradient of weight is sparse"),
        (wrong.plain_backward, r"StepError: loss.backward\(\) was called on a model that run.prepare returned"),
        (wrong.backward_in_loss_fn, r"StepError: loss_fn called backward\(\) itself"),
        (wrong.backward_of_the_returned_loss, r"RuntimeError: .*does not require grad"),
        (wrong.backward_inside_of_itself, r"StepError: .*step.backward"),
        (wrong.zero_grad_to_zeros_between_micro_batches, r"StepError: loss_fn changed the gradients"),
        (wrong.wrapped_in_ddp_after_prepare, r"Error: .*DistributedDataParallel"),
        (
            wrong.graph_of_an_earlier_call,
            r"RuntimeError: .*(graph a second time|size of tensor)|PeerLostError: rank .* raised",
        ),
        (wrong.clipped_in_loss_fn, r"StepError: loss_fn changed the gradients"),
        (wrong.stepped_in_loss_fn, r"StepError: SGD stepped inside step.backward"),
        (wrong.other_learning_rate_on_one_rank, r"DivergenceError: "),
        (wrong.detached_loss, r"StepError: .*under torch.no_grad, detached"),
        (wrong.detached_loss_on_one_rank, r"StepError: .*detached|PeerLostError: rank 1 raised an exception"),
        (wrong.under_inference_mode, r"StepError: .*(inference|no_grad)"),
        (wrong.imaginary_nan, r"NonFiniteError: the gradient was NaN or infinite in 3 steps in a row"),
        (wrong.gradient_changed_on_one_rank, r"DivergenceError: "),
        (wrong.noise_of_each_rank, r"DivergenceError: "),
        (wrong.frozen_on_one_rank, r"DesyncError: the ranks train different parameters"),
        (wrong.other_dtype_on_one_rank, r"DesyncError: the ranks train different parameters"),
        (wrong.other_dtype_on_one_rank_later, r"DesyncError: the ranks train different parameters in step 2"),
        (wrong.replaced_on_one_rank, r"(DesyncError|DivergenceError): "),
        (wrong.zeroed_on_one_rank, r"StepError: .*gradients are already present|PeerLostError: another rank is gone"),
    )
}

IN_THREE = (
    wrong.zero_grad_to_zeros_between_micro_batches,
    wrong.graph_of_an_earlier_call,
    wrong.clipped_in_loss_fn,
)

AFTER_THE_LIMIT = (wrong.other_dtype_on_one_rank_later, wrong.replaced_on_one_rank)
"""Their ranks sum buckets of other sizes, so that gloo waits until `timeout_s`."""

Outcome = list[torch.Tensor | str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return the result of each script on each rank."""
    scripts = [(name, script, settings) for name, (script, settings) in RIGHT.items()]
    for name, (script, _) in REFUSED.items():
        limit = {"timeout_s": 3.0} if script in AFTER_THE_LIMIT else {}
        scripts.append((name, script, {**limit, **(THREE if script in IN_THREE else {})}))
    ranks = run_ranks(on_ranks, len(SHARES), scripts, str(tmp_path_factory.mktemp("runs")), timeout_s=100.0)
    return {name: list(results) for (name, *_), *results in zip(scripts, *ranks, strict=True)}


@cache
def _expected(script: Script) -> torch.Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about what the script does
            return in_one_process(script)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RIGHT)
def test_exact(name: str, outcomes: dict[str, Outcome]) -> None:
    expected = _expected(RIGHT[name][0])
    for rank, values in enumerate(outcomes[name]):
        assert not isinstance(values, str), f"rank {rank}: {values}"
        assert values.shape == expected.shape
        found = float((values - expected).norm() / expected.norm())
        assert found <= BOUND, f"rank {rank} differs from one process by {found:.1e}"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank, told in enumerate(outcomes[name]):
        assert isinstance(told, str), f"rank {rank} was told nothing"
        assert re.search(REFUSED[name][1], told), f"rank {rank} was told: {told}"
