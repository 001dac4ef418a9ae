"""`place`: split a model that is too big for one device over several devices of one process.

    units of the model → cost of each on each device → the best cut (balance/stages.py) → move the layers, and hook them

All decisions and errors come before anything is moved. The model stays the same object with the same parameters, keys and
classes; its hooks (transfers.py) are part of copies and pickles too.
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
from evenload.training.parallel.model_split.devices import DeviceCapacity, choose, format_bytes, measure_capacities
from evenload.training.parallel.model_split.layer_costs import CostCache, ModelCosts
from evenload.training.parallel.model_split.layer_units import LayerGroup, LayerUnit, loose_tensors, tensors_of
from evenload.training.parallel.model_split.transfers import (
    LayerPostHook,
    LayerPreHook,
    ModelPiece,
    ModelPostHook,
    ModelPreHook,
    ModelSplit,
    split_of,
)

SLACK = 0.02
"""Part of the time that may be spent on filling the devices evenly, where several have memory for the layers."""

Devices = Sequence[str | torch.device | tuple[str | torch.device, str | int]] | Mapping[str | torch.device, str | int]


@dataclass(frozen=True)
class _ModelChain:
    units: list[LayerUnit]
    order: list[int]
    """Indices of the units in the order they run."""
    groups: list[LayerGroup]
    costs: ModelCosts
    layers: list[LayerCost]


def place(
    model: nn.Module,
    devices: Devices | None = None,
    *,
    example: Any = None,
    optimizer_states: int = 2,
    returns: str = "first",
) -> nn.Module:
    """Split a model over several devices of this process: the same object, its layers moved, in the order they run.

    A layer's inputs are moved to its device, and the model's output to the device of its input, so a loop for one device works
    unchanged. Without pipelining one device computes at a time: this is for models that don't fit on one. Call it before
    `run.prepare`, and before the model is compiled.

    Args:
        model: Any model; see docs/place.md for its layers.
        devices: Such as ``["cuda:0", "cuda:1"]``, or with limits ``{"cuda:0": "6GiB", "cpu": "20GiB"}`` (or as pairs, to use
            one device twice). None selects this rank's own (``evenload run -d 0+1``), or every GPU for a single process.
        example: One micro-batch in the form of the model's arguments (a tensor, a tuple of arguments, a dict of keyword
            arguments), to measure times and activations. Without it times are estimated and activations left out.
        optimizer_states: Optimizer values per trainable parameter: 2 for Adam, 1 for momentum, 0 for SGD.
        returns: ``first``, or ``last`` to leave the model's output on its last device.

    Raises:
        ConfigError: The devices are invalid or too small (with the figures), or the model can't be split. Nothing is moved.
    """
    spec = detect()
    _check(model, optimizer_states, returns)
    chosen = choose(devices, spec)
    requested = (tuple((str(device), limit) for device, limit in chosen), returns)
    before = split_of(model)
    if before is not None:
        if before.requested == requested:
            return model
        raise ConfigError(
            f"place: this {before.model} is split already, over {', '.join(before.devices)}; a model can be split once. Build it "
            "anew to split it otherwise"
        )
    held: dict[torch.device, int] = {}
    for tensor in tensors_of(model):
        held[tensor.device] = held.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    capacities = measure_capacities(chosen, held, max(1, spec.world_size // max(1, spec.num_nodes)))
    chain, cut = _decide(model, capacities, example, optimizer_states, returns)
    split = _describe(model, chain, cut, capacities, requested)
    _apply(model, chain, cut, capacities, split, returns)
    worker.progress.placed = True
    whose = f"rank {spec.rank}: " if spec.world_size > 1 else ""
    for line in lines_of(split):
        print(f"evenload: {whose}{line}", flush=True)
    return model


def lines_of(split: ModelSplit) -> list[str]:
    lines = []
    total_s = math.fsum(piece.expected_s or 0.0 for piece in split.pieces)
    for piece in split.pieces:
        line = f"{split.model} on {piece.device}: "
        if not piece.num_layers:
            lines.append(
                line + "no layers; the other devices have memory for all of them, and using it would gain nothing"
            )
            continue
        span = piece.first if piece.first == piece.last else f"{piece.first} to {piece.last}"
        line += f"{piece.num_layers} of {split.num_layers} layers, {span}, "
        line += f"{format_bytes(piece.needed_bytes)} of {format_bytes(piece.limit_bytes)}, "
        if piece.expected_s is None:
            line += f"about {piece.part:.0%} of the time"
        else:
            line += f"{piece.expected_s:.3g} s of {total_s:.3g} s expected"
        lines.append(line)
    return lines


def _check(model: Any, optimizer_states: Any, returns: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"place expects a model (torch.nn.Module), got a {type(model).__name__}")
    name = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigError(f"{name}: give place the bare model (model.module), before run.prepare")
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if compiled or isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(f"{name}: place splits a plain model; call it before the model is compiled or scripted")
    if isinstance(optimizer_states, bool) or not isinstance(optimizer_states, int) or optimizer_states < 0:
        raise ConfigError(
            f"place(optimizer_states={optimizer_states!r}): expected the number of optimizer values per parameter: 2 "
            "for Adam, 1 for SGD with momentum, 0 for SGD"
        )
    if returns not in ("first", "last"):
        raise ConfigError(f"place(returns={returns!r}): expected first (where the input came from) or last")
    _check_parameters(model)


def _check_parameters(model: nn.Module) -> None:
    name = type(model).__name__
    parameters = list(model.named_parameters())
    if not parameters:
        raise ConfigError(f"place: {name} has no parameters; there is nothing to split")
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
        if key and split_of(module) is not None:
            raise ConfigError(f"place: {name}.{key} is split already; split either the whole model or its part")


# -- decide -----------------------------------------------------------------------------------------------------------


def _decide(
    model: nn.Module, capacities: Sequence[DeviceCapacity], example: Any, optimizer_states: int, returns: str
) -> tuple[_ModelChain, Cut]:
    """Return the best cut, with units as coarse as possible; ConfigError if none fits."""
    devices = [capacity.device for capacity in capacities]
    limits = [capacity.limit_bytes for capacity in capacities]
    links = layer_costs.measure_links(devices) if example is not None else layer_costs.no_links(len(devices))
    cache: CostCache = {}
    units = layer_units.find_units(model)
    if sum(_held_bytes(tensor, optimizer_states) for tensor in tensors_of(model)) > sum(limits):
        raise ConfigError(_too_small(model, capacities, optimizer_states, 0))
    while True:
        if example is None:
            costs = layer_costs.estimate(units, devices)
        else:
            costs = layer_costs.measure(model, units, example, devices, cache)
        order = layer_units.in_order(units, [cost.first_call for cost in costs.units])
        groups = layer_units.group(units, order)
        layers = _layers(model, units, order, groups, costs, optimizer_states)
        chain = _ModelChain(units, order, groups, costs, layers)
        cut = cut_chain(layers, limits, links, costs.output_bytes if returns == "first" else 0, SLACK)
        if cut is not None and len(layers) > 1:
            return chain, cut
        finer = layer_units.open_more(units)
        if finer is None:
            raise ConfigError(_no_cut(model, capacities, chain, optimizer_states))
        units = finer


def _layers(
    model: nn.Module,
    units: Sequence[LayerUnit],
    order: Sequence[int],
    groups: Sequence[LayerGroup],
    costs: ModelCosts,
    optimizer_states: int,
) -> list[LayerCost]:
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
    own = tensor.numel() * tensor.element_size()
    return own * (2 + optimizer_states) if tensor.requires_grad else own


def _too_small(
    model: nn.Module, capacities: Sequence[DeviceCapacity], optimizer_states: int, activation_bytes: int
) -> str:
    trainable = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    constant = sum(t.numel() * t.element_size() for t in tensors_of(model) if not t.requires_grad)
    parts = [f"{format_bytes(trainable)} of parameters, as much of gradients"]
    if optimizer_states:
        parts.append(
            f"{format_bytes(trainable * optimizer_states)} of optimizer state ({optimizer_states} a parameter)"
        )
    if constant:
        parts.append(f"{format_bytes(constant)} of buffers and frozen parameters")
    if activation_bytes:
        parts.append(f"{format_bytes(activation_bytes)} of activations of the example")
    need = trainable * (2 + optimizer_states) + constant + activation_bytes
    have = sum(capacity.limit_bytes for capacity in capacities)
    return (
        f"place: {type(model).__name__} needs {format_bytes(need)} ({', '.join(parts)}), and there are {format_bytes(have)}: "
        f"{_listed(capacities)}. Nothing was moved. Add a device or raise a limit"
        + (", or give a smaller micro-batch as the example" if activation_bytes else "")
        + ("; a plain SGD needs less: optimizer_states=0" if optimizer_states else "")
    )


def _listed(capacities: Sequence[DeviceCapacity]) -> str:
    return ", ".join(capacity.describe() for capacity in capacities)


def _no_cut(model: nn.Module, capacities: Sequence[DeviceCapacity], chain: _ModelChain, optimizer_states: int) -> str:
    name, layers = type(model).__name__, chain.layers
    if len(layers) < 2:
        return f"place: {name} is one layer, or all its layers share their weights; there is nothing to split"
    problems = [
        f"{unit.name} ({cost.problem})"
        for unit, cost in zip(chain.units, chain.costs.units, strict=True)
        if cost.problem
    ]
    if problems:
        return f"place: no cut of {name} works; layers that don't run on some device: {'; '.join(problems[:3])}"
    need = sum(layer.num_bytes for layer in layers)
    if need > sum(capacity.limit_bytes for capacity in capacities):
        return _too_small(model, capacities, optimizer_states, sum(layer.activation_bytes for layer in layers))
    largest = max(range(len(layers)), key=lambda index: layers[index].num_bytes)
    return (
        f"place: no cut of {name} fits, though its {format_bytes(need)} are less than the memory of all devices: layers stay "
        f"whole and in order, and the largest, {chain.units[chain.groups[largest].units[0]].name}, needs "
        f"{format_bytes(layers[largest].num_bytes)}. Devices: {_listed(capacities)}. Nothing was moved. "
        "Raise a limit, or name the devices in another order"
    )


def _describe(
    model: nn.Module,
    chain: _ModelChain,
    cut: Cut,
    capacities: Sequence[DeviceCapacity],
    requested: tuple[Any, ...],
) -> ModelSplit:
    total_s = math.fsum(cut.device_s)
    pieces = []
    for index, capacity in enumerate(capacities):
        low, high = cut.bounds[index], cut.bounds[index + 1]
        names = [chain.units[group.units[0]].name for group in chain.groups[low:high]]
        pieces.append(
            ModelPiece(
                device=str(capacity.device),
                first=names[0] if names else "",
                last=names[-1] if names else "",
                num_layers=len(names),
                needed_bytes=cut.device_bytes[index],
                limit_bytes=capacity.limit_bytes,
                expected_s=cut.device_s[index] if chain.costs.measured else None,
                part=cut.device_s[index] / total_s if total_s else 0.0,
            )
        )
    return ModelSplit(type(model).__name__, requested, tuple(pieces), len(chain.groups))


# -- apply ------------------------------------------------------------------------------------------------------------


def _apply(
    model: nn.Module,
    chain: _ModelChain,
    cut: Cut,
    capacities: Sequence[DeviceCapacity],
    split: ModelSplit,
    returns: str,
) -> None:
    piece_of = {unit: cut.device_of(index) for index, group in enumerate(chain.groups) for unit in group.units}
    owners = layer_units.owners_of(chain.units, chain.order)
    loose = loose_tensors(model, chain.units)
    for unit_index, piece in piece_of.items():
        module, device = chain.units[unit_index].module, capacities[piece].device
        pieces = {id(tensor): piece_of[owners[id(tensor)]] for tensor in tensors_of(module)}
        if not pieces:
            continue
        on_one_device = all(other == piece for other in pieces.values())
        if on_one_device:
            module.to(device)
        else:
            for tensor in tensors_of(module):
                if pieces[id(tensor)] == piece:
                    _move_tensor(tensor, device)
        pre_hook = LayerPreHook(_anchor(module, pieces, piece), on_one_device, piece)
        module.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=True)
        module.register_forward_hook(LayerPostHook(), always_call=True)
    for tensor in loose:
        _move_tensor(tensor, capacities[cut.device_of(0)].device)
    kinds = tuple(dict.fromkeys(capacity.device.type for capacity in capacities))
    model.register_forward_pre_hook(ModelPreHook(split, kinds), prepend=True, with_kwargs=True)
    model.register_forward_hook(ModelPostHook(returns), always_call=True)


def _anchor(module: nn.Module, pieces: Mapping[int, int], piece: int) -> str:
    """Return the name of the largest tensor that is on the layer's own device."""
    named = [*module.named_parameters(), *module.named_buffers()]
    own = [(name, tensor) for name, tensor in named if pieces[id(tensor)] == piece]
    return max(own, key=lambda pair: pair[1].numel() * pair[1].element_size())[0]


def _move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    """Move in place, so that all references to the tensor stay valid."""
    tensor.data = tensor.data.to(device)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(device)
