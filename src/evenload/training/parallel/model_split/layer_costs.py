"""What each layer of a model costs on each device: measured by running it on an example, or estimated from its size.

Note [Measuring a model that fits nowhere]
  The model runs forward once, without gradients, where it is. Before each layer's forward a copy of that layer alone is put
  on each device in turn, and its forward and backward are timed there on the layer's true inputs. So no device ever holds
  more than one layer. Layers that look the same (type, sizes, inputs) are timed once. Buffers and randomness are put back.

Note [Without an example]
  Activations are unknown and count as nothing, and time is taken as proportional to parameters, with each device's speed
  from a matrix product. That is near the truth where most of the work is matrix products on equally many positions
  (transformers), and poor for convolutions.
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
from evenload.training.compute.buffers import BufferGuard
from evenload.training.data.batches import move
from evenload.training.parallel.model_split.layer_units import Unit, tensors_of

_PROBE_SIZE = 1024
_PROBE_BYTES = 8 << 20
_LONG_S = 0.2
"""A layer that takes longer is run twice, a shorter one four times."""


@dataclass
class UnitCost:
    """What one unit costs; all its calls in a forward together."""

    first_call: int | None = None
    """Its place in the order of first calls; None where it was never called."""
    input_bytes: int = 0
    activation_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    """On each device; infinite where it can't run."""
    problem: str = ""
    """Why it can't run on some device."""


@dataclass(frozen=True)
class Costs:
    """What a model's units cost, and what lies between them."""

    units: tuple[UnitCost, ...]
    output_bytes: int
    measured: bool


Known = dict[tuple[Any, ...], tuple[list[float], int, str]]
"""Seconds on each device, bytes kept for the backward, and why not, of layers measured so far, by how they look."""


def measure(
    model: nn.Module, units: Sequence[Unit], example: Any, devices: Sequence[torch.device], known: Known
) -> Costs:
    """Runs the model on an example and times its units; see Note [Measuring a model that fits nowhere].

    Args:
        model: where it is now.
        units: what to time.
        example: a micro-batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument.
        devices: where.
        known: kept between calls with the same devices and example.

    Raises:
        ConfigError: the model can't be run on the example.
    """
    home = next(model.parameters()).device
    args, kwargs = read_example(example)
    args, kwargs = move(args, home), move(kwargs, home)
    watch = _Watch(units, devices, known)
    guard = BufferGuard([model])
    guard.save()
    try:
        with randomness.set_aside(home), watch.hooked(), torch.no_grad():
            output = model(*args, **kwargs)
    except Exception as error:
        raise ConfigError(
            f"place(example=...): {type(model).__name__} can't be run on the example ({type(error).__name__}: {error}); give "
            "it as the model is called: a tensor, a tuple of positional arguments, or a dict of keyword arguments"
        ) from error
    finally:
        guard.restore()
    _fill_unknown(watch.costs, units, len(devices))
    return Costs(tuple(watch.costs), _bytes_in(output), measured=True)


def estimate(units: Sequence[Unit], devices: Sequence[torch.device]) -> Costs:
    """Seconds in proportion to parameters; see Note [Without an example]."""
    rates = _seconds_per_number(devices)
    costs = []
    for unit in units:
        numbers = sum(p.numel() for p in unit.module.parameters())
        costs.append(UnitCost(seconds=[numbers * rate for rate in rates]))
    return Costs(tuple(costs), 0, measured=False)


def read_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call."""
    if type(example) is tuple:
        return example, {}
    if isinstance(example, dict) and all(isinstance(key, str) for key in example):
        return (), dict(example)
    return (example,), {}


def measure_links(devices: Sequence[torch.device]) -> tuple[tuple[LinkSpeed, ...], ...]:
    """The way from each device to each other: time of a small copy, and bandwidth of a large one."""
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
    """Ways that cost nothing: for a model whose activations are unknown."""
    return ((LinkSpeed(0.0, math.inf),) * num_devices,) * num_devices


class _Watch:
    """Hooks on the units during one forward."""

    def __init__(self, units: Sequence[Unit], devices: Sequence[torch.device], known: Known) -> None:
        self.costs = [UnitCost(seconds=[0.0] * len(devices)) for _ in units]
        self._units = units
        self._devices = devices
        self._known = known
        self._num_called = 0
        self._busy = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While the body runs, every call of a unit is timed on all devices first."""
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
            if self._busy:  # a copy that is being timed, or a unit inside one
                return
            self._busy = True
            try:
                self._note(self.costs[index], module, args, kwargs)
            finally:
                self._busy = False

        return called

    def _note(self, cost: UnitCost, module: nn.Module, args: Any, kwargs: Any) -> None:
        if cost.first_call is None:
            cost.first_call, self._num_called = self._num_called, self._num_called + 1
            cost.input_bytes = _bytes_in((args, kwargs))
        look = _look(module, args, kwargs)
        if look not in self._known:
            self._known[look] = _time_everywhere(module, args, kwargs, self._devices)
        seconds, activation_bytes, problem = self._known[look]
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
        except Exception as error:  # whatever a layer raises where it can't run
            by_device[device] = math.inf
            problem = f"{device}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return [by_device[device] for device in devices], activation_bytes, problem


def _time_on(module: nn.Module, args: Any, kwargs: Any, device: torch.device) -> tuple[float, int]:
    """Seconds of forward and backward, the best of a few, and the bytes kept between the two."""
    twin = copy.deepcopy(module).to(device)
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(twin)}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            seconds = _run_once(twin, args, kwargs, device)
        runs = [_run_once(twin, args, kwargs, device) for _ in range(1 if seconds > _LONG_S else 3)]
    return min(runs), sum(storages.values())


def _run_once(twin: nn.Module, args: Any, kwargs: Any, device: torch.device) -> float:
    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        # A copy, because the layer may change its input in place, which autograd refuses for a leaf.
        return leaf.detach().requires_grad_(True).clone()

    inputs = tree_map(fresh, move((args, kwargs), device))
    _synchronise(device)
    started_s = time.perf_counter()
    output = twin(*inputs[0], **inputs[1])
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    _synchronise(device)
    seconds = time.perf_counter() - started_s
    for param in twin.parameters():
        param.grad = None
    return seconds


def _look(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What tells whether two layers cost the same."""
    params = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in tensors_of(module))
    inputs = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)[:80]
        for leaf in tree_leaves((args, kwargs))
    )
    return type(module), repr(module), module.training, params, inputs


def _fill_unknown(costs: Sequence[UnitCost], units: Sequence[Unit], num_devices: int) -> None:
    """A unit that could be timed nowhere (it needs its surroundings) counts as no time, rather than as no place."""
    for cost in costs:
        if all(math.isinf(seconds) for seconds in cost.seconds):
            cost.seconds = [0.0] * num_devices


def _bytes_in(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _seconds_per_number(devices: Sequence[torch.device]) -> list[float]:
    """Relative time of a parameter on each device: 1 where all are alike, else from a matrix product."""
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
    """The shortest of a few runs after one to warm up."""
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
