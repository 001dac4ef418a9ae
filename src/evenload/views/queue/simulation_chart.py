"""Chart of simulations: devices in use over time, and the distribution of completion times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from evenload.scheduler.core.states import JobState
from evenload.scheduler.simulator.outcome import SimulationOutcome
from evenload.views.svg import chart, line_panel

_WIDTH, _HEIGHT = 900, 240
_NUM_BINS = 600


def simulation_chart(outcomes: Sequence[tuple[str, SimulationOutcome]]) -> str:
    """Draw named simulations as SVG, a line each."""
    use = [_use(outcome) for _, outcome in outcomes]
    done = [_completion(outcome) for _, outcome in outcomes]
    panel = partial(line_panel, width=_WIDTH, height=_HEIGHT)
    panels = [
        partial(panel, title="devices held", below="hours", lines=use),
        partial(panel, title="part of jobs done", below="completion time, seconds", lines=done, is_log=True),
    ]
    return chart([name for name, _ in outcomes], panels, _WIDTH, _HEIGHT)


def _use(outcome: SimulationOutcome) -> list[tuple[float, float]]:
    """Devices held over time, as steps; means over equal times where there are too many."""
    samples = outcome.samples
    if not samples:
        return []
    first_s, last_s = samples[0].time_s, samples[-1].time_s
    if len(samples) <= _NUM_BINS:
        steps = []
        for sample, after in zip(samples, (*samples[1:], samples[-1]), strict=True):
            steps += [(sample.time_s / 3600, float(sample.num_held)), (after.time_s / 3600, float(sample.num_held))]
        return steps
    width_s = (last_s - first_s) / _NUM_BINS
    areas = [0.0] * (_NUM_BINS + 1)
    for sample, after in pairwise(samples):
        time_s = sample.time_s
        while time_s < after.time_s:
            bin_index = int((time_s - first_s) / width_s)
            until_s = min(after.time_s, max(first_s + (bin_index + 1) * width_s, math.nextafter(time_s, math.inf)))
            areas[min(bin_index, _NUM_BINS)] += sample.num_held * (until_s - time_s)
            time_s = until_s
    return [((first_s + (i + 0.5) * width_s) / 3600, area / width_s) for i, area in enumerate(areas[:-1])]


def _completion(outcome: SimulationOutcome) -> list[tuple[float, float]]:
    jcts = sorted(max(job.jct_s, 1.0) for job in outcome.jobs if job.state is JobState.SUCCEEDED)
    return [(jct_s, (index + 1) / len(jcts)) for index, jct_s in enumerate(jcts)]
