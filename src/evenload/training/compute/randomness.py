"""Key the random numbers of a step, so that it can be repeated, and keep them apart from the user's.

Inside loss_fn each rank draws from its own stream, a function of (seed, step, call, micro-batch, rank); outside, the
generators are as the user left them, equal on all ranks. The CPU's generators are those of data/randomness.py; this module
adds that of the device, and of further GPUs if a model lies on several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from evenload.training.data import randomness as host
from evenload.training.data.randomness import get_global_state, mix, reseed, set_global_state


def seed_all(device: torch.device, *parts: int, others: Sequence[torch.device] = ()) -> None:
    """Seed all generators by a hash of `parts`; a single part is the seed itself. `others`: see `other_gpus`."""
    seed = parts[0] if len(parts) == 1 else mix(*parts)
    reseed(seed)
    if device.type == "cuda":
        _cuda_generator(device).manual_seed(seed)
    for index, other in enumerate(others, 1):
        # Not the same seed: two layers of one size would drop the same places.
        _cuda_generator(other).manual_seed(mix(seed, index))


def capture(device: torch.device) -> dict[str, Any]:
    torch_state, python_state, numpy_state = get_global_state()
    state: dict[str, Any] = {"torch": torch_state, "python": python_state, "numpy": numpy_state}
    if device.type == "cuda":
        state["cuda"] = _cuda_generator(device).get_state()
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to captured states; a state of a missing kind of device is ignored."""
    set_global_state((state["torch"], state["python"], state["numpy"]))
    if device.type == "cuda" and "cuda" in state:
        _cuda_generator(device).set_state(state["cuda"])


def state_dict(device: torch.device) -> dict[str, Any]:
    """Capture all generators in the values that a checkpoint holds: tensors, numbers and text."""
    state = capture(device)
    if state["numpy"] is not None:
        kind, keys, *rest = state["numpy"]
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def load_state_dict(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `state_dict` returned."""
    numpy_state = state["numpy"]
    restore({**state, "numpy": None if numpy_state is None else tuple(numpy_state)}, device)


def save(device: torch.device, others: Sequence[torch.device] = ()) -> tuple[Any, list[tuple[torch.Generator, Any]]]:
    """Return the state of the generators for `put_back`. `others`: see `other_gpus`."""
    if device.type == "cpu" and not others:  # without a frame for each list
        return host.copy_global_state(), []
    gpus = [_cuda_generator(gpu) for gpu in (device, *others) if gpu.type == "cuda"]
    return host.copy_global_state(), [(generator, generator.get_state()) for generator in gpus]


def put_back(saved: tuple[Any, list[tuple[torch.Generator, Any]]]) -> None:
    """Restore what `save` returned."""
    host.put_back(saved[0])
    for generator, state in saved[1]:
        generator.set_state(state)


@contextmanager
def set_aside(device: torch.device, others: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the generators after the body. `others`: see `other_gpus`."""
    saved = save(device, others)
    try:
        yield
    finally:
        put_back(saved)


def other_gpus(models: Iterable[nn.Module], device: torch.device) -> tuple[torch.device, ...]:
    """Return the GPUs other than `device` that hold a part of the models, in the order of their parts."""
    found = dict.fromkeys(p.device for model in models for p in model.parameters() if p.device.type == "cuda")
    return tuple(gpu for gpu in found if gpu != device)


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator
