"""Interface between `decide` and the policies: what a policy gets, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evenload.balance.run_times import NOTHING_SEEN, PastRuns
from evenload.scheduler.core.eligibility import PoolChoices
from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.values import Job, Settings, User
from evenload.scheduler.tariff import Tariff


@dataclass(frozen=True)
class PolicyInput:
    """The jobs that run, those that only lack devices, and the devices there are."""

    now_s: float
    jobs: Sequence[Job]
    """RUNNING ones, and PENDING ones that may start as far as they themselves are concerned."""
    users: Mapping[str, User]
    settings: Settings
    num_devices: int
    """Devices that are free, coming free, or held by `jobs`."""
    free: Sequence[int]
    """Indices of those that are free or coming free."""
    settled: Sequence[Job]
    """Jobs that are about to run on devices which can't be changed now (STARTING, RESIZING)."""
    holders: Sequence[Job]
    """All jobs that hold devices: these count towards limits."""
    keeping: frozenset[str]
    """Running jobs whose devices can't be taken from them now (not preemptible, young, preempted too often lately)."""
    layout: Layout
    choices: PoolChoices
    tariff: Tariff
    past: PastRuns = NOTHING_SEEN
    oldest: Mapping[str, float] = field(default_factory=dict)
    """`policies.guesses.oldest_work` of all these jobs."""


@dataclass(frozen=True)
class PolicyDecision:
    """The result of a policy. `decide` follows it as far as limits, devices and protections allow."""

    order: Sequence[Job]
    """All jobs of the input, the most deserving first; higher classes before lower ones."""
    preempts: bool
    """True if a pending job may displace running ones behind it."""
    reserves: bool = True
    """True if later jobs may not delay the first that can't start."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Job → how many devices it should have, 0 for none. Others keep what they have, or start with their minimum."""
    held: Mapping[str, str] = field(default_factory=dict)
    """Job → why it is to have no devices now, whatever is free; such a running job is stopped."""
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Job → the only kinds it may use now, the best first; one that runs on others moves once there is place."""
    leading: frozenset[str] = frozenset()
    """Of these, jobs that displace others behind them to move."""
    deadline_notes: Mapping[str, str] = field(default_factory=dict)
    """Job → why its deadline can't be met, or planned for."""


Policy = Callable[[PolicyInput], PolicyDecision]
"""A pure function: the same input gives the same decision."""
