"""Find the layers of a model that `place` may separate, in the order they run, with tied layers together.

Note [What is a layer]
  A cut may fall between any two modules that are called one after the other; finer is not better, because inside a block
  residual streams cross the cut too. So containers that only hold or chain their children (Sequential, ModuleList,
  ModuleDict) are opened, as is every module that holds such a list further down (a transformer's body, a stage of a
  ResNet), and the model itself. The repeated blocks inside a list stay whole, unless they hold lists of blocks of their
  own. Where no cut fits, `open_more` opens the type of the largest layer left.

Note [Tied weights]
  A parameter that two layers share stays one parameter, on the device of the first layer that has it. A layer that is at least
  half shared (a language model's head that is also its embedding) is moved to that device as a whole, with its activations. A
  layer with a small shared part stays where it is cheapest, and the shared part is copied to it in each forward, through
  autograd, so that there still is one gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class LayerUnit:
    name: str
    module: nn.Module


@dataclass(frozen=True)
class LayerGroup:
    """Units on the same device: one layer of the chain."""

    units: tuple[int, ...]
    """Indices of units; the first gives the layer its name."""


def find_units(model: nn.Module) -> list[LayerUnit]:
    """See Note [What is a layer]."""
    if not any(True for _ in model.children()):
        return [LayerUnit("", model)]
    return list(_open("", model, set()))


def open_more(units: Sequence[LayerUnit]) -> list[LayerUnit] | None:
    """Open all units of the largest one's type; None where nothing is left to open."""
    composite = [unit for unit in units if any(True for _ in unit.module.children())]
    if not composite:
        return None
    kind = type(max(composite, key=lambda unit: module_bytes(unit.module)).module)
    seen = {id(unit.module) for unit in units}
    finer: list[LayerUnit] = []
    for unit in units:
        if type(unit.module) is kind and any(True for _ in unit.module.children()):
            finer += _open(unit.name, unit.module, seen)
        else:
            finer.append(unit)
    return finer


def in_order(units: Sequence[LayerUnit], calls: Sequence[int | None]) -> list[int]:
    """Return the units' indices by their first calls; an uncalled unit follows the one registered before."""
    keys: list[tuple[int, int]] = []
    last = -1
    for index in range(len(units)):
        call = calls[index]
        last = last if call is None else call
        keys.append((last, index))
    return sorted(range(len(units)), key=lambda index: keys[index])


def group(units: Sequence[LayerUnit], order: Sequence[int]) -> list[LayerGroup]:
    """Group units into layers of the chain: one without tensors joins the previous unit, a tied one the first; see the notes."""
    owners = owners_of(units, order)
    members: dict[int, list[int]] = {}
    leader_of: dict[int, int] = {}
    waiting: list[int] = []
    previous: int | None = None
    for index in order:
        leader = _leader(units[index], index, owners, leader_of, previous)
        if leader is None:
            waiting.append(index)
            continue
        leader_of[index] = previous = leader
        members.setdefault(leader, []).append(index)
        members[leader] += waiting
        waiting = []
    return [LayerGroup(tuple(indices)) for indices in members.values()]


def owners_of(units: Sequence[LayerUnit], order: Sequence[int]) -> dict[int, int]:
    """Return the first unit in order that has each tensor, by the tensor's id."""
    owners: dict[int, int] = {}
    for index in order:
        for tensor in tensors_of(units[index].module):
            owners.setdefault(id(tensor), index)
    return owners


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def loose_tensors(model: nn.Module, units: Sequence[LayerUnit]) -> list[torch.Tensor]:
    """Return the tensors of opened containers that belong to no unit, such as a class token."""
    held = {id(tensor) for unit in units for tensor in tensors_of(unit.module)}
    return [tensor for tensor in tensors_of(model) if id(tensor) not in held]


def module_bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(module))


def _open(name: str, module: nn.Module, seen: set[int]) -> Iterator[LayerUnit]:
    repeated = _repeated_types(module)
    for child_name, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        full_name = f"{name}.{child_name}" if name else child_name
        if _is_opened(child, is_block=type(child) in repeated):
            yield from _open(full_name, child, seen)
        else:
            yield LayerUnit(full_name, child)


def _is_opened(module: nn.Module, *, is_block: bool) -> bool:
    children = list(module.children())
    if not children:
        return False
    if _passes_through(module):
        return True
    lists = [part for part in module.modules() if _passes_through(part)]
    if any(_repeated_types(part) for part in lists):
        return True
    return not is_block and any(sum(1 for child in part.children() if _has_tensors(child)) > 1 for part in lists)


def _passes_through(module: nn.Module) -> bool:
    """Return True for a module that only holds its children, or calls them one after the other."""
    return "forward" not in vars(module) and type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def _repeated_types(module: nn.Module) -> set[type]:
    """Return the types of composite children that occur several times: blocks."""
    kinds = [type(child) for child in module.children() if any(True for _ in child.children())]
    return {kind for kind in kinds if kinds.count(kind) > 1}


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in tensors_of(module))


def _leader(
    unit: LayerUnit, index: int, owners: dict[int, int], leader_of: dict[int, int], previous: int | None
) -> int | None:
    """Return the unit whose layer this one joins; None for a first unit without tensors."""
    sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors_of(unit.module)}
    if not sizes:
        return previous
    shared = [tensor for tensor in sizes if owners[tensor] != index]
    if shared and 2 * sum(sizes[tensor] for tensor in shared) >= sum(sizes.values()):
        return leader_of[owners[max(shared, key=lambda tensor: sizes[tensor])]]
    return index
