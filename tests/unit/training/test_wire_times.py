"""Check the predicted processor time of a wire format, and that its measurement changes nothing of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evenload.balance.wire_bytes import FORMATS, GradientSize
from evenload.training.data.randomness import comparable_state
from evenload.training.parallel.wire.formats import codec_seconds
from evenload.training.parallel.wire.observation import GradientObservation
from evenload.training.session import advice


def test_every_format_that_is_not_exact_has_a_cost() -> None:
    size = GradientSize(2 * 256 * 256, 4, ((256, 256), (256, 256)))
    found = codec_seconds(torch.device("cpu"), size)
    assert set(found) == set(FORMATS) - {"fp32"} and all(seconds > 0 for seconds in found.values())
    # Nothing of small matrices is compressed.
    assert codec_seconds(torch.device("cpu"), GradientSize(16, 4, ((4, 4),)))["powersgd"] == 0


def test_only_formats_that_auto_may_choose_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[GradientSize] = []

    def rehearse(device: torch.device, size: GradientSize) -> dict[str, float]:
        rehearsed.append(size)
        return dict.fromkeys(FORMATS, 1.0)

    monkeypatch.setattr("evenload.training.parallel.wire.observation.codec_seconds", rehearse)
    GradientObservation().rehearse(torch.device("cpu"), GradientSize(2 * 256 * 256, 4, ((256, 256), (256, 256))))
    assert rehearsed == [GradientSize(2 * 256 * 256, 4, ())]


class _MeasuredError(Exception):
    pass


def test_the_scripts_random_numbers_go_on_after_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> dict[str, float]:
        torch.randn(3)
        return {}

    def measure_outer(*_: Any) -> float:
        nn.Linear(2, 2)
        raise _MeasuredError  # what follows draws nothing

    monkeypatch.setattr(advice, "codec_seconds", measure)
    monkeypatch.setattr(advice, "outer_seconds", measure_outer)
    timed = SimpleNamespace(own_seconds=lambda: (1.0, 1.0), whole_seconds=lambda: 1.0)
    step: Any = SimpleNamespace(
        stats=SimpleNamespace(is_usual=True, timed=timed),
        batch=SimpleNamespace(plan=SimpleNamespace(shares=(1, 1), num_micro=1)),
    )
    context: Any = SimpleNamespace(
        link=SimpleNamespace(link=object(), num_senders=2),
        control=SimpleNamespace(apart=False),
        islands=None,
        groups=SimpleNamespace(generation=SimpleNamespace(hosts=((0,), (1,)))),
        device=torch.device("cpu"),
    )
    watch = advice.LinkAdvice(context, [nn.Linear(2, 2)])
    before = comparable_state([])
    with pytest.raises(_MeasuredError):
        for _ in range(100):
            watch.on_trained(step)
    assert comparable_state([]) == before
