"""Unusual uses of models, autograd and optimizers: exact to 1e-12, refused by name, or named by an event."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from evenload.testing import run_ranks
from tests.ranks.wrong_uses import further_wrong_scripts as more_wrong
from tests.ranks.wrong_uses import unusual_optimizer_scripts, unusual_scripts
from tests.ranks.wrong_uses import unusual_wrong_scripts as wrong
from tests.ranks.wrong_uses.gradient_jobs import SHARES, Script, check_exact, on_ranks, scripts_of

THREE = {"micro_batch": 5}
"""Three micro-batches."""

RIGHT: dict[str, tuple[Script, dict[str, Any]]] = {
    script.__name__: (script, {})
    for module in (unusual_scripts, unusual_optimizer_scripts)
    for script in scripts_of(module)
}
RIGHT |= {
    f"{script.__name__} in three": (script, THREE)
    for script in (
        unusual_scripts.ensemble_by_vmap,
        unusual_scripts.function_that_adds_to_a_gradient,
        unusual_scripts.function_without_a_gradient_at_times,
        unusual_scripts.nested_checkpoints,
        unusual_scripts.reversible_block,
        unusual_optimizer_scripts.hook_that_removes_itself,
        unusual_optimizer_scripts.views_of_a_vector_of_the_scripts_own,
    )
}

_NODE = r"StepError: the script holds the node of the graph that accumulates the gradient of Sequential.0.weight"
_SET = r"StepError: loss_fn set or changed .grad of "
_SHARDED = r"(StepError|ConfigError): .*0.weight is spread over ranks \(a DTensor"

REFUSED: dict[str, str] = {
    wrong.large_gradient_set_in_loss_fn.__name__: _SET + "2.weight",
    wrong.small_gradient_set_in_loss_fn.__name__: _SET + "2.bias",
    wrong.noise_added_in_loss_fn.__name__: r"StepError: loss_fn (set or )?changed",
    wrong.gradient_in_memory_of_a_function.__name__: r"DivergenceError: .*parameter 2.weight.*samples \(sum it with run.reduce",
    wrong.clamp_before_accumulation.__name__: _NODE,
    wrong.norms_after_accumulation.__name__: _NODE,
    wrong.hook_of_several_gradients.__name__: _NODE,
    wrong.embedding_that_scales_its_rows.__name__: r"ConfigError: Sequential.0 has max_norm=0.5",
    wrong.running_statistics_of_instances.__name__: r"DivergenceError: .*buffer 2.running_mean",
    wrong.initialised_after_prepare.__name__: r"DivergenceError: .*at step 0.*parameter 2.weight",
    wrong.head_trained_beside_copies.__name__: r"StepError: SGD steps 2 parameters that are in no model given to run.prepare",
    wrong.head_trained_in_the_first_of_two_calls.__name__: r"StepError: SGD steps 2 parameters that are in no model given",
    wrong.sharded_after_prepare.__name__: _SHARDED,
    wrong.sharded_before_prepare.__name__: _SHARDED,
    wrong.kronecker_factors.__name__: r"DivergenceError: .*parameter 0.weight.*samples \(sum it with run.reduce",
    wrong.gradients_of_each_sample.__name__: r"DivergenceError: .*parameter 0.weight.*samples \(sum it with run.reduce",
    more_wrong.trainable_buffer.__name__: r"StepError: SGD steps 1 parameters that are in no model given",
    more_wrong.fake_quantised.__name__: r"DivergenceError: .*buffer 3.most",
    more_wrong.functional_optimizer.__name__: r"StepError: the loss depends on no parameter of a prepared model",
    wrong.second_derivative_of_the_gradient.__name__: r"RuntimeError: .*does not require grad",
}

NAMED: dict[str, str] = {
    script.__name__: "coupled_loss"
    for script in (
        wrong.function_that_ignores_its_slope,
        wrong.gradient_scaled_in_the_backward,
        wrong.batch_norm_by_a_function,
        wrong.gradient_by_frequency,
        wrong.halves_of_the_batch,
        wrong.weight_that_depends_on_the_model,
        more_wrong.balanced_by_gradient_norms,
        more_wrong.hardest_half,
        more_wrong.normalised_advantages,
    )
} | {
    script.__name__: "wrong_units"
    for script in (wrong.flooding, more_wrong.loss_over_itself, more_wrong.gated_by_the_loss)
}

WRONG = [*scripts_of(wrong), *scripts_of(more_wrong)]

Outcome = list[torch.Tensor | str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    """Return the result of each script on each rank."""
    scripts = [(name, script, settings) for name, (script, settings) in RIGHT.items()]
    scripts += [(script.__name__, script, {}) for script in WRONG]
    ranks = run_ranks(on_ranks, len(SHARES), scripts, str(folder), timeout_s=100.0)
    return {name: list(results) for (name, *_), *results in zip(scripts, *ranks, strict=True)}


def _coupled(folder: Path, name: str) -> list[str]:
    events = map(json.loads, (folder / name.replace(" ", "-") / "events.jsonl").read_text().splitlines())
    return [event["kind"] for event in events if event.get("kind") in ("coupled_loss", "wrong_units")]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about what the scripts do
@pytest.mark.parametrize("name", RIGHT)
def test_exact(name: str, outcomes: dict[str, Outcome], folder: Path) -> None:
    check_exact(RIGHT[name][0], outcomes[name])
    assert not _coupled(folder, name), "a right script is named"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank, error in enumerate(outcomes[name]):
        assert isinstance(error, str), f"rank {rank} raised nothing"
        assert re.search(REFUSED[name], error, re.DOTALL), f"rank {rank} raised: {error}"


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str, outcomes: dict[str, Outcome], folder: Path) -> None:
    assert NAMED[name] in _coupled(folder, name)


def test_each_wrong_script_is_refused_or_named() -> None:
    assert {script.__name__ for script in WRONG} == {*REFUSED, *NAMED}
