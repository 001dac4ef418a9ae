"""The events of a queue, one frozen value each. Their log is the queue: everything else is folded from it.

Commands of `decide` become events too (`Placed`, `ResizeRequested`, `StopRequested`, `Cancelled`): a shell records them first
and then acts, so that after a crash the log shows what may be under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device, JobSpec, Limits, Reservation, Settings


@dataclass(frozen=True, slots=True)
class QueueEvent:
    time_s: float


@dataclass(frozen=True, slots=True)
class JobEvent(QueueEvent):
    job: str


@dataclass(frozen=True, slots=True)
class Submitted(JobEvent):
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class Placed(JobEvent):
    """Devices were given to a job: its attempt starts."""

    devices: tuple[str, ...]
    attempt: int
    """One more than the job's last."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobStarted(JobEvent):
    """The program of a job runs."""


@dataclass(frozen=True, slots=True)
class Reported(JobEvent):
    done: float
    total: float | None = None
    rate_per_s: float = 0.0
    """Work a second with the devices it has; 0 where not yet measured."""
    rates: tuple[float, ...] | None = None
    """Work a second on 1, 2, … devices; None where nothing new is known (`scheduler.learned_speeds`)."""
    resumed_at: float | None = None
    """Work that was done when the attempt began, where its program reports that for the first time."""


@dataclass(frozen=True, slots=True)
class MemoryMeasured(JobEvent):
    """The peak memory measured of a job that may share its device."""

    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ResizeRequested(JobEvent):
    """A running job is requested to continue on other devices: without a stop if it can, else it saves, stops and resumes."""

    devices: tuple[str, ...]
    reason: str = ""
    is_forced: bool = False
    """It loses devices to others; counts towards the bound of preemptions."""


@dataclass(frozen=True, slots=True)
class Resized(JobEvent):
    """A job took and gave back devices without a stop, or keeps those it has."""

    devices: tuple[str, ...]
    attempt: int
    """One more than the job's last; the last where it keeps its devices."""
    seconds: float = 0.0
    """From the request until all of its ranks ran on these devices."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResizeRefused(JobEvent):
    """A job that was requested to continue on other devices can't do so without a stop: it is stopped and resumed."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested(JobEvent):
    """A job that holds devices is requested to save and stop."""

    then: JobState = JobState.PENDING
    """PENDING: it is preempted and goes on later. CANCELLED or FAILED: it ends for good."""
    reason: str = ""

    @property
    def is_preemption(self) -> bool:
        return self.then is JobState.PENDING


@dataclass(frozen=True, slots=True)
class Yielded(JobEvent):
    """A job saved and its processes have ended; its devices are free (or it continues on its new ones)."""

    reason: str = ""
    ended_s: float | None = None
    """When the program ended, if that was noticed later: the job's use of its devices counts until then."""
    has_saved: bool = True


@dataclass(frozen=True, slots=True)
class Ended(JobEvent):
    """A job's processes have ended for good, or those of this attempt if it may be retried."""

    is_success: bool
    reason: str = ""
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Lost(JobEvent):
    """A job's processes have ended through no fault of its own."""

    reason: str = ""
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cancelled(JobEvent):
    """A job that holds no devices will never run. One that holds devices gets `StopRequested` instead."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobHeld(JobEvent):
    """An owner holds a pending job back."""


@dataclass(frozen=True, slots=True)
class Released(JobEvent):
    """An owner lets a held job go."""


@dataclass(frozen=True, slots=True)
class SpecChanged(JobEvent):
    """The spec of a job changed; of a job that holds devices, only what doesn't concern them."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class DeviceAdded(QueueEvent):
    """A device was added to the queue, or measured again."""

    device: Device


@dataclass(frozen=True, slots=True)
class DeviceClosed(QueueEvent):
    """Nothing new may start on a device: held externally, memory in use, broken, or closed by an admin."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceOpened(QueueEvent):
    device: str


@dataclass(frozen=True, slots=True)
class DeviceRemoved(QueueEvent):
    """A device that no job holds was removed from the queue."""

    device: str


@dataclass(frozen=True, slots=True)
class LimitsSet(QueueEvent):
    user: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class ReservationSet(QueueEvent):
    """Devices are reserved, or a reservation of the same id is changed."""

    reservation: Reservation


@dataclass(frozen=True, slots=True)
class ReservationEnded(QueueEvent):
    reservation: str


@dataclass(frozen=True, slots=True)
class SettingsSet(QueueEvent):
    settings: Settings


Command = Placed | ResizeRequested | StopRequested | Cancelled
"""The events that `decide` returns: a shell records each and then carries it out."""
