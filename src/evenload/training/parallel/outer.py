"""The outer step of islands: from the weights that each island reached to the next synchronised ones.

For island i with U_i units of loss weight since the last synchronisation (DESIGN 3.4: units, not samples), with the
synchronised weights θ, an island's own weights θ_i, learning rate η and momentum μ of the outer step:

    Δ = Σ U_i (θ - θ_i) / Σ U_i          the pseudo-gradient
    v ← μ v + Δ                          v begins with 0
    θ ← θ - η (Δ + μ v)                  Nesterov's step, as `torch.optim.SGD(nesterov=True)`

η = 1, μ = 0 is the average of the islands' weights: local SGD (Stich, arXiv:1805.09767). DiLoCo (Douillard et al.,
arXiv:2311.08105) has η = 0.7, μ = 0.9. Floating-point buffers, such as BatchNorm's running statistics, are averaged.

Note [Fragments]
  With P fragments each is sent at a time of its own (Streaming DiLoCo, arXiv:2501.18512), and its sum is used when the next
  fragment is sent. Meanwhile the island goes on: with θ_i as sent and θ_i' as it is when the sum is used, θ_i' becomes
  θ + (θ_i' - θ_i). So the steps in between stay, and count in the next pseudo-gradient (delayed averaging, DaSGD,
  arXiv:2006.00441). Streaming DiLoCo mixes both by a factor α instead, and torchft's default drops these steps (α = 0).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evenload.balance.wire_bytes import GradientSize, sent_bytes
from evenload.errors import NonFiniteError, StepError
from evenload.training.comm.islands import IslandLink
from evenload.training.comm.pending import Pending
from evenload.training.parallel.wire.outer_wire import OuterSum, OuterWire, outer_size


@dataclass
class Fragment:
    """Tensors that synchronise together."""

    names: list[str]
    tensors: list[torch.Tensor]
    num_trained: int
    """The first ones are parameters, which take the outer step; buffers after them are averaged."""
    start: list[torch.Tensor] = field(default_factory=list)
    """The synchronised values."""
    momentum: list[torch.Tensor] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)
    """Values as they were sent, while a sum is in progress."""
    sums: list[OuterSum] = field(default_factory=list)
    """In progress."""
    units_before: float = 0.0
    """Units of this island when the fragment was sent last."""


class OuterState:
    """The synchronised weights, and the outer optimizer. Equal on all ranks between two synchronisations."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        link: IslandLink,
        *,
        lr: float,
        momentum: float,
        num_fragments: int,
        wire: OuterWire | None = None,
    ) -> None:
        """`wire` sums pseudo-gradients in another format than their own; buffers travel as they are."""
        self._link, self._wire = link, wire
        self._lr, self._momentum = lr, momentum
        self.fragments = cut(models, num_fragments)
        self._last = max((index for index, one in enumerate(self.fragments) if one.tensors), default=0)
        frozen = (item for model in models for item in model.named_parameters() if not item[1].requires_grad)
        self._frozen = [(name, param, param._version) for name, param in frozen]
        self._own: list[list[torch.Tensor]] = []
        """This island's values while the synchronised ones are shown."""
        self.num_bytes = 0.0
        """Bytes that this island has sent for sums."""
        self.difference: float | None = None
        """About ‖Δg‖/‖g‖ of the first sum with a wire, on the first rank of each island."""
        for fragment in self.fragments:
            fragment.start = [tensor.detach().clone() for tensor in fragment.tensors]
            if momentum:
                fragment.momentum = [torch.zeros_like(tensor) for tensor in fragment.start[: fragment.num_trained]]

    def check_frozen(self) -> None:
        """Raise StepError if a parameter that was frozen when training began has changed: islands would keep their own."""
        for name, param, version in self._frozen:
            if param.requires_grad or param._version != version:
                raise StepError(
                    f"strategy local synchronises the parameters that are trained in the first step; {name} was frozen then, and "
                    "was changed or unfrozen later. Unfreeze it before the loop; average weights outside of prepared models"
                )

    @torch.no_grad()
    def send(self, index: int, units: float) -> None:
        """Begin to sum a fragment over the islands; `units` counts those of this island since the run began."""
        fragment = self.fragments[index]
        own, fragment.units_before = units - fragment.units_before, units
        fragment.sent = [tensor.detach().clone() for tensor in fragment.tensors]
        for places in self._by_kind(fragment):
            kind = torch.float64 if fragment.tensors[places[0]].dtype == torch.float64 else torch.float32
            parts = [(fragment.start[place].to(kind) - fragment.sent[place].to(kind)).flatten() for place in places]
            # The units travel behind the values that they weight.
            memory = torch.cat([*parts, parts[0].new_ones(1)]).mul_(own)
            tensors = [fragment.tensors[place] for place in places]
            if self._wire is None or places[0] >= fragment.num_trained:
                fragment.sums.append(OuterSum(memory, places, self._link.sum_async(memory)))
            else:
                fragment.sums.append(
                    self._wire.start([fragment.names[place] for place in places], tensors, places, memory)
                )
            name = "fp32" if self._wire is None or places[0] >= fragment.num_trained else self._wire.name
            self.num_bytes += sent_bytes(name, outer_size(tensors), self._link.num_islands)

    @torch.no_grad()
    def take(self, index: int) -> None:
        """Wait for the sum of a fragment, and make the outer step; nothing if none is in progress. All ranks call it.

        Raises:
            NonFiniteError: some island's weights are not finite.
        """
        fragment = self.fragments[index]
        sums, fragment.sums = fragment.sums, []
        for one in sums:
            one.wait()
            memory, places = one.memory, one.places
            self._link.pass_on(memory)
            *values, units = torch.split(memory, [*(fragment.tensors[place].numel() for place in places), 1])
            if not float(units):
                continue  # no island has made a finite step
            # Only a sum can overflow where all are finite, and it takes an eighth of the time.
            if not (math.isfinite(float(memory.sum())) or bool(memory.isfinite().all())):
                raise NonFiniteError(
                    "the weights of an island were NaN or infinite at a synchronisation; look at the learning rate, and at "
                    "outer_lr and outer_momentum"
                )
            if self._wire is not None:
                self._wire.settle(one, float(units))
            memory[:-1].div_(units)
            for place, delta in zip(places, values, strict=True):
                self._step(fragment, place, delta.view_as(fragment.start[place]))
        fragment.sent = []
        if sums and self._wire is not None and self.difference is None and index == self._last:
            self.difference = self._wire.difference()

    def _by_kind(self, fragment: Fragment) -> list[list[int]]:
        """Return the places of tensors that travel in one memory: float64 apart from the rest, each device by itself."""
        found: dict[tuple[bool, torch.device, bool], list[int]] = {}
        for place, tensor in enumerate(fragment.tensors):
            is_apart = self._wire is not None and place >= fragment.num_trained
            found.setdefault((tensor.dtype == torch.float64, tensor.device, is_apart), []).append(place)
        return list(found.values())

    def _step(self, fragment: Fragment, place: int, delta: torch.Tensor) -> None:
        start, tensor, sent = fragment.start[place], fragment.tensors[place], fragment.sent[place]
        delta = delta.to(start.dtype)
        if place >= fragment.num_trained:
            start.sub_(delta)
        elif fragment.momentum:
            velocity = fragment.momentum[place].mul_(self._momentum).add_(delta)
            start.sub_(delta.add(velocity, alpha=self._momentum), alpha=self._lr)
        else:
            start.sub_(delta, alpha=self._lr)
        now = tensor.detach()
        # Where nothing was computed meanwhile, all islands hold the same bits.
        now.copy_(start if torch.equal(now, sent) else start + (now - sent))

    def synchronise(self, units: float) -> None:
        """Take what is in progress, then synchronise every fragment at once. All ranks call it."""
        for index in range(len(self.fragments)):
            self.take(index)
        for index in range(len(self.fragments)):
            self.send(index, units)
            self.take(index)

    @torch.no_grad()
    def show(self) -> None:
        """Put the synchronised weights into the models until `hide`."""
        if not self._own:
            self._own = [[tensor.detach().clone() for tensor in one.tensors] for one in self.fragments]
            for fragment in self.fragments:
                _copy(fragment.start, fragment.tensors)

    @torch.no_grad()
    def hide(self) -> None:
        """Put this island's own weights back."""
        own, self._own = self._own, []
        for fragment, values in zip(self.fragments, own, strict=False):
            _copy(values, fragment.tensors)

    @property
    def payload(self) -> GradientSize:
        """Size of all parameters that travel in the format of the wire."""
        return outer_size([tensor for one in self.fragments for tensor in one.tensors[: one.num_trained]])

    def gather(self) -> None:
        """Move the errors of the wire to rank 0, so that its `state_dict` holds all. All ranks call it; no sum is in progress."""
        if self._wire is not None:
            self._wire.gather(
                {
                    n: t
                    for one in self.fragments
                    for n, t in zip(one.names[: one.num_trained], one.tensors, strict=False)
                }
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum by name, if there is one, and the wire's state. It does not depend on islands or fragments."""
        momentum = {name: value for one in self.fragments for name, value in zip(one.names, one.momentum, strict=False)}
        return momentum if self._wire is None else momentum | {"wire": self._wire.state_dict()}

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the momentum of `state_dict`, where names and shapes fit; others begin with 0."""
        if self._wire is not None and "wire" in state:
            self._wire.load_state_dict(state["wire"])
        for fragment in self.fragments:
            for name, value in zip(fragment.names, fragment.momentum, strict=False):
                if name in state and state[name].shape == value.shape:
                    value.copy_(state[name])


class _NoLink(IslandLink):
    def __init__(self) -> None:
        self.num_islands = 1

    def sum_async(self, tensor: torch.Tensor) -> Pending:
        return Pending(None, blocking=False)

    def pass_on(self, tensor: torch.Tensor) -> None:
        pass


def outer_seconds(device: torch.device) -> float:
    """Return the seconds for a value that an island computes at a synchronisation, from the second of two without a link."""
    outer = OuterState([nn.Linear(1024, 1024, device=device)], _NoLink(), lr=1.0, momentum=0.0, num_fragments=1)
    for units in (1.0, 2.0):
        began_s = time.perf_counter()
        outer.synchronise(units)  # reads the units from the device last
        seconds = time.perf_counter() - began_s
    return seconds / outer.payload.num_values


def cut(models: Sequence[nn.Module], num_fragments: int) -> list[Fragment]:
    """Cut trainable parameters, in order of registration, into fragments of about equal size; buffers go with the last."""
    trained: dict[str, torch.Tensor] = {}
    averaged: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, model in enumerate(models):
        for name, tensor in _tensors_of(model):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                # An imaginary part is a value like others.
                values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
                (trained if isinstance(tensor, nn.Parameter) else averaged)[f"{prefix}.{name}"] = values
    size = sum(tensor.nbytes for tensor in trained.values()) / num_fragments
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num_fragments)]
    before = 0
    for name, tensor in trained.items():
        # By its middle, so that no fragment depends on where a tensor begins.
        parts[min(num_fragments - 1, int((before + tensor.nbytes / 2) / max(size, 1e-9)))][name] = tensor
        before += tensor.nbytes
    numbers = [len(part) for part in parts]
    parts[-1] |= averaged
    return [Fragment(list(part), list(part.values()), number) for part, number in zip(parts, numbers, strict=True)]


def _copy(values: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    if values:  # a fragment beside a large parameter may hold none
        torch._foreach_copy_([tensor.detach() for tensor in tensors], values)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, param) for name, param in model.named_parameters() if param.requires_grad)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield name, buffer
