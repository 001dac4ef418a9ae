"""Run the rendezvous alone: what `evenload run` does before it starts a rank. Options as `evenload run`'s."""

import argparse
import sys
import time

from evenload.cli.nodes import NodeOptions, read_rendezvous_config
from evenload.errors import EvenloadError
from evenload.rendezvous.rendezvous import run_rendezvous
from evenload.training.launch.devices import parse_devices, plan_workers, read_host
from evenload.training.launch.several_machines import assign, local_launch

parser = argparse.ArgumentParser()
parser.add_argument("--nodes")
parser.add_argument("--host")
parser.add_argument("--node-rank", type=int)
parser.add_argument("--wait", type=float, dest="wait_s")
parser.add_argument("script")
given = parser.parse_args()
options = NodeOptions(given.nodes, given.host, given.node_rank, given.wait_s)
config = read_rendezvous_config(options, None, [given.script])
assert config is not None
host = read_host()
workers = plan_workers(parse_devices("cpu", host), host)
launch = local_launch([given.script], {}, workers)
try:
    result = run_rendezvous(config, launch, lambda: False, lambda text: print(text, flush=True))
except EvenloadError as error:
    sys.exit(f"refused: {error}")
assert result is not None
(spec,) = assign(workers, result.assignments())
print(
    f"rank {spec.rank} of {spec.world_size}, node {spec.node_rank} of {spec.num_nodes}, over {spec.interface}",
    flush=True,
)
print(f"names {', '.join(spec.device_names)}; store {spec.store}", flush=True)
result.monitor.report_ended(0)
while result.monitor.end_code is None:
    time.sleep(0.01)
    assert result.monitor.end_cause is None and result.monitor.cut_off is None, result.monitor.cut_off
result.monitor.close()
if result.listener is not None:
    result.listener.close()
