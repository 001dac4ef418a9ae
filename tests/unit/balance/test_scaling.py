"""Steps on numbers of devices that were not run on, predicted from those that were."""

from __future__ import annotations

import pytest

from evenload.balance.scaling import ScalingModel, StepCosts, StepPoint, fit_scaling

TRUE = ScalingModel(compute=(0.01, 0.002), inside=(0.02, 0.003), between=(0.08, 0.004), gamma=2.0)


def measured(num_hosts: int, num_devices: int, batch_size: int = 256, trust: float = 1.0) -> StepPoint:
    step_s = TRUE.step_s(num_hosts, num_devices, batch_size)
    compute_s = TRUE.compute[0] + TRUE.compute[1] * batch_size / num_devices
    return StepPoint.of(StepCosts(batch_size, 1, compute_s, step_s), num_hosts, num_devices, trust)


def test_a_model_of_some_placements_predicts_the_others() -> None:
    placements = ((1, 1, 256), (1, 2, 256), (1, 4, 256), (1, 4, 512), (2, 8, 256), (2, 8, 512), (4, 16, 256))
    model = fit_scaling([measured(*placement) for placement in placements])
    for num_hosts, num_devices, batch_size in ((1, 3, 256), (2, 6, 256), (3, 12, 512), (1, 4, 1024)):
        assert model.step_s(num_hosts, num_devices, batch_size) == pytest.approx(
            TRUE.step_s(num_hosts, num_devices, batch_size), rel=0.02
        )


def test_what_was_never_seen_costs_nothing_and_what_was_seen_long_ago_little() -> None:
    alone = fit_scaling([measured(1, 1), measured(1, 1, 128)])
    assert alone.step_s(1, 2, 256) == pytest.approx(0.01 + 0.002 * 128)
    inside = fit_scaling([measured(1, 1), measured(1, 2), measured(1, 4)])
    assert inside.between == pytest.approx((1.1 * inside.inside[0], 1.1 * inside.inside[1]))
    new, old = (fit_scaling([measured(1, 1), measured(1, 2), measured(2, 8, trust=trust)]) for trust in (1.0, 0.1))
    assert old.step_s(2, 8, 256) < 0.8 * new.step_s(2, 8, 256)


def test_a_cap_costs_micro_batches() -> None:
    capped = TRUE.step_s(1, 2, 256, cap=32)
    compute_s = 0.01 + 0.002 * 32
    assert capped == pytest.approx(3 * compute_s + TRUE.step_s(1, 2, 64))


def test_a_batch_that_may_grow_makes_more_devices_worth_it() -> None:
    fixed = StepCosts(64, 1, 0.1, 0.1)
    noisy = StepCosts(64, 1, 0.1, 0.1, base_batch=64, max_batch=1024, noise_samples=4000.0)
    clear = StepCosts(64, 1, 0.1, 0.1, base_batch=64, max_batch=1024, noise_samples=1.0)
    speedup = {}
    for name, costs in (("fixed", fixed), ("noisy", noisy), ("clear", clear)):
        rates = TRUE.goodputs(costs, 8, 8)
        speedup[name] = rates[7] / rates[0]
    assert speedup["noisy"] > 1.5 * speedup["fixed"] and speedup["clear"] == pytest.approx(speedup["fixed"], rel=0.05)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"num_micro": 1.5}, {"step_s": 0.0}, {"compute_s": float("nan")}, {"cap": -1}]
)
def test_costs_that_are_none(wrong: dict[str, float]) -> None:
    values = {"batch_size": 8, "num_micro": 1, "compute_s": 0.1, "step_s": 0.2}
    with pytest.raises(ValueError, match="step costs: expected"):
        StepCosts(**(values | wrong))  # type: ignore[arg-type]
