"""Judge the facts about another machine: one finding for each check, with the command that fixes it."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.balance.exchange_times import Link, Work, describe_exchange, options_of
from evenload.balance.wire_bytes import GradientSize
from evenload.doctor.finding import Finding
from evenload.rendezvous.address import CONTAINER_BRIDGES, Address, Route
from evenload.rendezvous.connection import ConnectFailure
from evenload.rendezvous.host_info import MAX_CLOCK_OFFSET_S, numbers_of
from evenload.rendezvous.probe import DataSummary, HostMeasurement, HostReport
from evenload.rendezvous.settings import Endpoint

SLOW_TRIP_S = 0.005
SLOW_BYTES_PER_S = 500e6 / 8
"""Half of what a Gigabit network carries."""
_NOT_REACHED = "not reached, see {}"
_NETWORK_FILES = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "fuse.glusterfs",
    "9p",
)


@dataclass(frozen=True)
class HostFacts:
    endpoint: Endpoint
    addresses: tuple[Address, ...] = ()
    unresolved: str = ""
    is_self: bool = False
    route: Route | None = None
    failures: tuple[tuple[Address, ConnectFailure], ...] = ()
    answering_port: int = 0
    """Another port, at which a machine that is silent at ours answers."""
    other_program: str = ""
    """The answer of a program at the port that is not Evenload, or refuses."""
    local: HostReport | None = None
    reached: Address | None = None
    connect_s: float = 0.0
    measurement: HostMeasurement | None = None
    interrupted: str = ""
    """The reason why the measurement ended early."""

    @property
    def missing(self) -> str:
        """Name the check that gives the reason why no finding is possible."""
        return _NOT_REACHED.format("name" if self.unresolved else "port" if self.reached is None else "round trip")


_TEN_MILLION = GradientSize(10_000_000, 4, ((1000, 1000),) * 10)


def name(facts: HostFacts) -> Finding:
    host = facts.endpoint.host
    expected = f"{host} is an address of the other machine"
    if facts.unresolved:
        return Finding("name", "fail", facts.unresolved, expected, f"echo 'ADDRESS {host}' | sudo tee -a /etc/hosts")
    found = f"{host} is " + ", ".join(address.host for address in facts.addresses)
    if facts.is_self:
        fix = f"evenload doctor --serve --port {facts.endpoint.port}   # here; then this command on the other machine"
        return Finding("name", "warn", f"{found}: this machine itself", expected, fix)
    return Finding("name", "ok", found, expected)


def port(facts: HostFacts) -> Finding:
    number = facts.endpoint.port
    expected = f"`evenload doctor --serve`, or a run's coordinator, answers at {facts.endpoint}"
    serve = f"evenload doctor --serve --port {number}   # on {facts.endpoint.host}, before this command here"
    if facts.unresolved:
        return Finding("port", "skip", facts.missing)
    if facts.other_program:
        fix = f"sudo ss -ltnp 'sport = :{number}'   # on {facts.endpoint.host}: shows the program; or use another port"
        return Finding("port", "fail", facts.other_program, expected, fix)
    if facts.reached is not None:
        return Finding("port", "ok", f"{facts.reached} answers after {facts.connect_s * 1e3:.1f} ms", expected)
    seen = "; ".join(f"{address}: {failure.describe()}" for address, failure in facts.failures)
    kinds = {failure.kind for _, failure in facts.failures}
    if "refused" in kinds:
        return Finding("port", "fail", seen, expected, serve)
    if facts.answering_port:
        seen += (
            f". The machine is on, because it answers at port {facts.answering_port}: a firewall drops port {number}"
        )
    if "silent" in kinds or any(failure.seconds < 0.5 for _, failure in facts.failures):
        fix = (
            f"sudo ufw allow {number}/tcp   # on {facts.endpoint.host}; or: sudo firewall-cmd --add-port={number}/tcp; in a "
            "cloud: the security group"
        )
        return Finding("port", "fail", seen, expected, fix)
    fix = f"ping -c 3 {facts.failures[0][0].host if facts.failures else facts.endpoint.host}   # is it on, in this network?"
    return Finding("port", "fail", seen, expected, fix)


def interface(facts: HostFacts) -> Finding:
    if facts.unresolved:
        return Finding("interface", "skip", facts.missing)
    if facts.route is None:
        return Finding(
            "interface", "fail", "no interface of this machine leads there", "a route", "ip route; ip -br addr"
        )
    here = f"{facts.route.interface or 'an unknown interface'} ({facts.route.own_address}) here"
    there = facts.measurement.remote.interface if facts.measurement else ""
    found = here + (f", {there} there" if there else "")
    expected = "a wired interface, which gloo and NCCL will then use"
    kind = facts.route.interface
    fix = f"ip -br addr   # on {facts.endpoint.host}: give --host the address of its other network"
    if kind.startswith("wl"):
        return Finding("interface", "warn", f"{found}: wireless is slow and stalls", expected, fix)
    if kind.startswith(CONTAINER_BRIDGES):
        return Finding(
            "interface", "warn", f"{found}: a bridge for containers, which other machines can't reach", expected, fix
        )
    return Finding("interface", "ok", found, expected)


def mtu(facts: HostFacts) -> Finding:
    if facts.measurement is None or facts.route is None:
        return Finding("MTU", "skip", facts.missing)
    here, there = facts.route.mtu, facts.measurement.remote.mtu
    found = f"{here} bytes here ({facts.route.interface}), {there} there ({facts.measurement.remote.interface})"
    expected = "the same on both, and no more than the network between carries"
    lower = f"sudo ip link set dev {facts.route.interface} mtu"
    if facts.measurement.stalled:
        found += f"; small packets arrive, but {facts.measurement.stalled}"
        return Finding("MTU", "fail", found, expected, f"{lower} 1400   # here, and the same there")
    if here and there and here != there:
        return Finding("MTU", "warn", found, expected, f"{lower} {min(here, there)}   # or raise the other")
    return Finding("MTU", "ok", found, expected)


def other_ports(facts: HostFacts) -> Finding:
    if facts.measurement is None:
        return Finding("other ports", "skip", facts.missing)
    expected = "gloo and NCCL listen at ports that the system picks: all from 1024 up are open between the machines"
    problems, fix = [], ""
    own = facts.route.own_address if facts.route else "ADDRESS-OF-THIS-MACHINE"
    there = facts.reached.host if facts.reached else facts.endpoint.host
    if facts.measurement.outward_failure is not None:
        problems.append(f"from here to there: {facts.measurement.outward_failure.describe()}")
        fix = f"sudo ufw allow from {own}   # on {facts.endpoint.host}; or: sudo firewall-cmd --zone=trusted --add-source={own}"
    if facts.measurement.inward_failure is not None:
        problems.append(f"from there to here: {facts.measurement.inward_failure.describe()}")
        fix = fix or f"sudo ufw allow from {there}   # here; or: sudo firewall-cmd --zone=trusted --add-source={there}"
    if problems:
        return Finding("other ports", "fail", "; ".join(problems), expected, fix)
    return Finding("other ports", "ok", "a port that the system picked is open, from here and from there", expected)


def versions(facts: HostFacts) -> Finding:
    if facts.measurement is None or facts.local is None:
        return Finding("versions", "skip", facts.missing)
    own, remote = facts.local, facts.measurement.remote
    expected = "the same Evenload, Python (first two numbers) and torch on both"
    rows = (
        ("evenload", own.evenload, remote.evenload, own.evenload == remote.evenload),
        ("python", own.python, remote.python, numbers_of(own.python, 2) == numbers_of(remote.python, 2)),
        ("torch", own.torch, remote.torch, numbers_of(own.torch, 2) == numbers_of(remote.torch, 2)),
    )
    wrong = [(what, here, there) for what, here, there, same in rows if not same]
    if wrong:
        what, here, there = wrong[0]
        found = "; ".join(f"{what} {here or 'none'} here, {there or 'none'} there" for what, here, there in wrong)
        wanted = (here or there).partition("+")[0]
        fix = f"python -m pip install {what}=={wanted}   # on {facts.endpoint.host if here else 'this machine'}"
        if what == "python":
            fix = f"uv venv --python {'.'.join(here.split('.')[:2])}   # on {facts.endpoint.host}"
        return Finding("versions", "fail", found, expected, fix)
    seen = ", ".join(f"{what} {here or 'none'}" for what, here, _, _ in rows)
    if own.torch != remote.torch:
        fix = f"python -m pip install torch=={own.torch.partition('+')[0]}   # on {facts.endpoint.host}"
        return Finding("versions", "warn", f"{seen}; torch {remote.torch} there", expected, fix)
    return Finding("versions", "ok", f"{seen} on both", expected)


def clocks(facts: HostFacts) -> Finding:
    if facts.measurement is None:
        return Finding("clocks", "skip", facts.missing)
    apart_s = facts.measurement.clock_offset_s
    expected = f"at most {MAX_CLOCK_OFFSET_S:g} s apart: records and files of both must fit together"
    found = f"{abs(apart_s):.3f} s apart"
    if abs(apart_s) > MAX_CLOCK_OFFSET_S:
        found = f"the clock there is {abs(apart_s):.1f} s {'ahead' if apart_s > 0 else 'behind'}"
        return Finding("clocks", "warn", found, expected, "sudo timedatectl set-ntp true   # on both")
    return Finding("clocks", "ok", found, expected)


def code(facts: HostFacts) -> Finding:
    if facts.measurement is None or facts.local is None:
        return Finding("same code", "skip", facts.missing)
    own, remote = facts.local, facts.measurement.remote
    expected = "the same script on both"
    if not own.script:
        return Finding("same code", "skip", "not requested; --script train.py, here and there, compares it")
    if not own.digest:
        return Finding("same code", "fail", f"{own.script} can't be read here", expected, f"ls -l {own.script}")
    if not remote.script:
        seen = f"--script is missing on the other side; type there: evenload doctor --serve --script {own.script}"
        return Finding("same code", "skip", seen)
    if own.digest != remote.digest:
        found = f"{own.script} here differs from {remote.script} there" + ("" if remote.digest else " (not readable)")
        fix = f"scp {own.script} {facts.endpoint.host}:{remote.script}"
        return Finding("same code", "fail", found, expected, fix)
    return Finding("same code", "ok", f"{own.script} is the same on both", expected)


def data(facts: HostFacts) -> Finding:
    if facts.measurement is None or facts.local is None:
        return Finding("same data", "skip", facts.missing)
    own, remote = facts.local.data, facts.measurement.remote.data
    expected = "the same data on both: one shared folder, or the same files on each"
    if own is None:
        return Finding("same data", "skip", "not requested; --data PATH, here and there, compares it")
    if own.kind == "missing":
        fix = f"rsync -a {facts.endpoint.host}:{remote.path if remote else own.path}/ {own.path}/"
        return Finding("same data", "fail", f"{own.path} does not exist on this machine", expected, fix)
    if remote is None:
        seen = f"--data is missing on the other side; type there: evenload doctor --serve --data {own.path}"
        return Finding("same data", "skip", seen)
    fix = f"rsync -a {own.path}/ {facts.endpoint.host}:{remote.path}/"
    if remote.kind == "missing":
        return Finding("same data", "fail", f"{remote.path} does not exist on the other machine", expected, fix)
    if (own.kind, own.digest) != (remote.kind, remote.digest):
        found = f"{_describe(own)} here, {_describe(remote)} there"
        if own.num_files == remote.num_files and own.num_bytes == remote.num_bytes:
            found += ", with different names or contents"
        return Finding("same data", "fail", found, expected, fix)
    found = f"{_describe(own)} on both, " + _describe_source(own, remote)
    return Finding(
        "same data", "ok", found + (" (only the first files were compared)" if own.is_partial else ""), expected
    )


def round_trip(facts: HostFacts) -> Finding:
    if facts.interrupted:
        fix = f"evenload doctor --serve --port {facts.endpoint.port}   # on {facts.endpoint.host}, and leave it there"
        return Finding("round trip", "fail", facts.interrupted, "an answer", fix)
    if facts.measurement is None:
        return Finding("round trip", "skip", facts.missing)
    trip_s = facts.measurement.round_trip_s
    found = f"{trip_s * 1e3:.2f} ms (median)"
    expected = f"under {SLOW_TRIP_S * 1e3:g} ms; a step waits for a few of them"
    if trip_s > SLOW_TRIP_S:
        return Finding("round trip", "warn", found, expected, f"traceroute {facts.endpoint.host}   # what is between")
    return Finding("round trip", "ok", found, expected)


def bandwidth(facts: HostFacts) -> Finding:
    measurement = facts.measurement
    if measurement is None:
        return Finding("bandwidth", "skip", facts.missing)
    if measurement.sent_bytes_per_s is None or measurement.received_bytes_per_s is None:
        return Finding("bandwidth", "skip", "not measured, see MTU")
    slower = min(measurement.sent_bytes_per_s, measurement.received_bytes_per_s)
    both, at_once = measurement.both_bytes_per_s, ""
    if both is not None:
        at_once = f", {_megabits(both)} each way at once"
    found = (
        f"{_megabits(measurement.sent_bytes_per_s)} there, {_megabits(measurement.received_bytes_per_s)} back{at_once}; the "
        f"gradients of ten million parameters (40 MB in float32) take {40e6 / (both or slower):.2g} s a step between two machines"
    )
    expected = "500 Mbit/s or more, each way"
    if slower < SLOW_BYTES_PER_S:
        name_here = facts.route.interface if facts.route else "eth0"
        fix = f"sudo ethtool {name_here} | grep Speed   # a slow cable? See docs/several-machines.md: slow links"
        return Finding("bandwidth", "warn", found, expected, fix)
    return Finding("bandwidth", "ok", found, expected)


def exchange(facts: HostFacts) -> Finding:
    """Predict how long gradients travel in each format."""
    measured = facts.measurement
    if measured is None or measured.sent_bytes_per_s is None or measured.received_bytes_per_s is None:
        return Finding("exchange", "skip", facts.missing if measured is None else "not measured, see MTU")
    up, down = measured.sent_bytes_per_s, measured.received_bytes_per_s
    # Sums travel in both directions at once; an earlier version there does not measure that.
    link = Link(2 * measured.round_trip_s, up, down, measured.both_bytes_per_s or min(up, down))
    options = options_of(_TEN_MILLION, link, 2, Work(0.0))
    found = f"a step with ten million parameters exchanges (on average): {describe_exchange(options)}"
    expected = "less than a step computes; evenload run predicts whole steps after a few of them (docs/wire.md)"
    return Finding("exchange", "ok", found, expected)


def _megabits(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _describe(data: DataSummary) -> str:
    files = f"{data.num_files:,} file" + ("s" if data.num_files != 1 else "")
    return f"{data.path} with {files}, {data.num_bytes / 1e6:,.1f} MB"


def _describe_source(own: DataSummary, remote: DataSummary) -> str:
    kinds = [source.partition(" ")[0] for source in (own.source, remote.source)]
    if all(kind in _NETWORK_FILES for kind in kinds):
        return f"from a network file system ({own.source}; {remote.source})"
    return f"each with its own copy ({own.source or 'unknown'}; {remote.source or 'unknown'})"
