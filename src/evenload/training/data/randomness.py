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
_HAS_GAUSS = 3
"""Index in the tuple that `numpy.random.get_state` returns."""

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
    global _seeded_words
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
        _seeded_words = b"" if (memory := _twister_memory()) is None else bytes(memory)


def get_global_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy.random.get_state() if numpy else None


def set_global_state(state: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


def comparable_global_state() -> tuple[Any, ...]:
    """Return the global generators' states as values that are equal where nothing was drawn; takes about 30 microseconds."""
    state = get_global_state()
    return state[0].numpy().tobytes(), state[1], pickle.dumps(state[2])


class FastSaver:
    """Saves and restores the global generators between short pieces of code; equal to `get_global_state`, but 100 us faster.

    Python and numpy read and write their 624 words one by one. Here they are copied as memory, numpy's only if somebody drew
    since `restore`. A normal deviate that numpy holds back (`has_gauss`) lies elsewhere: where there is one, numpy's way is
    taken. Python's is an attribute.
    """

    def __init__(self) -> None:
        self._words = b""
        self._numpy_state: Any = None

    def save(self) -> tuple[Any, ...]:
        """Return the state for `restore`."""
        memory = _python_memory()
        python = random.getstate() if memory is None else (bytes(memory), random._inst.gauss_next)  # type: ignore[attr-defined]
        if (numpy := sys.modules.get("numpy")) is None:
            return torch.default_generator.get_state(), python, None
        twister, state = _twister_memory(), self._numpy_state
        words = b"" if twister is None else bytes(twister)  # compared by value, a view takes ten times as long
        if not words or state is None or words != self._words or state[_HAS_GAUSS]:
            self._words, self._numpy_state = words, numpy.random.get_state(legacy=bool(words))
        return torch.default_generator.get_state(), python, self._numpy_state

    def restore(self, state: tuple[Any, ...]) -> None:
        torch.default_generator.set_state(state[0])
        if (memory := _python_memory()) is None:
            random.setstate(state[1])
        else:
            memory[:], random._inst.gauss_next = state[1]  # type: ignore[attr-defined]
        if state[2] is None:
            return
        numpy = sys.modules["numpy"]
        memory = _twister_memory()
        if state[2] is not self._numpy_state or memory is None or state[2][_HAS_GAUSS]:
            numpy.random.set_state(state[2])
            return
        if bytes(memory) != _seeded_words:  # somebody drew since
            numpy.random.seed(0)  # forgets a deviate held back
        memory[:] = self._words


@functools.cache
def _python_memory() -> memoryview | None:
    """Return the position and words of Python's generator; None where they don't lie behind the object's head."""
    generator, head = random._inst, object.__basicsize__
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < head + _TWISTER_BYTES:
        return None
    *words, position = generator.getstate()[1]
    memory = _memory_at(id(generator) + head)
    return memory if memory == struct.pack("=625I", position, *words) else None


_twister: tuple[Any, memoryview | None] = (None, None)
"""numpy's global generator, and its words and position."""


_seeded_words = b""
"""Of numpy's generator, as the last `reseed` left it."""


def _twister_memory() -> memoryview | None:
    """Return the words and the position of numpy's global generator; None for another kind of generator."""
    global _twister
    generator = sys.modules["numpy"].random.mtrand._rand._bit_generator
    if _twister[0] is not generator:
        known = type(generator).__name__ == "MT19937"
        _twister = generator, _memory_at(int(generator.ctypes.state_address)) if known else None
    return _twister[1]


def _memory_at(address: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * _TWISTER_BYTES).from_address(address)).cast("B")


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
