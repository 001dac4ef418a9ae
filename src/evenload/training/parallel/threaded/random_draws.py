"""Random numbers of lanes: the CPU has one generator for the whole process, and each lane needs one of its own.

Note [Own draws]
  A lane on a GPU draws from that GPU's generator, and one lane on the CPU from the process's: as they are. Where several
  lanes are on the CPU each gets a generator, and an operation that draws is given it on its way to the kernel
  (`OwnDraws`). That costs some microseconds an operation, so it is switched on only once somebody has drawn; the attempt
  in which that is found is done again. The numbers are then those that a rank of ddp would draw, bit for bit.

Note [Saved states]
  Activation checkpointing asks torch for the generator's state and sets it again in the backward. While lanes compute,
  `torch.get_rng_state` and its like speak of the lane's own generator; another lane's state would give another dropout.

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
from evenload.training.parallel.threaded.replica_threads import Lane, here

_lock = threading.Lock()


class Draws:
    """The generators of the lanes of one process."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        on_cpu = [lane for lane in lanes if lane.device.type == "cpu"]
        self._shared = len(on_cpu) > 1
        for lane in lanes:
            # A lane on a GPU gets one for the states that checkpointing saves; it draws from the GPU's.
            lane.generator = torch.Generator() if self._shared or lane.device.type != "cpu" else None
        self.own = False
        """Whether lanes on the CPU draw from their own generators: somebody has drawn."""
        self._before: torch.Tensor | None = None

    def begin(self, *key: int) -> None:
        """An attempt begins: the generators of the process depend on the key alone."""
        reseed(mix(*key))
        self._before = torch.default_generator.get_state()

    def were_shared(self) -> bool:
        """After an attempt: whether lanes drew from one generator, so that it must be done again with their own."""
        if not self._shared or self.own or self._before is None:
            return False
        self.own = not torch.equal(self._before, torch.default_generator.get_state())
        return self.own

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While the body runs, saved and set states are each lane's own."""
        real = torch.default_generator
        vars(torch.random)["default_generator"] = _OfLane(real)
        try:
            yield
        finally:
            vars(torch.random)["default_generator"] = real

    def of(self, lane: Lane) -> contextlib.AbstractContextManager[Any]:
        """What a lane computes in."""
        if self.own and lane.device.type == "cpu" and lane.generator is not None:
            return OwnDraws(lane.generator)
        return contextlib.nullcontext()


def seed_lane(lane: Lane, *parts: int) -> None:
    """Seeds what the lane draws from by a hash of `parts`, as randomness.seed_all does for a rank."""
    seed = mix(*parts)
    (lane.generator or torch.default_generator).manual_seed(seed)
    if lane.device.type == "cuda":
        index = torch.cuda.current_device() if lane.device.index is None else lane.device.index
        torch.cuda.default_generators[index].manual_seed(seed)


class OwnDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, operations of this thread draw from one generator in place of the process's."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of an operation."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if _takes_generator(func):
            if kwargs.get("generator") is None:
                kwargs = {**kwargs, "generator": self._generator}
            return func(*args, **kwargs)
        real = torch.default_generator
        with _lock:
            kept = real.get_state()
            real.set_state(self._generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(real.get_state())
                real.set_state(kept)


@functools.cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


class _OfLane:
    """Stands for torch's default generator where its state is asked for: each lane's own, elsewhere the real one."""

    def __init__(self, real: torch.Generator) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Callable[..., Any]:
        lane = here()
        own = lane.generator if lane is not None else None
        found: Callable[..., Any] = getattr(self._real if own is None else own, name)
        return found
