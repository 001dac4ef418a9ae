"""The values of the queue: specs and states of jobs, devices, users, reservations, settings.

All frozen and plain. Times are seconds of one clock, the shell's (`_s`); work is counted in a job's own units (steps);
service in device-seconds.
"""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache

from evenload.errors import ConfigError
from evenload.scheduler.core.states import PENDING, RUNNING, JobState
from evenload.scheduler.tariff import tariff_of

_ABOVE_0 = math.ulp(0.0)


def _check(owner: object, names: str, least: float = 0.0, most: float = sys.float_info.max) -> None:
    """Raise `ConfigError` if one of these attributes is set, and out of bounds."""
    for name in names.split():
        value = getattr(owner, name)
        if value is not None and not least <= value <= most:
            wanted = "above 0" if least == _ABOVE_0 else f"of at least {least:g}"
            raise ConfigError(f"{name}={value}: expected a number {wanted}")


@dataclass(frozen=True, slots=True)
class Device:
    id: str
    host: str
    kind: str = "gpu"
    """Name in requests: ``"a100"``, ``"rtx3090"``, ``"cpu"``."""
    memory_bytes: int = 0
    speed: float = 1.0
    """Relative to the other kinds here, as measured; 1 where nothing is known."""
    price_per_hour: float = 0.0
    cheap_price_per_hour: float | None = None
    """Its price in the cheap hours (`Settings.cheap_hours`); None: the same at all hours."""
    power_w: float = 0.0

    def __post_init__(self) -> None:
        if not self.id or not self.host:
            raise ConfigError(f"a device with id {self.id!r} on host {self.host!r}: expected both to be names")
        _check(self, "speed", _ABOVE_0)
        _check(self, "price_per_hour power_w cheap_price_per_hour")
        if self.cheap_price_per_hour is not None and self.cheap_price_per_hour > self.price_per_hour:
            raise ConfigError(
                f"device {self.id}: cheap_price_per_hour {self.cheap_price_per_hour} beside price_per_hour "
                f"{self.price_per_hour}: expected at most that price"
            )


@dataclass(frozen=True, slots=True)
class Needs:
    """The devices a job can use, and their number: a gang, all or nothing."""

    min_devices: int = 1
    max_devices: int = 1
    kinds: tuple[str, ...] = ()
    """Any of these; empty for any kind at all."""
    memory_bytes: int = 0
    """At least so much on each device."""
    one_host: bool = False
    one_kind: bool = False
    """All of one kind; otherwise one kind is preferred."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_devices <= self.max_devices:
            raise ConfigError(
                f"devices {self.min_devices}:{self.max_devices}: expected MIN:MAX with 1 <= MIN <= MAX, or one number"
            )
        _check(self, "memory_bytes")


@dataclass(frozen=True, slots=True)
class After:
    """A job that must end before this one may start."""

    job: str
    condition: str = "ok"
    """``ok`` (it succeeded), ``any`` (it ended), ``failed`` (it failed or was cancelled)."""

    def __post_init__(self) -> None:
        if self.condition not in ("ok", "any", "failed"):
            raise ConfigError(f"after {self.job}:{self.condition}: expected one of ok, any, failed")

    def is_met(self, state: JobState) -> bool:
        """Return whether a job that ended in `state` lets this one start."""
        return self.condition == "any" or (self.condition == "ok") == (state is JobState.SUCCEEDED)


@lru_cache(maxsize=4096)
def _same(needs: Needs) -> Needs:
    """Return one object for equal needs, so that what all jobs of a long queue refer to stays in the processor's caches."""
    return needs


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Requirements of a job. The program itself is known to the shell alone."""

    user: str
    needs: Needs = field(default_factory=Needs)
    name: str = ""
    priority: int = 0
    """Classes: a higher one goes first whatever the policy's order within a class. Below 0: takes idle devices only, and
    gives them back at once."""
    preemptible: bool = True
    """True if it can save, stop, and continue later."""
    estimate_s: float | None = None
    """Duration on `min_devices` devices, estimated by its owner or from earlier runs."""
    estimate_source: str = ""
    """Earlier runs that the estimate is made of, for people; empty for its owner's, and without one."""
    run_key: str = ""
    """Equal for jobs that run the same script, as the shell finds them; empty if unknown."""
    total: float | None = None
    """All of its work, in its own units, where it is known before it runs."""
    rates: tuple[float, ...] = ()
    """Work a second on 1, 2, … devices, if known from earlier runs."""
    restart_s: float | None = None
    resize_s: float | None = None
    """Time that a change of devices without a stop costs it; None if it can't do that."""
    soft_limit_s: float | None = None
    """After running so long it continues only if no other job wants the devices."""
    hard_limit_s: float | None = None
    """After running so long it is ended."""
    not_before_s: float | None = None
    deadline_s: float | None = None
    """When it is to have ended, by the queue's time; only policy ``cost`` plans for it."""
    delays: tuple[str, ...] = ()
    """Those of both that its owner gave as time from then on, not as a time of day: they last as long where a clock is set."""
    after: tuple[After, ...] = ()
    array: str = ""
    array_limit: int | None = None
    """At most so many elements of the array at once."""
    retries: int = 0
    """It is tried again so often where it fails by itself."""
    share_device: bool = False
    """It may share its one device with others that may (`core.sharing`)."""
    peak_bytes: int = 0
    """Peak device memory of jobs like it; 0 if none was measured."""

    def __post_init__(self) -> None:
        if not self.user:
            raise ConfigError("a job without a user: expected the name of its owner")
        object.__setattr__(self, "user", sys.intern(self.user))
        with contextlib.suppress(TypeError):  # from a socket: the store's check names what is wrong
            object.__setattr__(self, "needs", _same(self.needs))
        _check(self, "estimate_s total soft_limit_s hard_limit_s", _ABOVE_0)
        _check(self, "restart_s resize_s retries peak_bytes")
        _check(self, "array_limit", 1)
        if self.soft_limit_s is not None and self.hard_limit_s is not None and self.soft_limit_s >= self.hard_limit_s:
            raise ConfigError(
                f"soft_limit_s={self.soft_limit_s} and hard_limit_s={self.hard_limit_s}: a soft limit that is not below "
                f"the hard one has no effect"
            )
        if self.array_limit is not None and not self.array:
            raise ConfigError(f"array_limit={self.array_limit}: expected the name of the array too")
        if self.share_device and self.needs.max_devices > 1:
            raise ConfigError(f"share_device: such a job has one device; this one requests {self.needs.max_devices}")
        if not all(0 <= rate < math.inf for rate in self.rates):
            raise ConfigError(f"rates={self.rates}: expected numbers of at least 0")


@dataclass(frozen=True, slots=True)
class Job:
    """The present state of a job. Replaced, never changed."""

    id: str
    spec: JobSpec
    submitted_s: float
    state: JobState = PENDING
    since_s: float = 0.0
    attempt: int = 0
    """Number of times it got devices: the fencing number of the present attempt."""
    devices: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    """While RESIZING: what it will hold next. Devices in both are kept; no other job gets either."""
    first_began_s: float | None = None
    attempt_began_s: float = 0.0
    """When it was given the devices on which its program started; a change without a stop leaves that."""
    held_s: float = 0.0
    """Time in which it held devices, up to `accounted_s`."""
    service_device_s: float = 0.0
    """The same times the number of devices."""
    waited_s: float = 0.0
    """Time in which it could have run but waited for devices, up to `accounted_s`."""
    accounted_s: float = 0.0
    preempted_s: tuple[float, ...] = ()
    """When it was last preempted or resized against its will, as far as the bound of an hour needs it."""
    num_restarts: int = 0
    num_failures: int = 0
    num_lost: int = 0
    done: float = 0.0
    """Work done, as last reported."""
    total: float | None = None
    """All of its work; None if unknown."""
    rate_per_s: float = 0.0
    """Work a second with the present devices, as last reported; 0 where not yet measured."""
    reported_s: float = 0.0
    rates: tuple[float, ...] = ()
    """Work a second on 1, 2, … devices: measured, or predicted from what was. Its length is the most it can use well."""
    peak_bytes: int = 0
    """Peak device memory over all attempts; 0 if not yet measured."""
    is_held: bool = False
    unmet: tuple[str, ...] = ()
    doomed: str = ""
    """Reason why it can never start; empty if it can."""
    ending: JobState | None = None
    """While PREEMPTING: how it ends when it is gone, None where it goes on later."""
    reason: str = ""
    """Reason for its state, for people."""

    @property
    def may_be_joined(self) -> bool:
        """True if other jobs may join on its device: it shares, and isn't about to stop."""
        return self.spec.share_device and self.state in (JobState.STARTING, RUNNING)

    @property
    def resizes_in_place(self) -> bool:
        """While RESIZING: True if it takes or gives back devices without a stop; it exchanges none that way."""
        own, target = set(self.devices), set(self.target)
        return self.spec.resize_s is not None and bool(target) and (own < target or target < own)

    def preempted_until(self, now_s: float) -> tuple[float, ...]:
        """Return when it was preempted within the last hour, with one more preemption now."""
        return (*(time_s for time_s in self.preempted_s if time_s > now_s - 3600.0), now_s)

    def held_until(self, now_s: float) -> float:
        """Return the seconds for which it held devices, up to now."""
        return self.held_s + (now_s - self.accounted_s if self.devices else 0.0)

    def service_until(self, now_s: float) -> float:
        """Return the device-seconds it held, up to now."""
        return self.service_device_s + len(self.devices) * (now_s - self.accounted_s)

    def waited_until(self, now_s: float) -> float:
        """Return the seconds it could have run but had no devices, up to now."""
        if self.devices or self.state is not PENDING or self.is_held or self.unmet:
            return self.waited_s
        ready_s, not_before_s = self.accounted_s, self.spec.not_before_s
        if not_before_s is not None and not_before_s > ready_s:
            ready_s = not_before_s
        return self.waited_s + (now_s - ready_s) if now_s > ready_s else self.waited_s


@dataclass(frozen=True, slots=True)
class Limits:
    max_devices: int | None = None
    """Held at once."""
    max_running: int | None = None
    max_queued: int | None = None
    """Jobs that have not ended; a further submit is refused by the shell (`QueueState.refusal`)."""
    share: float = 1.0
    budget_device_hours: float | None = None
    """Device-hours a calendar month; after that jobs get idle devices only (`daemon.budgets`)."""

    def __post_init__(self) -> None:
        _check(self, "max_devices max_running max_queued budget_device_hours", most=math.inf)
        _check(self, "share", _ABOVE_0)


@dataclass(frozen=True, slots=True)
class User:
    name: str
    limits: Limits = Limits()
    usage_device_s: float = 0.0
    """Device-seconds held, each counted less the longer it is ago (`Settings.half_life_s`), as of `accounted_s`."""
    accounted_s: float = 0.0
    num_devices: int = 0

    def usage_until(self, now_s: float, half_life_s: float) -> float:
        """Return decayed device-seconds as of now: u·2^(−t/h) + n·h/ln 2·(1 − 2^(−t/h)) with n devices held since."""
        if half_life_s == math.inf:
            return self.usage_device_s + self.num_devices * (now_s - self.accounted_s)
        decay = math.exp2(-(now_s - self.accounted_s) / half_life_s)
        return self.usage_device_s * decay + self.num_devices * half_life_s / math.log(2) * (1 - decay)

    def until(self, now_s: float, half_life_s: float) -> User:
        """Return the same with the use brought up to now."""
        return replace(self, usage_device_s=self.usage_until(now_s, half_life_s), accounted_s=now_s)


RECURRENCES = ("day", "weekday", "week")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices kept for some users during a window of time."""

    id: str
    devices: frozenset[str]
    start_s: float
    end_s: float
    users: frozenset[str]
    """Only their jobs may use the devices meanwhile; no jobs if empty (maintenance)."""
    every: str = ""
    """One of `RECURRENCES`: a shell sets the next window once this one is over. Empty: this window alone."""
    first_s: float | None = None
    """Start of the first window, whose time of day the later ones have; None: this is the first."""

    def __post_init__(self) -> None:
        if self.every and self.every not in RECURRENCES:
            raise ConfigError(f"reservation {self.id}: every={self.every!r}: expected one of {', '.join(RECURRENCES)}")
        most_days = 7 if self.every == "week" else 1
        if self.every and self.end_s - self.start_s > most_days * 86400.0:
            raise ConfigError(f"reservation {self.id} lasts longer than the time until the next, every {self.every}")
        if not self.start_s < self.end_s:
            raise ConfigError(f"reservation {self.id}: from {self.start_s} s to {self.end_s} s: expected start < end")
        if not self.devices:
            raise ConfigError(f"reservation {self.id} reserves no device")


POLICIES = ("default", "fifo", "priority", "fair_share", "las", "srpt", "goodput", "cost")

_MAY_BE_INFINITE = {"infinite": True}


@dataclass(frozen=True, slots=True)
class Settings:
    policy: str = "default"
    min_run_s: float = 300.0
    """A job of the same class doesn't displace one that got its devices less than this ago."""
    max_preemptions_per_hour: int = 6
    """Most preemptions and shrinks of a job in an hour; no limit below priority 0, or for elastic jobs under `goodput`."""
    starve_after_s: float = field(default=12 * 3600.0, metadata=_MAY_BE_INFINITE)
    """A job that waited so much longer than it ran goes before all others; see `policies.starvation`."""
    ageing_s: float = field(default=3600.0, metadata=_MAY_BE_INFINITE)
    """In `default`: a job that waited so long counts as if half of its work were left, twice as long a third, …"""
    fairness: float = 1.0
    """In `default` and `goodput`: how much a user's use counts against the jobs; 0 for not at all."""
    half_life_s: float = field(default=7 * 86400.0, metadata=_MAY_BE_INFINITE)
    """Use of devices counts half after so long."""
    restart_s: float = 30.0
    """Assumed cost of a stop and resume where a job's own was not measured."""
    horizon_s: float = field(default=200.0, metadata=_MAY_BE_INFINITE)
    """Least expected time between two changes of an elastic job's devices, where a restart costs up to 30 s."""
    las_thresholds_device_s: tuple[float, ...] = field(default=(16 * 3600.0,), metadata=_MAY_BE_INFINITE)
    """Where the queues of `las` end, in device-seconds of attained service."""
    backfill: bool = True
    """True if later jobs may use what the first in line can't use yet, without delaying it."""
    packing: str = "pack"
    """``pack``: few hosts, and small jobs where others are already; ``spread``: the emptiest hosts first."""
    cheap_hours: str = ""
    """Hours of the day in which devices cost their cheap price, such as ``22-6`` or ``22:30-6,12-13``; empty for none."""
    cheap_wait_s: float = 24 * 3600.0
    """In `cost`: a job with a priority below 0 and without a deadline waits at most so long for cheap hours."""
    deadline_margin: float = 1.1
    """In `cost`: a job with a deadline is planned to take its estimated time times this."""
    max_lost: int = 5
    """A job whose attempts were lost so often fails: the fault follows it."""
    max_sharers: int = 4
    """At most so many jobs share a device, of those that may."""
    share_margin: float = 1.2
    """Their peaks of memory, times this, must fit into it."""
    share_after_s: float = 60.0
    """A job of which nothing is known is alone on its device for so long, and measured."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r}: there is no such policy; there are {', '.join(POLICIES)}")
        tariff_of(self.cheap_hours)
        if self.packing not in ("pack", "spread"):
            raise ConfigError(f"packing={self.packing!r}: expected pack or spread")
        _check(self, "ageing_s half_life_s starve_after_s horizon_s", _ABOVE_0, math.inf)
        _check(self, "min_run_s restart_s fairness max_preemptions_per_hour share_after_s cheap_wait_s")
        _check(self, "max_lost max_sharers share_margin deadline_margin", 1)
        thresholds = list(self.las_thresholds_device_s)
        if thresholds != sorted(set(thresholds)) or min(thresholds, default=1.0) <= 0:
            raise ConfigError(f"las_thresholds_device_s={thresholds}: expected growing numbers above 0")
