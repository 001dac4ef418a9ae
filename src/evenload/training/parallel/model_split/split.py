"""`place`: a model too big for one device, cut over several devices of one process.

    units of the model → what each costs on each device → the best cut (balance/stages.py) → moved, and hooked

Everything is decided, and refused, before anything is moved. The model stays the same object with the same parameters, keys
and classes; it carries hooks (transfers.py), which copies and pickles carry too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evenload.balance.stages import Cut, LayerCost, cut_chain
from evenload.errors import ConfigError
from evenload.training.launch import worker
from evenload.training.launch.environment import detect
from evenload.training.parallel.model_split import layer_costs, layer_units
from evenload.training.parallel.model_split.devices import Room, choose, measure_rooms, spell_bytes
from evenload.training.parallel.model_split.layer_costs import Costs, Known
from evenload.training.parallel.model_split.layer_units import Unit, loose_tensors, tensors_of
from evenload.training.parallel.model_split.transfers import (
    Arrival,
    Departure,
    Entrance,
    Exit,
    Piece,
    Placement,
    placement_of,
)

SLACK = 0.02
"""What part of the time may be given to fill the devices evenly, where several could have the layers."""

Devices = Sequence[str | torch.device | tuple[str | torch.device, str | int]] | Mapping[str | torch.device, str | int]


@dataclass(frozen=True)
class _Chain:
    """A model as a chain of layers."""

    units: list[Unit]
    order: list[int]
    """Indices of the units in the order they run."""
    groups: list[layer_units.Layer]
    costs: Costs
    layers: list[LayerCost]
    """The groups as the mathematics sees them."""


def place(
    model: nn.Module,
    devices: Devices | None = None,
    *,
    example: Any = None,
    optimizer_states: int = 2,
    returns: str = "first",
) -> nn.Module:
    """Cuts a model over several devices of this process: the same object, its layers moved, in the order they run.

    A layer's inputs are brought to its device, and what the model returns comes back to where its input came from, so a loop
    for one device works unchanged. Without pipelining one device computes at a time: this is for models that don't fit one.
    Call it before `run.prepare`, and before the model is compiled.

    Args:
        model: any model; see docs/place.md for what is taken as a layer.
        devices: such as ``["cuda:0", "cuda:1"]``, or with limits ``{"cuda:0": "6GiB", "cpu": "20GiB"}`` (of one device named
            twice, as pairs); None takes this rank's own (``evenload run -d 0+1``), or alone every GPU.
        example: one micro-batch as the model is called with (a tensor, a tuple of arguments, a dict of keyword arguments).
            With it times and activations are measured; without it they are estimated and left out.
        optimizer_states: numbers an optimizer keeps for each trainable parameter: 2 for Adam, 1 for momentum, 0 for SGD.
        returns: ``first``, or ``last`` to leave what the model returns on its last device.

    Raises:
        ConfigError: the devices are wrong or too small (with the figures), or the model can't be cut. Nothing is moved then.
    """
    spec = detect()
    _check(model, optimizer_states, returns)
    chosen = choose(devices, spec)
    asked = (tuple((str(device), limit) for device, limit in chosen), returns)
    before = placement_of(model)
    if before is not None:
        if before.asked == asked:
            return model
        raise ConfigError(
            f"place: this {before.model} is cut already, over {', '.join(before.devices)}; it can be cut once. Build it anew "
            "for another cut"
        )
    held: dict[torch.device, int] = {}
    for tensor in tensors_of(model):
        held[tensor.device] = held.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    rooms = measure_rooms(chosen, held, max(1, spec.world_size // max(1, spec.num_nodes)))
    chain, cut = _decide(model, rooms, example, optimizer_states, returns)
    placement = _describe(model, chain, cut, rooms, asked)
    _apply(model, chain, cut, rooms, placement, returns)
    worker.progress.placed = True
    whose = f"rank {spec.rank}: " if spec.world_size > 1 else ""
    for line in lines_of(placement):
        print(f"evenload: {whose}{line}", flush=True)
    return model


def lines_of(placement: Placement) -> list[str]:
    """One line for each device."""
    lines = []
    total_s = math.fsum(piece.expected_s or 0.0 for piece in placement.pieces)
    for piece in placement.pieces:
        line = f"{placement.model} on {piece.device}: "
        if not piece.num_layers:
            lines.append(line + "no layers; the others have room for all of them, and it would gain nothing")
            continue
        span = piece.first if piece.first == piece.last else f"{piece.first} to {piece.last}"
        line += f"{piece.num_layers} of {placement.num_layers} layers, {span}, "
        line += f"{spell_bytes(piece.needed_bytes)} of {spell_bytes(piece.limit_bytes)}, "
        if piece.expected_s is None:
            line += f"about {piece.part:.0%} of the time"
        else:
            line += f"{piece.expected_s:.3g} s of {total_s:.3g} s expected"
        lines.append(line)
    return lines


def _check(model: Any, optimizer_states: Any, returns: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"place takes a model (torch.nn.Module); it got a {type(model).__name__}")
    name = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigError(f"{name}: give place the bare model (model.module), before run.prepare")
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if compiled or isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(f"{name}: place cuts a plain model; call it before the model is compiled or scripted")
    if isinstance(optimizer_states, bool) or not isinstance(optimizer_states, int) or optimizer_states < 0:
        raise ConfigError(
            f"place(optimizer_states={optimizer_states!r}): expected how many numbers the optimizer keeps for a parameter: 2 "
            "for Adam, 1 for SGD with momentum, 0 for SGD"
        )
    if returns not in ("first", "last"):
        raise ConfigError(f"place(returns={returns!r}): expected first (where the input came from) or last")
    _check_parameters(model)


def _check_parameters(model: nn.Module) -> None:
    name = type(model).__name__
    parameters = list(model.named_parameters())
    if not parameters:
        raise ConfigError(f"place: {name} has no parameters; there is nothing to cut")
    for key, param in parameters:
        if nn.parameter.is_lazy(param):
            raise ConfigError(f"{name} has uninitialised lazy parameters ({key}): run a batch through it before place")
        if param.is_meta:
            raise ConfigError(f"{name} has parameters on the meta device ({key}): materialise them before place")
        hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
        if any(str(getattr(hook, "__module__", "")).startswith("evenload.") for hook in hooks):
            raise ConfigError(
                f"place after run.prepare: {name} is prepared already; write place(model) before run.prepare"
            )
    for key, module in model.named_modules():
        if key and placement_of(module) is not None:
            raise ConfigError(f"place: {name}.{key} is cut already; cut either the whole model or its part")


# -- deciding ---------------------------------------------------------------------------------------------------------


def _decide(
    model: nn.Module, rooms: Sequence[Room], example: Any, optimizer_states: int, returns: str
) -> tuple[_Chain, Cut]:
    """The best cut, of units as coarse as fit.

    Raises:
        ConfigError: none fits.
    """
    devices = [room.device for room in rooms]
    limits = [room.limit_bytes for room in rooms]
    links = layer_costs.measure_links(devices) if example is not None else layer_costs.no_links(len(devices))
    known: Known = {}
    units = layer_units.find_units(model)
    if sum(_held_bytes(tensor, optimizer_states) for tensor in tensors_of(model)) > sum(limits):
        raise ConfigError(_too_small(model, rooms, optimizer_states, 0))
    while True:
        if example is None:
            costs = layer_costs.estimate(units, devices)
        else:
            costs = layer_costs.measure(model, units, example, devices, known)
        order = layer_units.in_order(units, [cost.first_call for cost in costs.units])
        groups = layer_units.group(units, order)
        layers = _layers(model, units, order, groups, costs, optimizer_states)
        chain = _Chain(units, order, groups, costs, layers)
        cut = cut_chain(layers, limits, links, costs.output_bytes if returns == "first" else 0, SLACK)
        if cut is not None and len(layers) > 1:
            return chain, cut
        finer = layer_units.open_more(units)
        if finer is None:
            raise ConfigError(_no_cut(model, rooms, chain, optimizer_states))
        units = finer


def _layers(
    model: nn.Module,
    units: Sequence[Unit],
    order: Sequence[int],
    groups: Sequence[layer_units.Layer],
    costs: Costs,
    optimizer_states: int,
) -> list[LayerCost]:
    """The layers as the mathematics sees them; what belongs to no unit counts to the first."""
    owners = layer_units.owners_of(units, order)
    held = [0] * len(units)
    for tensor in tensors_of(model):
        if id(tensor) in owners:
            held[owners[id(tensor)]] += _held_bytes(tensor, optimizer_states)
    loose = sum(_held_bytes(tensor, optimizer_states) for tensor in loose_tensors(model, units))
    layers = []
    for index, group in enumerate(groups):
        members = [costs.units[unit] for unit in group.units]
        layers.append(
            LayerCost(
                held_bytes=sum(held[unit] for unit in group.units) + (0 if index else loose),
                activation_bytes=sum(cost.activation_bytes for cost in members),
                input_bytes=members[0].input_bytes,
                seconds=tuple(math.fsum(seconds) for seconds in zip(*(cost.seconds for cost in members), strict=True)),
            )
        )
    return layers


def _held_bytes(tensor: torch.Tensor, optimizer_states: int) -> int:
    """Of a tensor with its gradient and the optimizer's state."""
    own = tensor.numel() * tensor.element_size()
    return own * (2 + optimizer_states) if tensor.requires_grad else own


def _too_small(model: nn.Module, rooms: Sequence[Room], optimizer_states: int, activation_bytes: int) -> str:
    trainable = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    constant = sum(t.numel() * t.element_size() for t in tensors_of(model) if not t.requires_grad)
    parts = [f"{spell_bytes(trainable)} of parameters, as much of gradients"]
    if optimizer_states:
        parts.append(f"{spell_bytes(trainable * optimizer_states)} of optimizer state ({optimizer_states} a parameter)")
    if constant:
        parts.append(f"{spell_bytes(constant)} of buffers and frozen parameters")
    if activation_bytes:
        parts.append(f"{spell_bytes(activation_bytes)} of activations of the example")
    need = trainable * (2 + optimizer_states) + constant + activation_bytes
    have = sum(room.limit_bytes for room in rooms)
    return (
        f"place: {type(model).__name__} needs {spell_bytes(need)} ({', '.join(parts)}), and there are {spell_bytes(have)}: "
        f"{', '.join(room.describe() for room in rooms)}. Nothing was moved. Add a device or raise a limit"
        + (", or give a smaller micro-batch as the example" if activation_bytes else "")
        + ("; a plain SGD needs less: optimizer_states=0" if optimizer_states else "")
    )


def _no_cut(model: nn.Module, rooms: Sequence[Room], chain: _Chain, optimizer_states: int) -> str:
    """Why no cut was found."""
    name, layers = type(model).__name__, chain.layers
    if len(layers) < 2:
        return f"place: {name} is one layer, or its layers all share their weights; there is nothing to cut"
    problems = [
        f"{unit.name} ({cost.problem})"
        for unit, cost in zip(chain.units, chain.costs.units, strict=True)
        if cost.problem
    ]
    if problems:
        return f"place: no cut of {name} works; layers that don't run on some device: {'; '.join(problems[:3])}"
    need = sum(layer.num_bytes for layer in layers)
    if need > sum(room.limit_bytes for room in rooms):
        return _too_small(model, rooms, optimizer_states, sum(layer.activation_bytes for layer in layers))
    largest = max(range(len(layers)), key=lambda index: layers[index].num_bytes)
    return (
        f"place: no cut of {name} fits, though its {spell_bytes(need)} are less than all devices have together: layers stay "
        f"whole and in order, and the largest, {chain.units[chain.groups[largest].units[0]].name}, needs "
        f"{spell_bytes(layers[largest].num_bytes)}. Devices: {', '.join(room.describe() for room in rooms)}. Nothing was "
        "moved. Raise a limit, or name the devices in another order"
    )


def _describe(model: nn.Module, chain: _Chain, cut: Cut, rooms: Sequence[Room], asked: tuple[Any, ...]) -> Placement:
    total_s = math.fsum(cut.device_s)
    pieces = []
    for index, room in enumerate(rooms):
        low, high = cut.bounds[index], cut.bounds[index + 1]
        names = [chain.units[group.units[0]].name for group in chain.groups[low:high]]
        pieces.append(
            Piece(
                device=str(room.device),
                first=names[0] if names else "",
                last=names[-1] if names else "",
                num_layers=len(names),
                needed_bytes=cut.device_bytes[index],
                limit_bytes=room.limit_bytes,
                expected_s=cut.device_s[index] if chain.costs.measured else None,
                part=cut.device_s[index] / total_s if total_s else 0.0,
            )
        )
    return Placement(type(model).__name__, asked, tuple(pieces), len(chain.groups))


# -- doing ------------------------------------------------------------------------------------------------------------


def _apply(
    model: nn.Module, chain: _Chain, cut: Cut, rooms: Sequence[Room], placement: Placement, returns: str
) -> None:
    """Moves the layers and hooks them."""
    piece_of = {unit: cut.device_of(index) for index, group in enumerate(chain.groups) for unit in group.units}
    owners = layer_units.owners_of(chain.units, chain.order)
    loose = loose_tensors(model, chain.units)
    for unit_index, piece in piece_of.items():
        module, device = chain.units[unit_index].module, rooms[piece].device
        pieces = {id(tensor): piece_of[owners[id(tensor)]] for tensor in tensors_of(module)}
        if not pieces:
            continue
        alone = all(other == piece for other in pieces.values())
        if alone:
            module.to(device)
        else:
            for tensor in tensors_of(module):
                if pieces[id(tensor)] == piece:
                    _move_tensor(tensor, device)
        arrival = Arrival(_anchor(module, pieces, piece), alone, piece)
        module.register_forward_pre_hook(arrival, prepend=True, with_kwargs=True)
        module.register_forward_hook(Departure(), always_call=True)
    for tensor in loose:
        _move_tensor(tensor, rooms[cut.device_of(0)].device)
    kinds = tuple(dict.fromkeys(room.device.type for room in rooms))
    model.register_forward_pre_hook(Entrance(placement, kinds), prepend=True, with_kwargs=True)
    model.register_forward_hook(Exit(returns), always_call=True)


def _anchor(module: nn.Module, pieces: Mapping[int, int], piece: int) -> str:
    """The largest tensor of a layer that is on its own device."""
    named = [*module.named_parameters(), *module.named_buffers()]
    own = [(name, tensor) for name, tensor in named if pieces[id(tensor)] == piece]
    return max(own, key=lambda pair: pair[1].numel() * pair[1].element_size())[0]


def _move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    """In place: whoever holds the tensor holds it still."""
    tensor.data = tensor.data.to(device)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(device)
