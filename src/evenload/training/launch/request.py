"""`LaunchRequest`, the options of one launch, and the workers that it means on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from evenload.config import COMMAND_LINE, SPAWN, resolve
from evenload.errors import ConfigError
from evenload.records.values import RunEvent
from evenload.rendezvous.settings import RendezvousConfig
from evenload.training.launch.devices import HostDevices, parse_devices, plan_workers, read_host
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.output import ProgressView
from evenload.training.launch.replicas import as_one_worker, num_parts
from evenload.training.launch.server_process import with_server
from evenload.training.launch.target import target_file
from evenload.training.launch.throttle import check_factors

MAX_RESTARTS = 3
"""Default of ``--max-restarts``."""


@dataclass(frozen=True)
class LaunchRequest:
    arguments: tuple[str, ...]
    """``train.py --its --args``, or ``-m package.module --its --args``; empty for a function call."""
    devices: str = "auto"
    """As given to ``-d``; see `parse_devices`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the command line."""
    throttle: tuple[float, ...] = ()
    """Relative speeds, one for each rank of this machine; empty: full speed."""
    port: int = 0
    """TCP port of the store; 0 takes a free one."""
    rendezvous: RendezvousConfig | None = None
    """Rendezvous of several machines; None: this machine alone."""
    mode: str = "train"
    """`WorkerSpec.mode`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`WorkerSpec.options`."""
    call: str = ""
    """`WorkerSpec.call`."""
    view: ProgressView | None = None
    max_restarts: int = MAX_RESTARTS
    """Restarts of lost workers at each device, or of all; joins and leaves don't count."""
    num_restarts: int = 0
    """Restarts before this launch, of which all workers were the last."""
    unwritten_events: tuple[RunEvent, ...] = ()
    """Events of earlier launches, for which there was no run folder."""


def plan(request: LaunchRequest, host: HostDevices | None = None) -> tuple[WorkerSpec, ...]:
    """Return the workers that `launch` would start here, after all checks that need no process.

    With several machines the ranks are numbered as if this machine were alone, until the rendezvous. ConfigError: a setting,
    a device, or a number of shares or speeds is wrong. LaunchError: there is no such script or module.
    """
    if not request.call:
        target_file(request.arguments)  # raises if there is none
    resolve({}, request.settings, SPAWN if request.call else COMMAND_LINE)
    host = host or read_host()
    # One share for each rank of all machines: counted at the rendezvous.
    own_settings = {k: v for k, v in request.settings.items() if request.rendezvous is None or k != "balance"}
    workers = plan_workers(
        parse_devices(request.devices, host), host, own_settings, mode=request.mode, options=request.options
    )
    workers = as_one_worker(workers, request.settings, several_machines=request.rendezvous is not None)
    workers = tuple(replace(worker, settings=dict(request.settings)) for worker in workers)
    if request.call:
        workers = tuple(replace(worker, origin="spawn", call=request.call) for worker in workers)
    if request.throttle:
        factors = check_factors(request.throttle, num_parts(workers))
        # `ThrottleController` chooses the means when it has tried the control groups.
        workers = tuple(
            replace(worker, throttle={"factors": factors} if worker.replicas else {"factor": factors[worker.rank]})
            for worker in workers
        )
    if request.rendezvous is None:
        workers = with_server(workers, request.settings)
    if request.port and len(workers) == 1:
        raise ConfigError(f"--port {request.port} has no effect: one rank alone opens no port; leave it out")
    return workers
