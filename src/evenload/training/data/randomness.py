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
    global _seeded
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    _seeded = _read_words()


def is_as_seeded() -> bool:
    """Return whether nobody has drawn since `reseed`; False where that can't be seen."""
    return all(_seeded) and _read_words() == _seeded


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

    Python and numpy read and write their 624 words one by one. Here they are copied as memory; torch's and numpy's states are
    read only if somebody drew since the last `save`. A normal deviate that numpy holds back (`has_gauss`) lies elsewhere:
    where there is one, numpy's way is taken. Python's is an attribute.
    """

    def __init__(self) -> None:
        self.draws = False
        """True once code for which the generators were seeded, or should have been, has drawn from them."""
        self._words: tuple[bytes, ...] = (b"", b"", b"")
        """At the last `save`."""
        self._torch_state: Any = None
        self._numpy_state: Any = None
        self._saved: tuple[Any, ...] | None = None

    def save(self) -> tuple[Any, ...]:
        """Return the state for `restore`."""
        before, words = self._words, _read_words()
        torch_words, python_words, numpy_words = self._words = words
        if not torch_words or torch_words != before[0]:
            self._torch_state = torch.default_generator.get_state()
        python = (python_words, random._inst.gauss_next) if python_words else random.getstate()  # type: ignore[attr-defined]
        if (numpy := sys.modules.get("numpy")) is None:
            self._numpy_state = None
        elif (state := self._numpy_state) is None or not numpy_words or numpy_words != before[2] or state[_HAS_GAUSS]:
            self._numpy_state = numpy.random.get_state(legacy=bool(numpy_words))
        self._saved = self._torch_state, python, self._numpy_state
        return self._saved

    def is_as_saved(self, state: tuple[Any, ...]) -> bool:
        """Return whether nobody has drawn since the last `save`, which returned `state`; False where that can't be seen."""
        if state is not self._saved or not all(self._words) or state[2][_HAS_GAUSS]:
            return False
        return _read_words() == self._words and random._inst.gauss_next == state[1][1]  # type: ignore[attr-defined]

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
        if bytes(memory) != _seeded[2]:  # somebody drew since
            numpy.random.seed(0)  # forgets a deviate held back
        memory[:] = self._words[2]


def _read_words() -> tuple[bytes, bytes, bytes]:
    """Return what every draw changes in the generators of torch, Python and numpy; empty where that can't be read.

    It does not contain normal deviates that Python and numpy hold back. Compared by value, a view takes ten times as long.
    """
    numpy, (known, twister) = sys.modules.get("numpy"), _twister
    if numpy is not None and numpy.random.mtrand._rand._bit_generator is not known:
        twister = _twister_memory()
    torch_memory, python_memory = _torch_memory(), _python_memory()
    return (
        b"" if torch_memory is None else bytes(torch_memory[0]) + bytes(torch_memory[1]),
        b"" if python_memory is None else bytes(python_memory),
        b"" if twister is None else bytes(twister),
    )


@functools.cache
def _torch_memory() -> tuple[memoryview, memoryview] | None:
    """Return the position and words of torch's default generator, and whether each of two deviates is held back.

    None where they lie elsewhere. What lies between is left over from anything: padding, deviates that are not held back.
    """
    default: Any = torch.default_generator
    probe: Any = torch.Generator().manual_seed(1)
    # In the state behind the seed and three numbers, as 64 bits each.
    words = struct.pack("=624I", *struct.unpack_from("=624Q", probe.get_state().numpy().tobytes(), 24))
    # In memory behind the seed and three numbers of 32 bits; two deviates follow.
    head = bytes(_memory_at(probe._cdata, 160)).find(words[:16]) - 20
    if head < 0:
        return None

    def parts_of(address: int) -> tuple[memoryview, memoryview]:
        memory = _memory_at(address + head + 16, len(words) + 32)
        return memory[: 4 + len(words)], memory[len(words) + 12 :: 12]

    parts = parts_of(probe._cdata)
    is_found, seen = parts[0][4:] == words, {b"".join(map(bytes, parts))}
    for n in range(8):  # every second one was held back
        torch.randn((), generator=probe, dtype=(torch.float32, torch.float64)[n // 4])
        seen.add(b"".join(map(bytes, parts)))
    return parts_of(default._cdata) if is_found and len(seen) == 9 else None


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

_seeded: tuple[bytes, ...] = (b"", b"", b"")
"""Words of the generators, as the last `reseed` left them."""


def _twister_memory() -> memoryview | None:
    """Return the words and the position of numpy's global generator; None for another kind of generator."""
    global _twister
    generator = sys.modules["numpy"].random.mtrand._rand._bit_generator
    if _twister[0] is not generator:
        known = type(generator).__name__ == "MT19937"
        _twister = generator, _memory_at(int(generator.ctypes.state_address)) if known else None
    return _twister[1]


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
