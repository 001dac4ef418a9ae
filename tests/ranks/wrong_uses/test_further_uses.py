"""Further unusual uses of models, gradients, Functions and optimizers are exact to 1e-12, in one micro-batch and in three."""

from __future__ import annotations

import pytest
import torch

from evenload.testing import run_ranks
from tests.ranks.wrong_uses import batch_norm_scripts, further_scripts, model_scripts
from tests.ranks.wrong_uses.gradient_jobs import SHARES, Script, check_exact, on_ranks, scripts_of

IN_THREE = " in three"
RIGHT: dict[str, Script] = {
    f"{script.__name__}{how}": script
    for module in (further_scripts, model_scripts, batch_norm_scripts)
    for script in scripts_of(module)
    for how in (("",) if module is batch_norm_scripts else ("", IN_THREE))
}

Outcomes = dict[str, list[torch.Tensor | str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return the result of each script on each rank."""
    scripts = [(name, script, {"micro_batch": 5} if IN_THREE in name else {}) for name, script in RIGHT.items()]
    ranks = run_ranks(on_ranks, len(SHARES), scripts, str(tmp_path_factory.mktemp("runs")), timeout_s=200.0)
    return {name: list(results) for (name, *_), *results in zip(scripts, *ranks, strict=True)}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about what the scripts do
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # in torch.func.jvp
@pytest.mark.parametrize("name", RIGHT)
def test_exact(name: str, outcomes: Outcomes) -> None:
    check_exact(RIGHT[name], outcomes[name])
