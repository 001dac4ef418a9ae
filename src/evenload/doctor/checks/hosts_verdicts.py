"""What the facts about another machine mean: one finding a check, with the command that mends. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.doctor.finding import Finding
from evenload.rendezvous.address import CONTAINER_BRIDGES, Address, Route
from evenload.rendezvous.connect import Miss
from evenload.rendezvous.host_info import CLOCK_S, numbers_of
from evenload.rendezvous.probe import Data, Measured, Sheet
from evenload.rendezvous.settings import Endpoint

SLOW_TRIP_S = 0.005
SLOW_BYTES_PER_S = 500e6 / 8
"""Half of what a Gigabit network carries."""
_NEVER_ASKED = "never reached, see {}"
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
class Facts:
    """What was seen of another machine; what was not come to is empty."""

    endpoint: Endpoint
    addresses: tuple[Address, ...] = ()
    unresolved: str = ""
    is_self: bool = False
    route: Route | None = None
    misses: tuple[tuple[Address, Miss], ...] = ()
    answers_at: int = 0
    """Another port, at which a machine that is silent at ours answers."""
    stranger: str = ""
    """Who listens at the port, where it is none of ours."""
    own: Sheet | None = None
    reached: Address | None = None
    connect_s: float = 0.0
    measured: Measured | None = None
    broken: str = ""
    """Why the talk broke off."""

    @property
    def missing(self) -> str:
        """Which check tells why there is nothing to judge."""
        return _NEVER_ASKED.format("name" if self.unresolved else "port" if self.reached is None else "round trip")


def name(facts: Facts) -> Finding:
    """What the name stands for."""
    host = facts.endpoint.host
    expected = f"{host} is an address of the other machine"
    if facts.unresolved:
        return Finding("name", "fail", facts.unresolved, expected, f"echo 'ADDRESS {host}' | sudo tee -a /etc/hosts")
    found = f"{host} is " + ", ".join(address.host for address in facts.addresses)
    if facts.is_self:
        mend = f"evenload doctor --serve --port {facts.endpoint.port}   # here; then this command on the other machine"
        return Finding("name", "warn", f"{found}: this machine itself", expected, mend)
    return Finding("name", "ok", found, expected)


def port(facts: Facts) -> Finding:
    """Is the port reached, and who listens there?"""
    number = facts.endpoint.port
    expected = f"`evenload doctor --serve`, or a run's meeting point, answers at {facts.endpoint}"
    serve = f"evenload doctor --serve --port {number}   # on {facts.endpoint.host}, before this command here"
    if facts.unresolved:
        return Finding("port", "skip", facts.missing)
    if facts.stranger:
        mend = f"sudo ss -ltnp 'sport = :{number}'   # on {facts.endpoint.host}: who holds it; or take another port"
        return Finding("port", "fail", facts.stranger, expected, mend)
    if facts.reached is not None:
        return Finding("port", "ok", f"{facts.reached} answers after {facts.connect_s * 1e3:.1f} ms", expected)
    told = "; ".join(f"{address}: {miss.describe()}" for address, miss in facts.misses)
    kinds = {miss.kind for _, miss in facts.misses}
    if "refused" in kinds:
        return Finding("port", "fail", told, expected, serve)
    if facts.answers_at:
        told += f". It is on, for it answers at port {facts.answers_at}: a firewall drops port {number}"
    if "silent" in kinds or any(miss.seconds < 0.5 for _, miss in facts.misses):
        mend = (
            f"sudo ufw allow {number}/tcp   # on {facts.endpoint.host}; or: sudo firewall-cmd --add-port={number}/tcp; in a "
            "cloud: the security group"
        )
        return Finding("port", "fail", told, expected, mend)
    mend = (
        f"ping -c 3 {facts.misses[0][0].host if facts.misses else facts.endpoint.host}   # is it on, in this network?"
    )
    return Finding("port", "fail", told, expected, mend)


def interface(facts: Facts) -> Finding:
    """Which interface leads there."""
    if facts.unresolved:
        return Finding("interface", "skip", facts.missing)
    if facts.route is None:
        return Finding(
            "interface", "fail", "no interface of this machine leads there", "a route", "ip route; ip -br addr"
        )
    here = f"{facts.route.interface or 'an unknown interface'} ({facts.route.own_address}) here"
    there = facts.measured.theirs.interface if facts.measured else ""
    found = here + (f", {there} there" if there else "")
    expected = "a wired interface, which gloo and NCCL will then use"
    kind = facts.route.interface
    mend = f"ip -br addr   # on {facts.endpoint.host}: give --host the address of its other network"
    if kind.startswith("wl"):
        return Finding("interface", "warn", f"{found}: wireless is slow and stalls", expected, mend)
    if kind.startswith(CONTAINER_BRIDGES):
        return Finding("interface", "warn", f"{found}: a bridge for containers, which others don't see", expected, mend)
    return Finding("interface", "ok", found, expected)


def mtu(facts: Facts) -> Finding:
    """Do large packets pass?"""
    if facts.measured is None or facts.route is None:
        return Finding("MTU", "skip", facts.missing)
    here, there = facts.route.mtu, facts.measured.theirs.mtu
    found = f"{here} bytes here ({facts.route.interface}), {there} there ({facts.measured.theirs.interface})"
    expected = "the same on both, and no more than the network between carries"
    lower = f"sudo ip link set dev {facts.route.interface} mtu"
    if facts.measured.stalled:
        found += f"; small packets arrive, but {facts.measured.stalled}"
        return Finding("MTU", "fail", found, expected, f"{lower} 1400   # here, and the same there")
    if here and there and here != there:
        return Finding("MTU", "warn", found, expected, f"{lower} {min(here, there)}   # or raise the other")
    return Finding("MTU", "ok", found, expected)


def other_ports(facts: Facts) -> Finding:
    """Are ports that the system picks reached, both ways?"""
    if facts.measured is None:
        return Finding("other ports", "skip", facts.missing)
    expected = "gloo and NCCL listen at ports that the system picks: all from 1024 up are open between the machines"
    stories, mend = [], ""
    own = facts.route.own_address if facts.route else "ADDRESS-OF-THIS-MACHINE"
    there = facts.reached.host if facts.reached else facts.endpoint.host
    if facts.measured.to_door is not None:
        stories.append(f"from here to there: {facts.measured.to_door.describe()}")
        mend = f"sudo ufw allow from {own}   # on {facts.endpoint.host}; or: sudo firewall-cmd --zone=trusted --add-source={own}"
    if facts.measured.from_door is not None:
        stories.append(f"from there to here: {facts.measured.from_door.describe()}")
        mend = (
            mend or f"sudo ufw allow from {there}   # here; or: sudo firewall-cmd --zone=trusted --add-source={there}"
        )
    if stories:
        return Finding("other ports", "fail", "; ".join(stories), expected, mend)
    return Finding("other ports", "ok", "a port that the system picked is reached, from here and from there", expected)


def versions(facts: Facts) -> Finding:
    """Do both have the same Evenload, Python and torch?"""
    if facts.measured is None or facts.own is None:
        return Finding("versions", "skip", facts.missing)
    own, theirs = facts.own, facts.measured.theirs
    expected = "the same Evenload, Python (first two numbers) and torch on both"
    rows = (
        ("evenload", own.evenload, theirs.evenload, own.evenload == theirs.evenload),
        ("python", own.python, theirs.python, numbers_of(own.python, 2) == numbers_of(theirs.python, 2)),
        ("torch", own.torch, theirs.torch, numbers_of(own.torch, 2) == numbers_of(theirs.torch, 2)),
    )
    wrong = [(what, here, there) for what, here, there, same in rows if not same]
    if wrong:
        what, here, there = wrong[0]
        found = "; ".join(f"{what} {here or 'none'} here, {there or 'none'} there" for what, here, there in wrong)
        wanted = (here or there).partition("+")[0]
        mend = f"python -m pip install {what}=={wanted}   # on {facts.endpoint.host if here else 'this machine'}"
        if what == "python":
            mend = f"uv venv --python {'.'.join(here.split('.')[:2])}   # on {facts.endpoint.host}"
        return Finding("versions", "fail", found, expected, mend)
    told = ", ".join(f"{what} {here or 'none'}" for what, here, _, _ in rows)
    if own.torch != theirs.torch:
        mend = f"python -m pip install torch=={own.torch.partition('+')[0]}   # on {facts.endpoint.host}"
        return Finding("versions", "warn", f"{told}; torch {theirs.torch} there", expected, mend)
    return Finding("versions", "ok", f"{told} on both", expected)


def clocks(facts: Facts) -> Finding:
    """Do both have the same time?"""
    if facts.measured is None:
        return Finding("clocks", "skip", facts.missing)
    apart_s = facts.measured.clock_s
    expected = f"at most {CLOCK_S:g} s apart: records and files of both must fit together"
    found = f"{abs(apart_s):.3f} s apart"
    if abs(apart_s) > CLOCK_S:
        found = f"the clock there is {abs(apart_s):.1f} s {'ahead' if apart_s > 0 else 'behind'}"
        return Finding("clocks", "warn", found, expected, "sudo timedatectl set-ntp true   # on both")
    return Finding("clocks", "ok", found, expected)


def code(facts: Facts) -> Finding:
    """Do both have the same script?"""
    if facts.measured is None or facts.own is None:
        return Finding("same code", "skip", facts.missing)
    own, theirs = facts.own, facts.measured.theirs
    expected = "the same script on both"
    if not own.script:
        return Finding("same code", "skip", "not asked; --script train.py, here and there, compares it")
    if not own.digest:
        return Finding("same code", "fail", f"{own.script} can't be read here", expected, f"ls -l {own.script}")
    if not theirs.script:
        told = f"the other side was told of no script; there: evenload doctor --serve --script {own.script}"
        return Finding("same code", "skip", told)
    if own.digest != theirs.digest:
        found = f"{own.script} here is other code than {theirs.script} there" + (
            "" if theirs.digest else " (not readable)"
        )
        mend = f"scp {own.script} {facts.endpoint.host}:{theirs.script}"
        return Finding("same code", "fail", found, expected, mend)
    return Finding("same code", "ok", f"{own.script} is the same on both", expected)


def data(facts: Facts) -> Finding:
    """Do both see the same data?"""
    if facts.measured is None or facts.own is None:
        return Finding("same data", "skip", facts.missing)
    own, theirs = facts.own.data, facts.measured.theirs.data
    expected = "the same data on both: one shared folder, or the same files on each"
    if own is None:
        return Finding("same data", "skip", "not asked; --data PATH, here and there, compares it")
    if own.kind == "missing":
        mend = f"rsync -a {facts.endpoint.host}:{theirs.path if theirs else own.path}/ {own.path}/"
        return Finding("same data", "fail", f"{own.path} is not there, on this machine", expected, mend)
    if theirs is None:
        told = f"the other side was told of no data; there: evenload doctor --serve --data {own.path}"
        return Finding("same data", "skip", told)
    mend = f"rsync -a {own.path}/ {facts.endpoint.host}:{theirs.path}/"
    if theirs.kind == "missing":
        return Finding("same data", "fail", f"{theirs.path} is not there, on the other machine", expected, mend)
    if (own.kind, own.digest) != (theirs.kind, theirs.digest):
        found = f"{_tell(own)} here, {_tell(theirs)} there"
        if own.num_files == theirs.num_files and own.num_bytes == theirs.num_bytes:
            found += ", of other names or contents"
        return Finding("same data", "fail", found, expected, mend)
    found = f"{_tell(own)} on both, " + _tell_copies(own, theirs)
    return Finding("same data", "ok", found + (" (the first files looked at only)" if own.is_cut else ""), expected)


def round_trip(facts: Facts) -> Finding:
    """How long a word takes there and back."""
    if facts.broken:
        mend = f"evenload doctor --serve --port {facts.endpoint.port}   # on {facts.endpoint.host}, and leave it there"
        return Finding("round trip", "fail", facts.broken, "an answer", mend)
    if facts.measured is None:
        return Finding("round trip", "skip", facts.missing)
    trip_s = facts.measured.round_trip_s
    found = f"{trip_s * 1e3:.2f} ms (median)"
    expected = f"under {SLOW_TRIP_S * 1e3:g} ms; a step waits for a few of them"
    if trip_s > SLOW_TRIP_S:
        return Finding("round trip", "warn", found, expected, f"traceroute {facts.endpoint.host}   # what is between")
    return Finding("round trip", "ok", found, expected)


def bandwidth(facts: Facts) -> Finding:
    """How much passes in a second, each way."""
    measured = facts.measured
    if measured is None:
        return Finding("bandwidth", "skip", facts.missing)
    if measured.there is None or measured.back is None:
        return Finding("bandwidth", "skip", "not measured, see MTU")
    slower = min(measured.there, measured.back)
    found = (
        f"{_megabits(measured.there)} there, {_megabits(measured.back)} back; the gradients of ten million parameters (40 MB in "
        f"float32) take {40e6 / slower:.2g} s a step between two machines"
    )
    expected = "500 Mbit/s or more, each way"
    if slower < SLOW_BYTES_PER_S:
        name_here = facts.route.interface if facts.route else "eth0"
        mend = (
            f"sudo ethtool {name_here} | grep Speed   # a cable that runs slower? docs/several-machines.md: slow links"
        )
        return Finding("bandwidth", "warn", found, expected, mend)
    return Finding("bandwidth", "ok", found, expected)


def _megabits(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _tell(what: Data) -> str:
    files = f"{what.num_files:,} file" + ("s" if what.num_files != 1 else "")
    return f"{what.path} with {files}, {what.num_bytes / 1e6:,.1f} MB"


def _tell_copies(own: Data, theirs: Data) -> str:
    kinds = [source.partition(" ")[0] for source in (own.source, theirs.source)]
    if all(kind in _NETWORK_FILES for kind in kinds):
        return f"from a network file system ({own.source}; {theirs.source})"
    return f"each with its own copy ({own.source or 'unknown'}; {theirs.source or 'unknown'})"
