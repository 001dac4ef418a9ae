"""What the command line says of several machines: our spellings and torchrun's, as one set of terms."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evenload.errors import ConfigError
from evenload.rendezvous.settings import Endpoint, Terms, parse_endpoint, parse_nodes

_ONE = ("1", "1:1")


@dataclass(frozen=True)
class Spelled:
    """The options as given; None where one isn't."""

    nodes: str | None = None
    host: str | None = None
    node_rank: int | None = None
    wait_s: float | None = None
    nnodes: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int | None = None
    standalone: bool = False


def read_terms(given: Spelled, port: int | None, target: Sequence[str], options: Sequence[str] = ()) -> Terms | None:
    """The terms of a run on several machines; None for this machine alone.

    Args:
        given: the options.
        port: ``--port``, which on several machines is the meeting point's.
        target: script and arguments, for the command to type elsewhere.
        options: other options that belong into that command.

    Raises:
        ConfigError: options contradict each other, are incomplete, or have no effect.
    """
    if given.max_restarts not in (None, 0):
        raise ConfigError(
            f"--max-restarts {given.max_restarts}: ranks are not started again yet; leave it out, and start the same command "
            f"again to resume from the newest checkpoint"
        )
    if given.rdzv_backend not in (None, "c10d", "static"):
        raise ConfigError(
            f"--rdzv-backend {given.rdzv_backend}: the machines meet by themselves, without etcd; leave it out"
        )
    nodes = _one_of(("--nodes", given.nodes), ("--nnodes", given.nnodes))
    place = _place(given, port)
    if nodes is None or nodes[1] in _ONE:
        _check_alone(given, nodes, place)
        return None
    least, most = parse_nodes(nodes[1], nodes[0])
    if given.standalone:
        raise ConfigError(f"--standalone says one machine, {nodes[0]} {nodes[1]} several; leave one of them out")
    if place is None:
        raise ConfigError(
            f"{nodes[0]} {nodes[1]}: say where the machines meet, the same on all of them: --host NAME-OR-ADDRESS of one of them"
        )
    _check_node_rank(given.node_rank, most)
    if given.wait_s is not None and not 0 < given.wait_s < float("inf"):
        raise ConfigError(f"--wait {given.wait_s:g}: expected seconds, more than 0")
    terms = Terms(place[1], least, most, given.node_rank, given.wait_s, given.rdzv_id or "")
    command = ["evenload", "run", "--nodes", terms.nodes, "--host", str(place[1]), *options, *target]
    return replace(terms, command=shlex.join(command))


def _place(given: Spelled, port: int | None) -> tuple[str, Endpoint] | None:
    """Where the machines meet, and the option that says so."""
    master = None
    if given.master_addr is not None:
        master = given.master_addr if given.master_port is None else _join(given.master_addr, given.master_port)
    elif given.master_port is not None and given.host is None and given.rdzv_endpoint is None:
        raise ConfigError(f"--master-port {given.master_port} without --master-addr: say which machine")
    said = _one_of(("--host", given.host), ("--rdzv-endpoint", given.rdzv_endpoint), ("--master-addr", master))
    if said is None:
        return None
    endpoint = parse_endpoint(said[1], said[0])
    for option, number in (("--port", port), ("--master-port", given.master_port)):
        if number is None or number == endpoint.port:
            continue
        if number == 0:
            raise ConfigError(f"{option} 0: the other machines must know the port; give a number, or leave it out")
        if str(parse_endpoint(said[1], said[0], default_port=number)) == str(endpoint):
            raise ConfigError(f"{said[0]} {said[1]} and {option} {number} name two ports; leave one out")
        endpoint = Endpoint(endpoint.host, number)
    return said[0], endpoint


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _one_of(*options: tuple[str, str | None]) -> tuple[str, str] | None:
    """The one that is given.

    Raises:
        ConfigError: two of them say different things.
    """
    given = [(option, value) for option, value in options if value is not None]
    if len({value for _, value in given}) > 1:
        told = " and ".join(f"{option} {value}" for option, value in given)
        raise ConfigError(f"{told} say the same thing differently; leave one out")
    return given[0] if given else None


def _check_alone(given: Spelled, nodes: tuple[str, str] | None, place: tuple[str, Endpoint] | None) -> None:
    """One machine: what is only for several has no effect."""
    if place is not None and nodes is None:
        raise ConfigError(f"{place[0]} {place[1]}: say how many machines there are: --nodes 2")
    if place is not None:
        raise ConfigError(
            f"{place[0]} {place[1]} has no effect with {nodes[0] if nodes else '--nodes'} 1: one machine needs no meeting "
            "point (--port N fixes the port)"
        )
    for option, value in (("--node-rank", given.node_rank), ("--wait", given.wait_s), ("--rdzv-id", given.rdzv_id)):
        if value is not None and not (option == "--node-rank" and value == 0):
            raise ConfigError(
                f"{option} {value} has no effect on one machine; give --nodes N --host HOST, or leave it out"
            )


def _check_node_rank(node_rank: int | None, most: int) -> None:
    if node_rank is not None and not 0 <= node_rank < most:
        raise ConfigError(
            f"--node-rank {node_rank}: of {most} machines the ranks are 0 to {most - 1} (0 serves the meeting point); "
            "without it the meeting point numbers them"
        )
