"""Which ends of a rank let a run start again."""

import pytest

from evenload.training.launch.failure import FailureReport, describe_end
from evenload.training.launch.restarts import cause_of

DEVICE = FailureReport(1, "AcceleratorError", "CUDA error: uncorrectable ECC error encountered", lost=True)


@pytest.mark.parametrize(
    ("failure", "lost"),
    [
        (describe_end(1, -9, 1.0), True),
        (describe_end(1, -11, 1.0), True),
        (DEVICE, True),
        (describe_end(1, -15, 1.0), False),
        (describe_end(1, -2, 1.0), False),
        (describe_end(1, 0, 1.0), False),
        (describe_end(1, 2, 1.0), False),
        (FailureReport(1, "KeyError", "'broken'"), False),
    ],
)
def test_only_an_accident_is_a_loss(failure, lost):
    cause = cause_of(failure, "text")
    assert cause.lost == lost and (cause.text, cause.exit_code) == ("text", failure.exit_code)
