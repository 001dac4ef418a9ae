"""Draw stored results as figures of the docs: `python -m benchmarks.chart`.

efficiency.json becomes docs/efficiency.svg; asynchronous.json, where it is there, docs/async-measured.svg: loss against time.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from evenload.views.svg import bar_panel, chart, line_panel

RESULTS = Path(__file__).parent / "results" / "efficiency.json"
CHART = Path(__file__).parents[1] / "docs" / "efficiency.svg"
CURVES = RESULTS.with_name("asynchronous.json")
CURVES_CHART = CHART.with_name("async-measured.svg")
_ARMS = (("evenload", "Evenload"), ("ddp", "plain DDP"))
_WIDTH, _HEIGHT = 720, 190


def draw(result: dict[str, Any], source: str) -> str:
    """Return bars of efficiency for each ratio of the GPT; 1 is the sum of the devices' solo speeds."""
    groups = []
    for case in result["cases"]:
        if case["model"] == "gpt":
            shares = " + ".join(map(str, case["arms"]["shares"]["evenload"]))
            name = f"1 : {case['ratio']:g}, shares {shares}"
            groups.append((name, [_efficiency(case, arm) for arm, _ in _ARMS]))
    title = "Throughput over the sum of both devices' speeds"
    panel = partial(bar_panel, title=title, below=source, groups=groups, width=_WIDTH, height=_HEIGHT)
    return chart([label for _, label in _ARMS], [panel], _WIDTH, _HEIGHT)


def _efficiency(case: dict[str, Any], arm: str) -> float:
    return float(case["peers"][arm]["efficiency"] if arm in case["peers"] else case["arms"]["of_sum"][arm]["value"])


def stored() -> str:
    """Return the chart of the stored result."""
    found = json.loads(RESULTS.read_text())
    source = (
        f"Speeds of two CPU ranks of one core ({found['hardware']['cpu']}), the second held back by a quota; global batch 90; "
        f"{found['date'][:10]}, commit {found['commit'][:8]}. Above 100 %: each rank's solo speed is that of the whole batch, "
        "which is slower per sample."
    )
    return draw(found["result"], source)


def draw_curves(found: dict[str, Any]) -> str:
    """Return validation losses against seconds, of the arms that use both devices."""
    curves = {name: arm["curve"] for name, arm in found["result"]["arms"].items() if "alone" not in name}
    source = (
        f"Seconds of training, two CPU ranks of 1 and 0.25 cores ({found['hardware']['cpu']}), each five times as slow for two "
        f"seconds now and then; {found['date'][:10]}, commit {found['commit'][:8]}."
    )
    panel = partial(
        line_panel, title="Validation loss", below=source, lines=list(curves.values()), width=_WIDTH, height=_HEIGHT
    )
    return chart(list(curves), [panel], _WIDTH, _HEIGHT)


def main() -> None:
    """Write the charts."""
    CHART.write_text(stored())
    print(f"written to {CHART}")
    if CURVES.exists():
        CURVES_CHART.write_text(draw_curves(json.loads(CURVES.read_text())))
        print(f"written to {CURVES_CHART}")


if __name__ == "__main__":
    main()
