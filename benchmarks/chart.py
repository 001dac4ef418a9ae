"""Draws benchmarks/results/efficiency.json as docs/efficiency.svg: `python -m benchmarks.chart`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "efficiency.json"
CHART = Path(__file__).parents[1] / "docs" / "efficiency.svg"
_ARMS = (("ddp", "plain DDP", "#9aa5b1"), ("evenload", "Evenload", "#2563eb"))
_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT = 720, 300, 60, 46, 190


def draw(result: dict[str, Any], told: str) -> str:
    """Bars of efficiency for each ratio of the GPT, as SVG; 1 is the sum of the devices' solo speeds."""
    cases = [case for case in result["cases"] if case["model"] == "gpt"]
    bars = [(case, name, label, color) for case in cases for name, label, color in _ARMS]
    top = max(1.0, *(_value(case, name) for case, name, _, _ in bars)) * 1.08
    step = (_WIDTH - _LEFT - 20) / len(cases)
    width = step * 0.3

    def y(value: float) -> float:
        return _TOP + _PLOT * (1 - value / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15" font-weight="bold">Throughput over the sum of both devices\' speeds</text>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        dash = "" if tick in (0.0, 1.0) else ' stroke-dasharray="2 4"'
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#52606d"{dash}/>'
            f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.0%}</text>'
        )
    for index, (case, name, _, color) in enumerate(bars):
        value = _value(case, name)
        x = _LEFT + step * (index // len(_ARMS)) + step * 0.18 + width * 1.1 * (index % len(_ARMS))
        parts.append(
            f'<rect x="{x:.1f}" y="{y(value):.1f}" width="{width:.1f}" height="{y(0) - y(value):.1f}" fill="{color}"/>'
            f'<text x="{x + width / 2:.1f}" y="{y(value) - 5:.1f}" text-anchor="middle">{value:.0%}</text>'
        )
        if name == _ARMS[-1][0]:
            middle = _LEFT + step * (index // len(_ARMS) + 0.5)
            shares = " + ".join(map(str, case["arms"]["shares"]["evenload"]))
            parts.append(
                f'<text x="{middle:.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">speeds 1 : {case["ratio"]:g} '
                f"(shares {shares})</text>"
            )
    for index, (_, label, color) in enumerate(_ARMS):
        parts.append(
            f'<rect x="{_LEFT + 120 * index}" y="{_HEIGHT - 36}" width="12" height="12" fill="{color}"/>'
            f'<text x="{_LEFT + 18 + 120 * index}" y="{_HEIGHT - 26}">{label}</text>'
        )
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}" font-size="11" fill="#52606d">{told}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _value(case: dict[str, Any], arm: str) -> float:
    return float(case["peers"][arm]["efficiency"] if arm in case["peers"] else case["arms"]["of_sum"][arm]["value"])


def main() -> None:
    """Writes the chart."""
    found = json.loads(RESULTS.read_text())
    hardware = found["hardware"]
    told = (
        f"two CPU ranks of one core ({hardware['cpu']}), the second held back by a quota; a small GPT, global batch 90; "
        f"{found['date'][:10]}, commit {found['commit'][:8]}"
    )
    CHART.write_text(draw(found["result"], told))
    print(f"written to {CHART}")


if __name__ == "__main__":
    main()
