"""Results of a simulated workload, for each job and over time."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.scheduler.core.states import JobState


@dataclass(frozen=True)
class JobOutcome:
    """Result of one job. Times are seconds since the workload's beginning."""

    job: str
    user: str
    state: JobState
    submitted_s: float
    began_s: float | None
    """When its program first ran; None where it never did."""
    ended_s: float
    service_device_s: float
    num_restarts: int
    num_preemptions: int
    cost: float
    energy_kwh: float
    deadline_s: float | None = None
    fair_s: float = 0.0
    """Completion time on an equal part of the cluster (`fairness`); 0 before it is computed."""

    @property
    def jct_s(self) -> float:
        return self.ended_s - self.submitted_s


@dataclass(frozen=True)
class ClusterSample:
    """The cluster between two changes; holds from `time_s` on."""

    time_s: float
    num_held: int
    num_active: int


@dataclass(frozen=True)
class SimulationOutcome:
    policy: str
    num_devices: int
    jobs: tuple[JobOutcome, ...]
    samples: tuple[ClusterSample, ...]
    useful_device_s: float
    """Device-seconds in which programs ran; the rest of what was held went into starts and restarts."""
    num_decisions: int
