"""Measure the cost of each layer on each device by running it on an example, or estimate it from its size.

Note [Measuring a model that fits nowhere]
  The model runs forward once, without gradients, where it is. Before each layer's forward, that layer alone is copied to each
  device in turn, and its forward and backward are timed there on the layer's true inputs. So no device ever holds more than
  one layer. Layers with the same signature (type, sizes, inputs) are timed once. Buffers and randomness are restored.

Note [Without an example]
  Activations are unknown and count as nothing. Time is assumed proportional to parameters, with each device's speed from a
  matrix product: accurate where most of the work is matrix products on equally many positions (transformers), poor for
  convolutions.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from evenload.balance.values import LinkSpeed
from evenload.errors import ConfigError
from evenload.training.compute import randomness
from evenload.training.compute.buffers import buffers_restored
from evenload.training.data.batches import move
from evenload.training.parallel.model_split.layer_units import LayerUnit, tensors_of

_PROBE_SIZE = 1024
_PROBE_BYTES = 8 << 20
_LONG_S = 0.2
"""A layer that takes longer is timed twice, a shorter one four times."""


@dataclass
class UnitCost:
    first_call: int | None = None
    """Index in the order of first calls; None where it was never called."""
    input_bytes: int = 0
    activation_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    """Seconds on each device; infinite where it can't run."""
    problem: str = ""


@dataclass(frozen=True)
class ModelCosts:
    units: tuple[UnitCost, ...]
    output_bytes: int
    measured: bool


CostCache = dict[tuple[Any, ...], tuple[list[float], int, str]]
"""Seconds on each device, activation bytes and error of measured layers, by signature."""


def measure(
    model: nn.Module, units: Sequence[LayerUnit], example: Any, devices: Sequence[torch.device], cache: CostCache
) -> ModelCosts:
    """Run the model on an example and time its units; see Note [Measuring a model that fits nowhere].

    `cache` is reused between calls with the same devices and example. ConfigError if the model can't run on the example.
    """
    home = next(model.parameters()).device
    args, kwargs = read_example(example)
    args, kwargs = move(args, home), move(kwargs, home)
    timer = _UnitTimer(units, devices, cache)
    try:
        with buffers_restored([model]), randomness.set_aside(home), timer.hooked(), torch.no_grad():
            output = model(*args, **kwargs)
    except Exception as error:
        raise ConfigError(
            f"place(example=...): {type(model).__name__} can't be run on the example ({type(error).__name__}: {error}); give "
            "it as the model is called: a tensor, a tuple of positional arguments, or a dict of keyword arguments"
        ) from error
    _fill_unknown(timer.costs, units, len(devices))
    return ModelCosts(tuple(timer.costs), _bytes_in(output), measured=True)


def estimate(units: Sequence[LayerUnit], devices: Sequence[torch.device]) -> ModelCosts:
    """See Note [Without an example]."""
    rates = _seconds_per_number(devices)
    costs = []
    for unit in units:
        numbers = sum(p.numel() for p in unit.module.parameters())
        costs.append(UnitCost(seconds=[numbers * rate for rate in rates]))
    return ModelCosts(tuple(costs), 0, measured=False)


def read_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(example) is tuple:
        return example, {}
    if isinstance(example, dict) and all(isinstance(key, str) for key in example):
        return (), dict(example)
    return (example,), {}


def measure_links(devices: Sequence[torch.device]) -> tuple[tuple[LinkSpeed, ...], ...]:
    """Measure the latency of a small copy and the bandwidth of a large one between all devices."""
    found: dict[tuple[torch.device, torch.device], LinkSpeed] = {}
    for a in devices:
        for b in devices:
            if a == b:
                found[a, b] = LinkSpeed(0.0, math.inf)
            elif (a, b) not in found:
                small_s, large_s = (_copy_s(num_bytes, a, b) for num_bytes in (4, _PROBE_BYTES))
                found[a, b] = LinkSpeed(small_s, _PROBE_BYTES / max(large_s - small_s, 1e-9))
    return tuple(tuple(found[a, b] for b in devices) for a in devices)


def no_links(num_devices: int) -> tuple[tuple[LinkSpeed, ...], ...]:
    """Return links of infinite speed, for a model whose activations are unknown."""
    return ((LinkSpeed(0.0, math.inf),) * num_devices,) * num_devices


class _UnitTimer:
    """Time the units during one forward, through hooks."""

    def __init__(self, units: Sequence[LayerUnit], devices: Sequence[torch.device], cache: CostCache) -> None:
        self.costs = [UnitCost(seconds=[0.0] * len(devices)) for _ in units]
        self._units = units
        self._devices = devices
        self._cache = cache
        self._num_called = 0
        self._busy = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [
            unit.module.register_forward_pre_hook(self._hook(index), with_kwargs=True)
            for index, unit in enumerate(self._units)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._busy:  # inside a copy that is being timed
                return
            self._busy = True
            try:
                self._measure(self.costs[index], module, args, kwargs)
            finally:
                self._busy = False

        return called

    def _measure(self, cost: UnitCost, module: nn.Module, args: Any, kwargs: Any) -> None:
        if cost.first_call is None:
            cost.first_call, self._num_called = self._num_called, self._num_called + 1
            cost.input_bytes = _bytes_in((args, kwargs))
        signature = _signature(module, args, kwargs)
        if signature not in self._cache:
            self._cache[signature] = _time_everywhere(module, args, kwargs, self._devices)
        seconds, activation_bytes, problem = self._cache[signature]
        cost.seconds = [before + now for before, now in zip(cost.seconds, seconds, strict=True)]
        cost.activation_bytes += activation_bytes
        cost.problem = cost.problem or problem


def _time_everywhere(
    module: nn.Module, args: Any, kwargs: Any, devices: Sequence[torch.device]
) -> tuple[list[float], int, str]:
    by_device: dict[torch.device, float] = {}
    activation_bytes, problem = 0, ""
    for device in dict.fromkeys(devices):
        try:
            by_device[device], activation_bytes = _time_on(module, args, kwargs, device)
        except Exception as error:  # any error of a layer that can't run there
            by_device[device] = math.inf
            problem = f"{device}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return [by_device[device] for device in devices], activation_bytes, problem


def _time_on(module: nn.Module, args: Any, kwargs: Any, device: torch.device) -> tuple[float, int]:
    """Return the shortest seconds of forward and backward, and the bytes saved between the two."""
    clone = copy.deepcopy(module).to(device)
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(clone)}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            seconds = _run_once(clone, args, kwargs, device)
        runs = [_run_once(clone, args, kwargs, device) for _ in range(1 if seconds > _LONG_S else 3)]
    return min(runs), sum(storages.values())


def _run_once(clone: nn.Module, args: Any, kwargs: Any, device: torch.device) -> float:
    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        # A copy: the layer may change its input in place, which autograd refuses for a leaf.
        return leaf.detach().requires_grad_(True).clone()

    inputs = tree_map(fresh, move((args, kwargs), device))
    _synchronise(device)
    started_s = time.perf_counter()
    output = clone(*inputs[0], **inputs[1])
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    _synchronise(device)
    seconds = time.perf_counter() - started_s
    for param in clone.parameters():
        param.grad = None
    return seconds


def _signature(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return a key that is equal for layers of equal cost."""
    params = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in tensors_of(module))
    inputs = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)[:80]
        for leaf in tree_leaves((args, kwargs))
    )
    return type(module), repr(module), module.training, params, inputs


def _fill_unknown(costs: Sequence[UnitCost], units: Sequence[LayerUnit], num_devices: int) -> None:
    """Count a unit that could be timed on no device (it needs other modules) as free, rather than as impossible."""
    for cost in costs:
        if all(math.isinf(seconds) for seconds in cost.seconds):
            cost.seconds = [0.0] * num_devices


def _bytes_in(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _seconds_per_number(devices: Sequence[torch.device]) -> list[float]:
    """Return the relative time of a parameter on each device: 1 where all are equal, else from a matrix product."""
    if len({_kind(device) for device in devices}) == 1:
        return [1.0] * len(devices)
    rates = {device: _product_s(device) / _PROBE_SIZE**2 for device in dict.fromkeys(devices)}
    return [rates[device] for device in devices]


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _product_s(device: torch.device) -> float:
    matrix = torch.full((_PROBE_SIZE, _PROBE_SIZE), 1 / _PROBE_SIZE, device=device)
    return _best_s(lambda: torch.mm(matrix, matrix), (device,))


def _copy_s(num_bytes: int, a: torch.device, b: torch.device) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=a)
    return _best_s(lambda: source.to(b), (a, b))


def _best_s(work: Callable[[], Any], devices: Sequence[torch.device]) -> float:
    best_s = math.inf
    with torch.no_grad():
        for turn in range(4):
            for device in devices:
                _synchronise(device)
            started_s = time.perf_counter()
            work()
            for device in devices:
                _synchronise(device)
            best_s = min(best_s, time.perf_counter() - started_s) if turn else best_s
    return best_s


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
