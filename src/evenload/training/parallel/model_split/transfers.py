"""Move activations through a model that is split over several devices, by hooks on the user's own modules.

Note [Three rules]
  1. A layer computes where its weights are: its inputs, however nested, are moved there before its forward. The device is
     read from the weights in each call, so a copy, a model loaded elsewhere, or one moved with `.to()` stays correct.
  2. Between the layers, in the forward of the model itself, an operation on tensors of several devices runs where most of its
     bytes are, or, in place, where the changed tensor is. There is no other way to run a forward such as
     ``self.norm(h) @ self.embedding.weight.T`` or ``x + self.position[:n]`` unchanged.
  3. The model's output is moved to the device of its input, next to the labels.

Note [Devices chosen by the user]
  A CPU tensor given next to GPU ones (lengths for packing) is never moved.

All moves are autograd's own `Tensor.to`: gradients travel back the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from evenload.training.data.batches import leaves_of, move
from evenload.training.parallel.model_split.recompute import RecomputeGuard


@dataclass(frozen=True)
class ModelPiece:
    device: str
    first: str
    """Name of the first layer; empty without layers."""
    last: str
    num_layers: int
    needed_bytes: int
    """With gradients, optimizer state, and measured activations."""
    limit_bytes: int
    expected_s: float | None
    """Seconds of forward and backward of the example; None without an example."""
    part: float
    """Part of the whole time."""


@dataclass(frozen=True)
class ModelSplit:
    """The result of `place`: the pieces of a model."""

    model: str
    requested: tuple[Any, ...]
    """Arguments of `place`, to recognise a repeated call."""
    pieces: tuple[ModelPiece, ...]
    num_layers: int

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices in order, also those without a layer."""
        return tuple(piece.device for piece in self.pieces)

    def sentence(self) -> str:
        parts = [f"{piece.num_layers} on {piece.device}" for piece in self.pieces]
        return (
            f"{self.model} is split over {len(self.pieces)} devices: of its {self.num_layers} layers {', '.join(parts)}"
        )


@dataclass(frozen=True)
class LayerPreHook:
    """Forward pre-hook of a layer: move its inputs to its weights."""

    anchor: str
    """Name of the tensor that gives the device: the largest of the layer's own."""
    on_one_device: bool
    """All its tensors are on one device, so operations inside need no check."""
    piece: int = 0
    """Index of its device in the split."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        forward = _current()
        if forward is not None and self.on_one_device:
            forward.pause(module)
        device = _device_of(module, self.anchor)
        if device is None:
            return args, kwargs
        if forward is None:
            return move_if_needed(args, device), move_if_needed(kwargs, device)
        if module.training:
            forward.recompute.begin(module, args, device)
        return move_if_needed(args, device, forward.kept), move_if_needed(kwargs, device, forward.kept)


@dataclass(frozen=True)
class LayerPostHook:
    """Forward hook of a layer, called after an error too: check operations between layers again."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        forward = _current()
        if forward is not None:
            forward.resume(module)
            forward.recompute.end(module)


@dataclass(frozen=True)
class ModelPreHook:
    """Forward pre-hook of the whole model; holds the split."""

    split: ModelSplit
    kinds: tuple[str, ...]
    """Types of the devices."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        forwards = _forwards()
        forwards.append(_ForwardState(module, args, kwargs, self.kinds))
        forwards[-1].enter()


@dataclass(frozen=True)
class ModelPostHook:
    """Forward hook of the whole model, called after an error too."""

    returns: str
    """``first`` moves the output to the input's device; ``last`` leaves it."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        forwards = _forwards()
        if not forwards or forwards[-1].module is not module:
            return None
        forward = forwards.pop()
        forward.leave()
        if self.returns == "last" or forward.home is None or output is None:
            return None
        return move_if_needed(output, forward.home, forward.kept)


def split_of(model: nn.Module) -> ModelSplit | None:
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, ModelPreHook):
            return hook.split
    return None


def piece_indices(models: Iterable[nn.Module]) -> dict[int, int]:
    """Return the piece index of the parameters of split layers, by id; without parameters that belong to no layer."""
    pieces: dict[int, int] = {}
    for model in models:
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, LayerPreHook):
                    for param in module.parameters():
                        pieces.setdefault(id(param), hook.piece)
    return pieces


def move_if_needed(values: Any, device: torch.device, kept: frozenset[int] = frozenset()) -> Any:
    """Return nested values with all tensors on `device`; the same object where nothing has to move.

    Tensors whose ids are in `kept` stay where they are. Objects with a `to` method of their own are always moved.
    """
    for leaf in leaves_of(values):
        if not isinstance(leaf, torch.Tensor) or (leaf.device != device and id(leaf) not in kept):
            return move(values, device, kept)
    return values


class MixedDeviceMode(TorchFunctionMode):
    """Run an operation on tensors of several devices on one of them (rule 2)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        _find_tensors(args, tensors)
        if kwargs:
            _find_tensors(kwargs.values(), tensors)
        if len(tensors) > 1:
            name = getattr(func, "__name__", "")
            if name not in _UNCHECKED and any(tensor.device != tensors[0].device for tensor in tensors):
                device = _target_device(name, args, kwargs, tensors)
                args = tuple(_moved(value, device) for value in args)
                kwargs = {key: _moved(value, device) for key, value in kwargs.items()}
        return func(*args, **kwargs)


_UNCHECKED = frozenset(
    # These accept tensors of several devices, or concern gradients.
    (
        *("to", "copy_", "type_as", "set_", "__get__", "__set__"),
        *("_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu", "tensor_split"),
        *("backward", "grad", "register_hook"),
    )
)


class _ForwardState:
    def __init__(self, module: nn.Module, args: Any, kwargs: Any, kinds: tuple[str, ...]) -> None:
        self.module = module
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.home = _largest_device(tensors) if tensors else None
        """Device of the input."""
        self.kept = frozenset(
            id(tensor) for tensor in tensors if tensor.device.type == "cpu" and tensor.device != self.home
        )
        self.recompute = RecomputeGuard()
        self._kinds = kinds
        self._mode = MixedDeviceMode()
        self._autocasts = ExitStack()
        self._paused: list[nn.Module] = []
        self._suspended = False

    def enter(self) -> None:
        """Enter the mode, and autocast on all device types if it is on for the input's."""
        if self.home is not None and torch.is_autocast_enabled(self.home.type):
            dtype = torch.get_autocast_dtype(self.home.type)
            for kind in self._kinds:
                if not torch.is_autocast_enabled(kind):
                    self._autocasts.enter_context(torch.autocast(kind, dtype=dtype))
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Leave the mode and autocast, also after an error."""
        if self._is_innermost():
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._autocasts.close()

    def pause(self, module: nn.Module) -> None:
        """Leave the mode inside a layer on one device, where operations stay fast and can be compiled."""
        if not self._paused:
            self._suspended = self._is_innermost()
            if self._suspended:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._paused.append(module)

    def resume(self, module: nn.Module) -> None:
        if not self._paused or self._paused[-1] is not module:
            return
        self._paused.pop()
        if not self._paused and self._suspended:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _is_innermost(self) -> bool:
        """Return True if no other mode (the user's) was entered since: only the innermost can be left."""
        innermost: bool = _get_current_function_mode() is self._mode  # type: ignore[no-untyped-call]
        return innermost


_running = threading.local()


def _forwards() -> list[_ForwardState]:
    """Return the split models whose forward runs in this thread, the innermost last."""
    forwards: list[_ForwardState] | None = getattr(_running, "forwards", None)
    if forwards is None:
        forwards = _running.forwards = []
    return forwards


def _current() -> _ForwardState | None:
    forwards = _forwards()
    return forwards[-1] if forwards else None


def _device_of(module: nn.Module, anchor: str) -> torch.device | None:
    path, _, name = anchor.rpartition(".")
    holder: Any = module
    for part in path.split(".") if path else ():
        holder = getattr(holder, part, None)
    if isinstance(holder, nn.Module):
        for held in (holder._parameters, holder._buffers):
            tensor = held.get(name)
            if tensor is not None:
                return tensor.device
    # The layer was changed since (pruned, converted): use any tensor of its own.
    tensor = next(module.parameters(), None)
    tensor = tensor if tensor is not None else next(module.buffers(), None)
    return tensor.device if tensor is not None else None


def _find_tensors(values: Any, found: list[torch.Tensor]) -> None:
    """Collect the tensors among arguments of an operation, except scalars on the CPU, which mix with all devices."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dim() or value.device.type != "cpu":
                found.append(value)
        elif type(value) in (list, tuple):
            _find_tensors(value, found)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device != device and (value.dim() or value.device.type != "cpu") else value
    if type(value) in (list, tuple):
        return type(value)(_moved(part, device) for part in value)
    return value


def _target_device(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
) -> torch.device:
    """Return the device of an operation on tensors of several devices (rule 2)."""
    changed = kwargs.get("out")
    if changed is None and args and _is_in_place(name):
        changed = args[0]
    targets: list[torch.Tensor] = []
    _find_tensors((changed,), targets)
    return targets[0].device if targets else _largest_device(tensors)


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _largest_device(tensors: list[torch.Tensor]) -> torch.device:
    """Return the device with the most bytes; among equals the last, which is further down the model."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    return max(reversed(sizes), key=lambda device: sizes[device])
