"""``--full``: the measurements run and are judged; what they say is this machine's business."""

from __future__ import annotations

import pytest

from evenload import hardware
from evenload.doctor.checks.speed import evaluate_speeds
from evenload.doctor.finding import Figure
from tests.system.doctor.conftest import all_in_child


def test_devices_and_ranks_are_measured() -> None:
    devices, links, ranks = all_in_child("device speeds", "link speeds", "all-reduce speed", limit_s=60, backend="gloo")
    figures = {figure.what.partition(" ")[0] + figure.what.rpartition(")")[2]: figure for figure in devices.figures}
    assert {"cpu matmul float32", "cpu matmul bfloat16", "cpu memory"} <= figures.keys()
    assert figures["cpu matmul float32"].unit == "TFLOP/s"
    assert all(figure.value > 0 for figure in figures.values())
    assert devices.status == "ok" or hardware.gpus()
    assert ranks.status == "ok"
    assert [(figure.what, figure.unit) for figure in ranks.figures] == [("all-reduce 2 ranks gloo", "GB/s")]
    assert ranks.figures[0].value > 0
    if not hardware.gpus():
        assert links.status == "skip"


def test_devices_of_one_name_should_be_equal() -> None:
    figures = [
        Figure("cuda:0 (RTX 3090 (A)) matmul float16", 70.0, "TFLOP/s"),
        Figure("cuda:1 (RTX 3090 (A)) matmul float16", 68.0, "TFLOP/s"),
        Figure("cuda:2 (RTX 3090 (A)) matmul float16", 40.0, "TFLOP/s"),
        Figure("cuda:3 (RTX 2080 Ti) matmul float16", 30.0, "TFLOP/s"),
    ]
    finding = evaluate_speeds(figures, "4 device(s)")
    assert finding.status == "warn"
    assert finding.found == "cuda:2 (RTX 3090 (A)) matmul float16: 40 of 70 TFLOP/s for RTX 3090 (A) matmul float16"
    assert finding.expected and finding.fix.startswith("evenload doctor --only 'GPU throttling'")
    assert finding.figures == tuple(figures)
    assert evaluate_speeds(figures[:2] + figures[3:], "3 device(s)").status == "ok"


def test_links_of_one_kind_should_be_equal() -> None:
    figures = [
        Figure("cpu to cuda:0 (from host) copy", 25.0, "GB/s"),
        Figure("cpu to cuda:1 (from host) copy", 6.0, "GB/s"),
        Figure("cuda:0 to cuda:1 (between cuda:0 and cuda:1) copy", 50.0, "GB/s"),
        Figure("cuda:0 to cuda:2 (between cuda:0 and cuda:2) copy", 10.0, "GB/s"),
    ]
    finding = evaluate_speeds(figures, "4 of 4 ways")
    assert finding.found == "cpu to cuda:1 (from host) copy: 6 of 25 GB/s for from host copy"


@pytest.mark.gpu
@pytest.mark.skipif(not hardware.gpus(), reason="no NVIDIA GPU here")
def test_gpus_and_links_are_measured() -> None:
    devices, links = all_in_child("device speeds", "link speeds", limit_s=90)
    assert any(figure.what.startswith("cuda:0") and "bfloat16" in figure.what for figure in devices.figures)
    assert any("from host" in figure.what for figure in links.figures)
