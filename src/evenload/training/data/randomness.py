"""Random numbers that depend on the sample, not on the rank that reads it.

Every seed is a hash of plain integers: (seed, epoch, purpose, global position). It seeds the generators that datasets use
implicitly: torch's default CPU generator, `random`, and numpy's global one where numpy is imported.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import pickle
import random
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MASK = (1 << 64) - 1
_TWISTER_BYTES = 625 * 4
"""numpy's ``mt19937_state``: 624 words and the position."""

# Purposes of a seed, so that no two uses share one.
ORDER, DRAW, SAMPLE, COLLATE, WORKERS, STREAM, JOINT = range(7)


def mix(*parts: int) -> int:
    """Hash integers to 63 bits (the finalizer of splitmix64, Steele et al. 2014, over each part)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def reseed(seed: int) -> None:
    """Seed the global generators of all imported libraries; takes about 10 microseconds."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def get_global_state(*, legacy: bool = True) -> tuple[Any, ...]:
    """Return the states for `set_global_state`; `legacy`: numpy's as a tuple, which only its usual generator has."""
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy.random.get_state(legacy) if numpy else None


def set_global_state(state: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


def comparable_global_state() -> tuple[Any, ...]:
    """Return the global generators' states as values that are equal where nothing was drawn; takes about 30 microseconds."""
    state = get_global_state()
    return state[0].numpy().tobytes(), state[1], pickle.dumps(state[2])


def copy_global_state() -> tuple[Any, ...]:
    """Return the state for `put_back`: that of `get_global_state`, 100 microseconds faster where its memory is known."""
    global _memory
    numpy = sys.modules.get("numpy")
    twister = None if numpy is None else numpy.random.mtrand._rand._bit_generator
    if _memory is None or _memory[0] is not twister:
        _memory = twister, _find_memory(twister)
    if (views := _memory[1]) is None:
        return None, get_global_state(legacy=False)
    return _memory, [bytes(view) for view in views], random._inst.gauss_next  # type: ignore[attr-defined]


def put_back(state: tuple[Any, ...]) -> None:
    """Set the global generators to what `copy_global_state` returned."""
    if state[0] is None:
        set_global_state(state[1])
        return
    for view, value in zip(state[0][1], state[1], strict=True):
        view[:] = value
    random._inst.gauss_next = state[2]  # type: ignore[attr-defined]


_memory: tuple[Any, list[memoryview] | None] | None = None
"""numpy's global generator, and where the states of all generators lie, besides the deviate that Python's holds back."""


def _find_memory(twister: Any) -> list[memoryview] | None:
    """Return None where a state does not lie as expected, or numpy uses another kind of generator."""
    found = [_torch_memory(), _python_memory()]
    if twister is not None:
        is_known = type(twister).__name__ == "MT19937"
        found += [_memory_at(int(twister.ctypes.state_address)) if is_known else None, _deviate_memory()]
    known = [view for view in found if view is not None]
    return known if len(known) == len(found) else None


@functools.cache
def _torch_memory() -> memoryview | None:
    """Return the state of torch's default generator: the seed, the words, their position and deviates held back."""
    default: Any = torch.default_generator
    probe: Any = torch.Generator("cpu").manual_seed(1)
    # In the state behind the seed and three numbers, as 64 bits each.
    words = struct.pack("=624I", *struct.unpack_from("=624Q", probe.get_state().numpy().tobytes(), 24))
    # In memory behind the seed and three numbers of 32 bits; two deviates follow.
    head = bytes(_memory_at(probe._cdata, 160)).find(words[:16]) - 20
    if head < 0:
        return None
    memory = _memory_at(probe._cdata + head, 20 + len(words) + 28)
    if bytes(memory)[20 : 20 + len(words)] != words:
        return None
    states = []
    for _ in range(4):  # every second deviate was held back
        states.append((probe.get_state(), bytes(memory)))
        torch.randn((), generator=probe, device="cpu")
    probe.manual_seed(2)
    for state, content in states:
        memory[:] = content
        if not torch.equal(probe.get_state(), state):
            return None
    return _memory_at(default._cdata + head, len(memory))


@functools.cache
def _python_memory() -> memoryview | None:
    """Return the position and words of Python's generator; None where they don't lie behind the object's head."""
    generator, head = random._inst, object.__basicsize__
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < head + _TWISTER_BYTES:
        return None
    *words, position = generator.getstate()[1]
    memory = _memory_at(id(generator) + head)
    return memory if memory == struct.pack("=625I", position, *words) else None


@functools.cache
def _deviate_memory() -> memoryview | None:
    """Return where numpy holds a normal deviate back: whether there is one (32 bits, and 32 unused), and its value."""
    numpy = sys.modules["numpy"]
    own, probe = numpy.random.mtrand._rand, numpy.random.RandomState(1)
    if type(own) is not type(probe):
        return None
    probe.randn()
    held = probe.get_state()
    at = bytes(_memory_at(id(probe), type(probe).__basicsize__)).find(struct.pack("d", held[4])) - 8
    if at < 0:
        return None
    memory = _memory_at(id(probe) + at, 16)
    content = bytes(memory)
    probe.randn()
    is_taken, memory[:] = probe.get_state()[3] == 0, content
    return _memory_at(id(own) + at, 16) if is_taken and probe.get_state()[3:] == held[3:] else None


def _memory_at(address: int, num_bytes: int = _TWISTER_BYTES) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


@contextmanager
def forked() -> Iterator[None]:
    state = get_global_state()
    try:
        yield
    finally:
        set_global_state(state)


class IsolatedGenerators:
    """Separate global generators for code that runs in pieces, between other code that draws too."""

    def __init__(self, seed: int) -> None:
        with forked():
            reseed(seed)
            self._state = get_global_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from these generators in the body, continuing after the last body."""
        with forked():
            set_global_state(self._state)
            try:
                yield
            finally:
                self._state = get_global_state()


def find_generators(owners: Iterable[Any]) -> list[Any]:
    """Return the generators that objects hold as attributes, each once, in a fixed order."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found: dict[int, Any] = {}
    for owner in owners:
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, kinds):
                found.setdefault(id(value), value)
    return list(found.values())


def save_generators(generators: Iterable[Any]) -> tuple[str, ...]:
    """Return the states as text, so that a cursor holds plain values."""
    return tuple(base64.b64encode(pickle.dumps(_get(generator))).decode() for generator in generators)


def load_generators(generators: Iterable[Any], states: Iterable[str]) -> None:
    for generator, state in zip(generators, states, strict=True):
        _set(generator, pickle.loads(base64.b64decode(state)))


def seed_generators(generators: Iterable[Any], *parts: int) -> None:
    """Seed each generator by these integers and its place among the others."""
    for index, generator in enumerate(generators):
        seed = mix(*parts, index)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed & 0xFFFFFFFF)


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
