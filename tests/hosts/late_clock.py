"""A guest whose clock is wrong: comes to a meeting, says its time, and leaves. Arguments: the script, HOST:PORT."""

import sys
import time

from evenload.rendezvous import member
from evenload.rendezvous.address import resolve
from evenload.rendezvous.host_info import make_card
from evenload.rendezvous.settings import Terms, parse_endpoint
from evenload.training.launch.devices import parse_devices, plan_workers, read_host

script, where = sys.argv[1:]
true_time = time.time
time.time = lambda: true_time() - 90.0
host = read_host()
terms = Terms(parse_endpoint(where), 3, 3)
wire = member.reach(terms, resolve(terms.endpoint), lambda: False, print)
assert wire is not None
card = make_card(terms, [script], {}, plan_workers(parse_devices("cpu", host), host), wire.own_host)
told = []
left = member.join(terms, wire, card, lambda: any("clock" in text for text in told), told.append)
assert left is None, left
