"""Check the predicted processor time of a wire format, and that its measurement changes nothing of the run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from evenload.balance.wire_bytes import FORMATS, GradientSize
from evenload.training.comm.link import LinkMeter
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
    timed = SimpleNamespace(own_seconds=lambda: (1.0, 1.0), delay_s=0.0, whole_seconds=lambda: 1.0)
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


def test_a_sum_costs_a_computation_no_more_than_other_threads_of_the_process_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow:
        """A sum during which another program has the processor."""

        def __init__(self) -> None:
            self._num_looks = 0

        @property
        def done(self) -> bool:
            time.sleep(0.01)
            self._num_looks += 1
            return self._num_looks > 5

        def wait(self) -> None:
            pass

    monkeypatch.setattr("evenload.training.comm.link.dist.all_reduce", lambda *_, **__: None)
    groups: Any = SimpleNamespace(begin=lambda *_: Slow(), wait=lambda *_: None)
    meter = LinkMeter(groups)
    assert meter._lost_s(cast("Any", None), 1024) < 0.02  # 0.06 s passed
