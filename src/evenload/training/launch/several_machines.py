"""Workers as parts of a run on several machines: what a rendezvous needs to know of them, and what it assigns to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evenload.rendezvous.host_info import DeviceSlot, LocalLaunch
from evenload.rendezvous.world import RankAssignment
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.target import target_file


def local_launch(
    arguments: Sequence[str], settings: Mapping[str, Any], specs: Sequence[WorkerSpec], may_change: bool = False
) -> LocalLaunch:
    """Describe this machine's part of a run; ``specs`` are numbered as if it were alone."""
    return LocalLaunch(
        script=target_file(arguments),
        may_change=may_change,
        arguments=tuple(arguments[2:] if arguments[0] == "-m" else arguments[1:]),
        settings=settings,
        slots=tuple(
            DeviceSlot(
                "+".join(spec.devices) or spec.device,
                spec.device_names[spec.rank],
                spec.num_threads,
                float(spec.throttle.get("factor", 1.0)),
                spec.inner_backend,
            )
            for spec in specs
        ),
    )


def assign(specs: Sequence[WorkerSpec], assignments: Sequence[RankAssignment]) -> tuple[WorkerSpec, ...]:
    """Return the workers of this machine as members of the world, by local rank."""
    return tuple(replace(spec, **vars(assignment)) for spec, assignment in zip(specs, assignments, strict=True))
