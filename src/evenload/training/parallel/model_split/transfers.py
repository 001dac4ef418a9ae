"""How activations find their way through a model that lies on several devices: hooks on the user's own modules.

Note [Three rules]
  1. A layer computes where its weights are: its inputs, however nested, are brought there before its forward. The device is
     read from the weights in each call, so a copy, a model loaded elsewhere, or one moved with `.to()` stays right.
  2. Between the layers, in the forward of the model itself, an operation on tensors of several devices happens where most
     of its bytes are, or, in place, where the tensor that it changes is. There is no other way to run a forward such as
     ``self.norm(h) @ self.embedding.weight.T`` or ``x + self.position[:n]`` unchanged.
  3. What the model returns comes back to where its input came from, so that labels that came with it are there.

Note [Devices chosen by the user]
  A CPU tensor given next to GPU ones (lengths for packing) is meant to be there: it is never moved.

All moves are autograd's own `Tensor.to`: gradients travel back the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from evenload.training.data.batches import move
from evenload.training.parallel.model_split.recompute import Again


@dataclass(frozen=True)
class Piece:
    """What one device has of a placed model."""

    device: str
    first: str
    """Name of its first layer; empty where it has none."""
    last: str
    num_layers: int
    needed_bytes: int
    """With gradients, optimizer state, and the activations that were measured."""
    limit_bytes: int
    expected_s: float | None
    """Of forward and backward of the example; None where no example was given."""
    part: float
    """Of the whole time."""


@dataclass(frozen=True)
class Placement:
    """How a model was cut."""

    model: str
    asked: tuple[Any, ...]
    """What `place` was called with, to know the same call again."""
    pieces: tuple[Piece, ...]
    num_layers: int

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, in order; also those without a layer."""
        return tuple(piece.device for piece in self.pieces)

    def sentence(self) -> str:
        """For the records."""
        parts = [f"{piece.num_layers} on {piece.device}" for piece in self.pieces]
        return (
            f"{self.model} is cut over {len(self.pieces)} devices: of its {self.num_layers} layers {', '.join(parts)}"
        )


@dataclass(frozen=True)
class Arrival:
    """Forward pre-hook of a layer: brings its inputs to its weights."""

    anchor: str
    """Name of the tensor whose device counts: the largest that is the layer's own."""
    alone: bool
    """All its tensors are on one device, so that operations inside need no looking after."""
    piece: int = 0
    """Index of its device in the placement."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Args and kwargs on the layer's device."""
        passage = _current()
        if passage is not None and self.alone:
            passage.pause(module)
        device = _device_of(module, self.anchor)
        if device is None:
            return args, kwargs
        if passage is None:
            return bring(args, device), bring(kwargs, device)
        if module.training:
            passage.again.begin(module, args, device)
        return bring(args, device, passage.kept), bring(kwargs, device, passage.kept)


@dataclass(frozen=True)
class Departure:
    """Forward hook of a layer, called after an error too: operations between layers are looked after again."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leaves the output where it is."""
        passage = _current()
        if passage is not None:
            passage.resume(module)
            passage.again.end(module)


@dataclass(frozen=True)
class Entrance:
    """Forward pre-hook of the whole model; holds how it was cut."""

    placement: Placement
    kinds: tuple[str, ...]
    """Types of the devices."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begins to look after operations between layers."""
        passages = _passages()
        passages.append(_Passage(module, args, kwargs, self.kinds))
        passages[-1].enter()


@dataclass(frozen=True)
class Exit:
    """Forward hook of the whole model, called after an error too."""

    returns: str
    """``first``: to where the input came from; ``last``: it stays where it is."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output, where it is wanted."""
        passages = _passages()
        if not passages or passages[-1].module is not module:
            return None
        passage = passages.pop()
        passage.leave()
        if self.returns == "last" or passage.home is None or output is None:
            return None
        return bring(output, passage.home, passage.kept)


def placement_of(model: nn.Module) -> Placement | None:
    """How the model was cut by `place`; None where it wasn't."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Entrance):
            return hook.placement
    return None


def pieces_of(models: Iterable[nn.Module]) -> dict[int, int]:
    """For the parameters (by id) of placed layers the index of their piece; loose ones are none of them."""
    pieces: dict[int, int] = {}
    for model in models:
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, Arrival):
                    for param in module.parameters():
                        pieces.setdefault(id(param), hook.piece)
    return pieces


def bring(values: Any, device: torch.device, kept: frozenset[int] = frozenset()) -> Any:
    """The same values with all tensors on `device`; the very same object where nothing has to move.

    Args:
        values: of any nesting.
        device: where to.
        kept: ids of tensors that stay where they are.
    """
    return move(values, device, kept) if _strays(values, device, kept) else values


class Together(TorchFunctionMode):
    """While it is entered, an operation on tensors of several devices happens on one of them (rule 2)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        if len(tensors) > 1:
            name = getattr(func, "__name__", "")
            if name not in _LEFT_ALONE and any(tensor.device != tensors[0].device for tensor in tensors):
                device = _meeting_place(name, args, kwargs, tensors)
                args = tuple(_with(value, device) for value in args)
                kwargs = {key: _with(value, device) for key, value in kwargs.items()}
        return func(*args, **kwargs)


_LEFT_ALONE = frozenset(
    # These take tensors of several devices on purpose, or are about gradients.
    (
        *("to", "copy_", "type_as", "set_", "__get__", "__set__"),
        *("_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu", "tensor_split"),
        *("backward", "grad", "register_hook"),
    )
)


class _Passage:
    """One forward of a placed model under way in this thread."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, kinds: tuple[str, ...]) -> None:
        self.module = module
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.home = _most_bytes(tensors) if tensors else None
        """Where the input came from."""
        self.kept = frozenset(
            id(tensor) for tensor in tensors if tensor.device.type == "cpu" and tensor.device != self.home
        )
        self.again = Again()
        self._kinds = kinds
        self._mode = Together()
        self._autocasts = ExitStack()
        self._paused: list[nn.Module] = []
        self._suspended = False

    def enter(self) -> None:
        """Autocast holds on all kinds of devices if it does where the input came from."""
        if self.home is not None and torch.is_autocast_enabled(self.home.type):
            dtype = torch.get_autocast_dtype(self.home.type)
            for kind in self._kinds:
                if not torch.is_autocast_enabled(kind):
                    self._autocasts.enter_context(torch.autocast(kind, dtype=dtype))
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Ends what `enter` began; also in the middle, after an error."""
        if self._is_innermost():
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._autocasts.close()

    def pause(self, module: nn.Module) -> None:
        """A layer begins, all of it on one device: inside it operations are as fast as ever, and can be compiled."""
        if not self._paused:
            self._suspended = self._is_innermost()
            if self._suspended:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._paused.append(module)

    def resume(self, module: nn.Module) -> None:
        """The layer has ended, well or not."""
        if not self._paused or self._paused[-1] is not module:
            return
        self._paused.pop()
        if not self._paused and self._suspended:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _is_innermost(self) -> bool:
        """Whether no other mode (the user's) was entered since: only the innermost can be left."""
        innermost: bool = _get_current_function_mode() is self._mode  # type: ignore[no-untyped-call]
        return innermost


_running = threading.local()


def _passages() -> list[_Passage]:
    """Placed models whose forward runs in this thread, the innermost last."""
    passages: list[_Passage] | None = getattr(_running, "passages", None)
    if passages is None:
        passages = _running.passages = []
    return passages


def _current() -> _Passage | None:
    passages = _passages()
    return passages[-1] if passages else None


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
    # The layer was changed since (pruned, converted): any tensor of its own tells.
    tensor = next(module.parameters(), None)
    tensor = tensor if tensor is not None else next(module.buffers(), None)
    return tensor.device if tensor is not None else None


def _strays(value: Any, device: torch.device, kept: frozenset[int]) -> bool:
    """Whether a tensor in it is to be moved; objects with a `to` of their own are asked to move in any case."""
    if isinstance(value, torch.Tensor):
        return value.device != device and id(value) not in kept
    if value is None or isinstance(value, str | bytes | int | float | nn.Module | type):
        return False
    if isinstance(value, Mapping):
        return any(_strays(part, device, kept) for part in value.values())
    if callable(getattr(value, "to", None)):
        return True
    if isinstance(value, list | tuple):
        return any(_strays(part, device, kept) for part in value)
    if is_dataclass(value):
        return any(_strays(getattr(value, field.name), device, kept) for field in fields(value))
    return False


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    """The tensors among arguments of an operation; numbers on the CPU mix with everything."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dim() or value.device.type != "cpu":
                found.append(value)
        elif type(value) in (list, tuple):
            _collect(value, found)


def _with(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device != device and (value.dim() or value.device.type != "cpu") else value
    if type(value) in (list, tuple):
        return type(value)(_with(part, device) for part in value)
    return value


def _meeting_place(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
) -> torch.device:
    """Where an operation on tensors of several devices happens."""
    changed = kwargs.get("out")
    if changed is None and args and _is_in_place(name):
        changed = args[0]
    targets: list[torch.Tensor] = []
    _collect((changed,), targets)
    return targets[0].device if targets else _most_bytes(tensors)


def _is_in_place(name: str) -> bool:
    """``add_``, ``__iadd__``, ``__setitem__``: the first argument is changed."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _most_bytes(tensors: list[torch.Tensor]) -> torch.device:
    """The device that holds most of them; of equals the one that comes last, which is further down the model."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    return max(reversed(sizes), key=lambda device: sizes[device])
