"""Random numbers that depend on the sample, not on the rank that reads it.

Every seed is a hash of plain integers: (seed, epoch, purpose, global position). It seeds the generators that datasets use
implicitly: torch's default CPU generator, `random`, and numpy's global one where numpy is imported.
"""

from __future__ import annotations

import base64
import ctypes
import dis
import functools
import inspect
import pickle
import random
import struct
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

_MASK = (1 << 64) - 1
_TWISTER_BYTES = 625 * 4
"""numpy's ``mt19937_state``: 624 words and the position."""

_MAX_HELD = 32
"""Entries of a list, such as transforms; a longer one holds data."""

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


def reseed(seed: int, own: Sequence[Any] = ()) -> None:
    """Seed the global generators of all imported libraries, which takes about 10 microseconds, and those in `own`."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    if own:
        seed_generators(own, seed)


def get_global_state(*, legacy: bool = True) -> tuple[Any, ...]:
    """Return the states for `set_global_state`; `legacy`: numpy's as a tuple, which only its usual generator has."""
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy.random.get_state(legacy) if numpy else None


def set_global_state(state: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


def comparable_state(own: Sequence[Any]) -> tuple[Any, ...]:
    """Return the states of the global generators and of `own`, equal where nothing was drawn; takes about 30 microseconds."""
    state = get_global_state()
    return state[0].numpy().tobytes(), state[1], pickle.dumps([state[2], *map(_get, own)])


def copy_global_state() -> tuple[Any, ...]:
    """Return the state for `put_back`: that of `get_global_state`, 100 microseconds faster where its memory is known."""
    global _memory
    numpy = sys.modules.get("numpy")
    twister = None if numpy is None else numpy.random.mtrand._rand._bit_generator
    if _memory is None or _memory[0] is not twister:
        _memory = twister, _find_memory(twister)
    if (views := _memory[1]) is None:
        return None, get_global_state(legacy=False)
    return _memory, list(map(bytes, views)), random._inst.gauss_next  # type: ignore[attr-defined]


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
def forked(own: Sequence[Any] = ()) -> Iterator[None]:
    """Restore the global generators, and those in `own`, after the body."""
    state, own_states = get_global_state(), [_get(generator) for generator in own]
    try:
        yield
    finally:
        set_global_state(state)
        for generator, own_state in zip(own, own_states, strict=True):
            _set(generator, own_state)


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


def holders(value: Any, depth: int = 3, visited: dict[int, tuple[int, Any]] | None = None) -> Iterator[Any]:
    """Yield a value, what it holds, and what the names in its code stand for, down to a `depth`."""
    visited = {} if visited is None else visited
    if visited.get(id(value), (-1,))[0] >= depth:
        return
    visited[id(value)] = depth, value  # itself too, so that no other gets its id
    yield value
    held = [*_attributes(value).values()] if depth else []
    if depth and isinstance(value, list | tuple | dict) and len(value) <= _MAX_HELD:
        held += value.values() if isinstance(value, dict) else value
    elif depth and isinstance(value, functools.partial):
        held += (value.func, *value.args, *value.keywords.values())
    elif depth and isinstance(value, types.MethodType):
        held.append(value.__self__)
    for code in (value, *(vars(one).get(name) for one in type(value).__mro__ for name in ("__getitem__", "__call__"))):
        if depth and isinstance(code, types.FunctionType | types.MethodType):
            with suppress(ValueError):  # a name without a value yet
                names = inspect.getclosurevars(code)
                # Names of attributes are among them in some versions of Python.
                loaded = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
                variables = {name: one for name, one in names.globals.items() if name in loaded}
                held.append(types.SimpleNamespace(**variables, **names.nonlocals))
    for one in held:
        if not isinstance(one, type | types.ModuleType | torch.Tensor | str | int | float):
            yield from holders(one, depth - 1, visited)


def _attributes(value: Any) -> dict[str, Any]:
    with suppress(Exception):  # of an object with slots this is what its __getattr__ does
        if isinstance(found := value.__dict__, dict):
            return found
    return {}


def find_generators(owners: Iterable[Any]) -> list[Any]:
    """Return the generators that objects hold as attributes, each once, in a fixed order."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found: dict[int, Any] = {}
    for owner in owners:
        for value in _attributes(owner).values():
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
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
        elif hasattr(generator, "_bit_generator") and not _is_usual(generator):
            generator.set_state(type(generator._bit_generator)(seed).state)
        else:
            generator.seed(seed & 0xFFFFFFFF)


def _is_usual(generator: Any) -> bool:
    """Return whether a RandomState is of numpy's usual kind: no other has a seed, or a state as a tuple."""
    return type(generator._bit_generator).__name__ == "MT19937"


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=_is_usual(generator))


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
