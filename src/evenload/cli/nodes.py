"""The options of `evenload run` for several machines, in our spelling and in torchrun's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evenload.errors import ConfigError
from evenload.rendezvous.settings import Endpoint, RendezvousConfig, parse_endpoint, parse_nodes

_ONE_NODE = ("1", "1:1")


@dataclass(frozen=True)
class NodeOptions:
    """The options as given; None for one that is not given."""

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


def read_rendezvous_config(
    given: NodeOptions, port: int | None, target: Sequence[str], options: Sequence[str] = ()
) -> RendezvousConfig | None:
    """Return the configuration of a run on several machines; None for a run on this machine alone.

    ``target`` and ``options`` are those of the command to type elsewhere. ConfigError: options contradict each other, are
    incomplete, or have no effect.
    """
    if given.max_restarts is not None and given.max_restarts < 0:
        raise ConfigError(f"--max-restarts {given.max_restarts}: expected a number of restarts, 0 or more")
    if given.rdzv_backend not in (None, "c10d", "static"):
        raise ConfigError(
            f"--rdzv-backend {given.rdzv_backend}: the rendezvous needs no backend such as etcd; leave it out"
        )
    nodes = _one_of(("--nodes", given.nodes), ("--nnodes", given.nnodes))
    location = _location(given, port)
    if nodes is None or nodes[1] in _ONE_NODE:
        _check_one_node(given, nodes, location)
        return None
    least, most = parse_nodes(nodes[1], nodes[0])
    if given.standalone:
        raise ConfigError(f"--standalone means one machine, {nodes[0]} {nodes[1]} means several; leave one of them out")
    if location is None:
        raise ConfigError(
            f"{nodes[0]} {nodes[1]}: --host is missing; give the name or address of one of the machines, the same on all"
        )
    _check_node_rank(given.node_rank, most)
    if given.wait_s is not None and not 0 < given.wait_s < float("inf"):
        raise ConfigError(f"--wait {given.wait_s:g}: expected seconds, more than 0")
    config = RendezvousConfig(location[1], least, most, given.node_rank, given.wait_s, given.rdzv_id or "")
    command = ["evenload", "run", "--nodes", config.nodes, "--host", str(location[1]), *options, *target]
    return replace(config, command=shlex.join(command))


def _location(given: NodeOptions, port: int | None) -> tuple[str, Endpoint] | None:
    """Return the option that names the coordinator, and its endpoint."""
    master = None
    if given.master_addr is not None:
        master = given.master_addr if given.master_port is None else _join(given.master_addr, given.master_port)
    elif given.master_port is not None and given.host is None and given.rdzv_endpoint is None:
        raise ConfigError(f"--master-port {given.master_port} without --master-addr: give the machine as well")
    named = _one_of(("--host", given.host), ("--rdzv-endpoint", given.rdzv_endpoint), ("--master-addr", master))
    if named is None:
        return None
    endpoint = parse_endpoint(named[1], named[0])
    for option, number in (("--port", port), ("--master-port", given.master_port)):
        if number is None or number == endpoint.port:
            continue
        if number == 0:
            raise ConfigError(f"{option} 0: the other machines must know the port; give a number, or leave it out")
        if str(parse_endpoint(named[1], named[0], default_port=number)) == str(endpoint):
            raise ConfigError(f"{named[0]} {named[1]} and {option} {number} name two ports; leave one out")
        endpoint = Endpoint(endpoint.host, number)
    return named[0], endpoint


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _one_of(*options: tuple[str, str | None]) -> tuple[str, str] | None:
    """Return the option that is given; ConfigError if two are, with different values."""
    given = [(option, value) for option, value in options if value is not None]
    if len({value for _, value in given}) > 1:
        listed = " and ".join(f"{option} {value}" for option, value in given)
        raise ConfigError(f"{listed} set the same thing to different values; leave one out")
    return given[0] if given else None


def _check_one_node(given: NodeOptions, nodes: tuple[str, str] | None, location: tuple[str, Endpoint] | None) -> None:
    if location is not None and nodes is None:
        raise ConfigError(f"{location[0]} {location[1]}: the number of machines is missing: --nodes 2")
    if location is not None:
        raise ConfigError(
            f"{location[0]} {location[1]} has no effect with {nodes[0] if nodes else '--nodes'} 1: one machine needs no "
            "rendezvous (--port N fixes the port)"
        )
    for option, value in (("--node-rank", given.node_rank), ("--wait", given.wait_s), ("--rdzv-id", given.rdzv_id)):
        if value is not None and not (option == "--node-rank" and value == 0):
            raise ConfigError(
                f"{option} {value} has no effect on one machine; give --nodes N --host HOST, or leave it out"
            )


def _check_node_rank(node_rank: int | None, most: int) -> None:
    if node_rank is not None and not 0 <= node_rank < most:
        raise ConfigError(
            f"--node-rank {node_rank}: of {most} machines the ranks are 0 to {most - 1} (0 is the coordinator); without it the "
            "coordinator numbers the machines"
        )
