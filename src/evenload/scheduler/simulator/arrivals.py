"""Jobs of a workload, and samples of a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from evenload.errors import ConfigError
from evenload.scheduler.core.values import JobSpec
from evenload.scheduler.simulator.programs import SimulatedProgram, TimedProgram

DEFAULT_SCALING = 0.9
"""Speed on n devices grows like n to this power where nothing else is known."""


@dataclass(frozen=True)
class JobArrival:
    time_s: float
    job: str
    spec: JobSpec
    make: Callable[[], SimulatedProgram]
    """Return a new program of the job: a workload is simulated more than once."""
    command: tuple[str, ...] = ()
    """By which a queue that estimates from history finds similar jobs."""


def timed_program(
    duration_s: float,
    num_devices: int,
    scaling: float = DEFAULT_SCALING,
    rates: tuple[float, ...] = (),
    is_evenload: bool = False,
) -> Callable[[], SimulatedProgram]:
    return lambda: TimedProgram(duration_s, num_devices, scaling, rates, is_evenload)


def thinned(arrivals: Sequence[JobArrival], every: int, offset: int = 0) -> list[JobArrival]:
    """Return each `every`-th job, beginning with the one at `offset`."""
    if every < 1 or not 0 <= offset < every:
        raise ConfigError(f"every={every}, offset={offset}: expected every >= 1 and 0 <= offset < every")
    return list(arrivals[offset::every])


def capped(arrivals: Iterable[JobArrival], num_devices: int) -> list[JobArrival]:
    """Let rigid jobs that ask for more than `num_devices` ask for all of them; elastic ones use at most that many."""
    fitted = []
    for arrival in arrivals:
        needs = arrival.spec.needs
        if needs.max_devices > num_devices:
            least = min(needs.min_devices, num_devices)
            smaller = replace(needs, min_devices=least, max_devices=num_devices)
            arrival = replace(arrival, spec=replace(arrival.spec, needs=smaller))
        fitted.append(arrival)
    return fitted
