"""Meets, tells what it learnt, and leaves: what `evenload run` does before it starts a rank. Options as `evenload run`'s."""

import argparse
import sys

from evenload.cli.nodes import Spelled, read_terms
from evenload.errors import EvenloadError
from evenload.rendezvous.rendezvous import Subject, meet
from evenload.rendezvous.world import join_world
from evenload.training.launch.devices import parse_devices, plan_workers, read_host

parser = argparse.ArgumentParser()
parser.add_argument("--nodes")
parser.add_argument("--host")
parser.add_argument("--node-rank", type=int)
parser.add_argument("--wait", type=float, dest="wait_s")
parser.add_argument("script")
given = parser.parse_args()
terms = read_terms(Spelled(given.nodes, given.host, given.node_rank, given.wait_s), None, [given.script])
assert terms is not None
host = read_host()
workers = plan_workers(parse_devices("cpu", host), host)
try:
    meeting = meet(terms, Subject([given.script], {}, workers), lambda: False, lambda text: print(text, flush=True))
except EvenloadError as error:
    sys.exit(f"refused: {error}")
assert meeting is not None
(spec,) = join_world(workers, meeting.world, meeting.node_rank, meeting.store)
print(
    f"rank {spec.rank} of {spec.world_size}, node {spec.node_rank} of {spec.num_nodes}, over {spec.interface}",
    flush=True,
)
print(f"names {', '.join(spec.device_names)}; store {spec.store}", flush=True)
meeting.party.tell_ended()
while not meeting.party.all_ended:
    meeting.party.poll()
    assert meeting.party.verdict is None and not meeting.party.causes, meeting.party.causes
meeting.party.close()
if meeting.listener is not None:
    meeting.listener.close()
