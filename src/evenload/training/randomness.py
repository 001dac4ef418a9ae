"""Randomness of a step: keyed, so that the same samples can be computed again, and kept apart from the user's.

Inside loss_fn each rank draws from its own stream, a function of (seed, step, call, micro-batch, rank); outside, the
generators are as the user left them, equal on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def key_of(*parts: int) -> int:
    """Mixes integers into one seed below 2^63 (SplitMix64, Steele et al. 2014), different for different parts."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@contextmanager
def set_aside(device: torch.device) -> Iterator[None]:
    """Whatever the body draws or seeds, the generators are afterwards as they were before."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


def seed_all(key: int, device: torch.device) -> None:
    """Seeds torch's generators of the CPU and `device`, numpy's and Python's."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        _cuda_generator(device).manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def capture(device: torch.device) -> dict[str, Any]:
    """The states of all generators."""
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = _cuda_generator(device).get_state()
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Sets all generators to captured states; a state of a kind of device that isn't here is left out."""
    torch.default_generator.set_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        _cuda_generator(device).set_state(state["cuda"])


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator
