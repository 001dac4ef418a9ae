"""A member whose clock is wrong: joins a rendezvous, sends its time, and leaves. Arguments: the script, HOST:PORT."""

import sys
import time
from pathlib import Path

from evenload.rendezvous import member
from evenload.rendezvous.address import resolve
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.host_info import DeviceSlot, LocalLaunch, collect_host_info
from evenload.rendezvous.settings import RendezvousConfig, parse_endpoint

script, where = sys.argv[1:]
true_time = time.time
time.time = lambda: true_time() - 90.0
config = RendezvousConfig(parse_endpoint(where), 3, 3)
launch = LocalLaunch(Path(script), (), {}, (DeviceSlot("cpu", "CPU", 1),))
notes: list[str] = []


async def join() -> None:
    connection = await member.connect_to_coordinator(config, resolve(config.endpoint), print)
    await member.join(config, connection, collect_host_info(config, launch, connection.own_host), notes.append)


loop = EventLoopThread()
assert loop.run(join(), lambda: any("clock" in note for note in notes)) is None
loop.close()
