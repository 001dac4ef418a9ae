"""A launch at a machine that does not coordinate its run, and the coordinator that looks for such launches at HOST.

After another machine has taken over, people may type the same command on HOST again. It would begin a second run there, so the
coordinator connects to HOST's port every second, and a launch of the same script and settings joins the run instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from evenload.errors import EvenloadError, LaunchError
from evenload.rendezvous import PROTOCOL, host_info
from evenload.rendezvous.address import Address
from evenload.rendezvous.connection import Connection, Message, connect
from evenload.rendezvous.host_info import HostInfo
from evenload.rendezvous.settings import Endpoint, parse_endpoint
from evenload.version import __version__

_EVERY_S = 1.0


class CoordinatorElsewhereError(LaunchError):
    """The run is in progress, and its coordinator is another machine than the one that was named."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(f"the run is in progress, and its coordinator is at {endpoint}; type --host {endpoint}")
        self.endpoint = endpoint


async def look_for_launches(host: Sequence[Address], info: HostInfo) -> None:
    """Send launches that wait for machines at HOST to this machine, forever; `info`: of this machine, the coordinator."""
    while True:
        await asyncio.sleep(_EVERY_S)
        for address in host:
            found = await connect(address)
            if isinstance(found, Connection):
                found.send("hello", what="run_elsewhere", protocol=PROTOCOL, evenload=__version__, info=info)
                await found.finish()


def raise_if_elsewhere(hello: Message, own: HostInfo) -> None:
    """Raise CoordinatorElsewhereError if the coordinator of a run looks for this launch, `own`."""
    raw: Any = hello.get("info")
    if hello.get("evenload") != __version__:
        return
    try:
        info = host_info.from_message(raw)
        endpoint = parse_endpoint(info.endpoint)
    except (ValueError, EvenloadError):
        return
    if own.job_id == info.job_id and not host_info.compare(info, own, 0.0).errors:
        raise CoordinatorElsewhereError(endpoint)
