"""Random generators of replicas: the CPU has one for the whole process, and each replica needs its own.

Note [Separate generators]
  A replica on a GPU draws from that GPU's generator, and a single replica on the CPU from the process's. Where several
  replicas are on the CPU each gets a generator, which `GeneratorMode` passes to every operation that draws. That costs some
  microseconds per operation, so it starts only once an attempt has drawn; that attempt is redone. The numbers are then those
  that a rank of ddp would draw, bit for bit.

Note [Saved states]
  Activation checkpointing saves the generator's state and sets it again in the backward. While replicas compute,
  `torch.get_rng_state` and related functions use the replica's own generator; another state would give another dropout.

`random` and numpy have one state for all threads: what loss_fn draws from them is equal in distribution only.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.random
from torch.utils._python_dispatch import TorchDispatchMode

from evenload.training.data.randomness import mix, reseed
from evenload.training.parallel.threaded.replica_threads import ReplicaThread, current_replica

_lock = threading.Lock()


class ReplicaGenerators:
    """The generators of the replicas of one process."""

    def __init__(self, threads: Sequence[ReplicaThread]) -> None:
        self._threads = tuple(threads)
        self._shared = sum(thread.device.type == "cpu" for thread in threads) > 1
        for thread in threads:
            # A replica on a GPU gets one for the states that checkpointing saves; it draws from the GPU's.
            thread.generator = torch.Generator() if self._shared or thread.device.type != "cpu" else None
        self.separate = False
        """True once replicas on the CPU draw from their own generators."""
        self._before: torch.Tensor | None = None

    def begin(self, *key: int) -> None:
        """Begin an attempt: seed the generators of the process by the key."""
        reseed(mix(*key))
        self._before = torch.default_generator.get_state()

    def must_separate(self) -> bool:
        """Return True after an attempt in which replicas drew from one generator, so that it must be redone."""
        if not self._shared or self.separate or self._before is None:
            return False
        self.separate = not torch.equal(self._before, torch.default_generator.get_state())
        return self.separate

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        real = torch.default_generator
        vars(torch.random)["default_generator"] = _CurrentGenerator(real)
        try:
            yield
        finally:
            vars(torch.random)["default_generator"] = real

    def mode_of(self, thread: ReplicaThread) -> contextlib.AbstractContextManager[Any]:
        if self.separate and thread.device.type == "cpu" and thread.generator is not None:
            return GeneratorMode(thread.generator)
        return contextlib.nullcontext()


def seed_replica(thread: ReplicaThread, *parts: int) -> None:
    """Seed the replica's generators by a hash of `parts`, as randomness.seed_all does for a rank."""
    seed = mix(*parts)
    (thread.generator or torch.default_generator).manual_seed(seed)
    if thread.device.type == "cuda":
        index = torch.cuda.current_device() if thread.device.index is None else thread.device.index
        torch.cuda.default_generators[index].manual_seed(seed)


class GeneratorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let operations of this thread draw from one generator in place of the process's."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if _takes_generator(func):
            if kwargs.get("generator") is None:
                kwargs = {**kwargs, "generator": self._generator}
            return func(*args, **kwargs)
        real = torch.default_generator
        with _lock:
            saved = real.get_state()
            real.set_state(self._generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(real.get_state())
                real.set_state(saved)


@functools.cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


class _CurrentGenerator:
    """A proxy of torch's default generator that leads each replica thread to its own."""

    def __init__(self, real: torch.Generator) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Callable[..., Any]:
        thread = current_replica()
        own = thread.generator if thread is not None else None
        found: Callable[..., Any] = getattr(self._real if own is None else own, name)
        return found
