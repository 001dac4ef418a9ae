"""Check every few steps that all ranks hold the same parameters and buffers; name those that differ.

docs/consistency.md says when, what is compared, and with which tolerance on devices of different kinds. A checksum is queued
before the forward, and its one number travels in the exchange of the backward; only a difference needs further collectives.
"""

from __future__ import annotations

import json
import math
import platform
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evenload.errors import DivergenceError
from evenload.hardware import cpu_model
from evenload.training.comm.control import Control, Operation
from evenload.training.compute.checksums import QueuedScalars, QueuedSketches, checksum, fold, queue_checksums, sketch

DRIFT_EPS = 1000.0
"""Rounding errors by which different devices may differ, relative to a tensor's norm: sqrt(10^6 steps)."""
_MOST_TOLERANCE = 0.5
_FLOOR = 0.1
"""Fraction of the model's usual value used where a tensor's own values are smaller: they may have been larger before."""
_MAX_NAMED = 5
_MAX_IN_EVENT = 50

_PARAMETER_CAUSES = (
    "Usual causes for a parameter: weights loaded, reset or changed on one rank only (under `if run.is_main:`); a different "
    "optimizer, learning rate or optimizer state on one rank; random numbers from a generator of the rank's own; a "
    "gradient or statistic that a hook or a Function makes of this rank's samples (sum it with run.reduce); a faulty device."
)
_BUFFER_CAUSES = (
    "Usual causes for a buffer: a module that updates it from its own rank's samples (running statistics, a codebook, a "
    "queue): set it from the whole batch (docs/contrastive.md#state-that-follows-the-batch), or register it with "
    "persistent=False if it may differ. Or a forward in training mode outside step.backward (validation, or a GAN's pictures "
    "under `if run.is_main:`): call model.eval() before, or let all ranks compute the same."
)

RecordEvent = Callable[..., None]
"""Records an event: kind, message, step, fields."""


State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _QueuedCheck:
    """Numbers that a rank computes of its state for one comparison."""

    step: int
    state: State
    sketches: QueuedSketches | None
    """Of ranks on unlike devices; otherwise their checksums are compared first."""
    checksums: QueuedScalars | None

    def read(self) -> tuple[float, list[tuple[float, float]]]:
        """Return the key that is compared, and the sketches."""
        if self.sketches is not None:
            found = self.sketches.read()
            return fold([zlib.crc32(repr(found).encode())]), found
        return fold(self.checksums.read() if self.checksums is not None else []), []


class Consistency:
    """Compares the state of all ranks every `every` steps, or never if 0; see docs/consistency.md.

    Note [One step later on GPUs]
      A number that a GPU computes is read in the step after, when it is there already: reading it at once would wait for all
      that is queued before it. All ranks do so as soon as one has a GPU, so that their keys are of the same step.
    """

    def __init__(self, every: int, control: Control, record_event: RecordEvent) -> None:
        self.every = every
        self._control = control
        self._record_event = record_event
        self._fingerprint: Callable[[], State] = dict
        self._queued: list[_QueuedCheck] = []
        """The comparison to read in this step, and the one to read in the next."""
        self._is_late = False
        """See Note [One step later on GPUs]."""
        self._is_unlike = False
        """The ranks are on unlike devices, whose checksums differ without an error."""
        self._compared: _QueuedCheck | None = None
        self._sketches: list[tuple[float, float]] = []
        self._key = 0.0
        self._last_step = -1
        self._num_queued = 0  # since `attach`
        self._last_good = -1
        self._norms: dict[str, dict[int, float]] = {}
        self._ranks: tuple[int, ...] = ()

    def attach(self, fingerprint: Callable[[], State]) -> None:
        """Compare what `fingerprint` returns: the tensors that must be equal on all ranks, by name. All ranks call it."""
        self._fingerprint = fingerprint
        self._last_step = self._last_good = -1
        self._num_queued = 0
        self._queued.clear()
        if self.every > 0:
            on_gpu = any(tensor.device.type != "cpu" for tensor in fingerprint().values())
            self._is_late = any(row[0] for row in self._control.exchange(Operation.PREPARE, [float(on_gpu)]))

    def begin(self, step: int, *, first_call: bool, ranks: Sequence[int], takes_part: bool = True) -> None:
        """Queue a comparison of `ranks` before the first backward of a step, if one is due. All ranks call it."""
        self._compared, self._key, self._sketches = None, 0.0, []
        self._ranks = tuple(ranks)
        if not first_call or len(ranks) == 1 or not takes_part:
            return
        due = [q for q in self._queued if not self._is_late or q.step < step] if self._queued else []
        # The first step of a session is checked too, where the loaded state may differ, and the second: what a forward sets.
        if self.every > 0 and step != self._last_step and (self._num_queued < 2 or step % self.every == 0):
            self._last_step = step
            self._num_queued += 1
            queued = self._queue(step)
            due, self._queued = (due, [queued]) if self._is_late else ([queued], [])
        elif due:
            self._queued = [queued for queued in self._queued if queued not in due]
        self._compared = due[0] if due else None

    def _queue(self, step: int) -> _QueuedCheck:
        state = self._fingerprint()
        if self._is_unlike:
            return _QueuedCheck(step, state, QueuedSketches(state.values()), None)
        return _QueuedCheck(step, state, None, QueuedScalars(queue_checksums(state.values())))

    def key(self) -> float:
        """Return this rank's key for the exchange; 0 if no comparison is due."""
        if self._compared is not None and not self._key:
            self._key, self._sketches = self._compared.read()
        return self._key

    def check(self, step: int, keys: Sequence[float]) -> None:
        """Compare the keys of all ranks that compute; if their state differs, record an event and raise DivergenceError.

        All ranks call it, and it raises on all of them.
        """
        if not all(keys):
            return  # none is due, or not on a rank that has just joined
        compared = self._compared or _QueuedCheck(step, self._fingerprint(), None, None)
        if len(set(keys)) == 1 or not (found := self._find_differences(compared)):
            self._last_good = compared.step
            return
        message, fields = self._describe(found, compared.step, len(keys))
        self._record_event("divergence", message, step=step, **fields)
        raise DivergenceError(message)

    def _find_differences(self, compared: _QueuedCheck) -> dict[str, tuple[int, ...]]:
        """Return the tensors that differ, each with its ranks; all ranks call it and get the same result."""
        state = compared.state
        shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()}
        structure = float(zlib.crc32(repr(list(shapes.items())).encode()))
        rows = self._exchange([structure, float(zlib.crc32(repr(_kinds(state.values())).encode()))])
        if len({row[0] for row in rows}) > 1:
            return self._compare_structure(shapes)
        same_kind = len({row[1] for row in rows}) == 1
        self._is_unlike = not same_kind
        if same_kind:
            own = [(checksum(tensor), sketch(tensor)[1]) for tensor in state.values()]
        else:
            own = self._sketches or QueuedSketches(state.values()).read()
        table = self._exchange([number for pair in own for number in pair])
        marks = {name: [(row[2 * i], row[2 * i + 1]) for row in table] for i, name in enumerate(state)}
        self._norms = {
            name: {rank: norm for rank, (_, norm) in zip(self._ranks, pairs, strict=True)}
            for name, pairs in marks.items()
        }
        found = disagreements(marks, None if same_kind else tolerances(state, marks))
        return {name: tuple(self._ranks[index] for index in indices) for name, indices in found.items()}

    def _compare_structure(self, shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        everyone = [
            json.loads(text) for text in self._exchange_texts(json.dumps({k: repr(v) for k, v in shapes.items()}))
        ]
        self._norms = {}
        names = dict.fromkeys(name for one in everyone for name in one)
        marks = {name: [(float(zlib.crc32(str(one.get(name)).encode())), 0.0) for one in everyone] for name in names}
        return disagreements(marks, None)

    def _describe(self, found: Mapping[str, tuple[int, ...]], step: int, world_size: int) -> tuple[str, dict[str, Any]]:
        ranks = sorted({rank for outside in found.values() for rank in outside})
        state = self._fingerprint()
        named = [self._name(name, outside, state) for name, outside in list(found.items())[:_MAX_NAMED]]
        more = f", and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        if world_size == 2:
            subject = "ranks 0 and 1 no longer hold the same model"
        else:
            subject = (
                f"{_ranks(ranks)} no longer {'holds' if len(ranks) == 1 else 'hold'} the same model as the other ranks"
            )
        since = f"all were equal at step {self._last_good}" if self._last_good >= 0 else "not compared before"
        kinds = {isinstance(state.get(name), nn.Parameter) for name in found}
        causes = " ".join(text for kind, text in ((True, _PARAMETER_CAUSES), (False, _BUFFER_CAUSES)) if kind in kinds)
        message = (
            f"{subject}: at step {step} ({since}) {len(found)} of {len(state)} parameters and buffers "
            f"{'differs' if len(found) == 1 else 'differ'}: {', '.join(named)}{more}. {causes}"
        )
        return message, {"ranks": ranks, "tensors": list(found)[:_MAX_IN_EVENT], "num_tensors": len(found)}

    def _name(self, name: str, outside: tuple[int, ...], state: Mapping[str, torch.Tensor]) -> str:
        """``parameter fc.weight (norm 3.841 on rank 0, 3.842 on rank 1)``."""
        kind = "parameter" if isinstance(state.get(name), nn.Parameter) else "buffer"
        norms = self._norms.get(name)
        if norms is None:
            return f"{kind} {name} (different shape or dtype, or missing, on {_ranks(outside)})"
        reference = next(rank for rank in norms if rank not in outside)
        spelled = {rank: f"{norms[rank]:.6g}" for rank in (reference, *outside[:3])}
        if len(set(spelled.values())) == 1:
            return f"{kind} {name} (norm {spelled[reference]} on all ranks, different bits)"
        return f"{kind} {name} (norm {', '.join(f'{norm} on rank {rank}' for rank, norm in spelled.items())})"

    def _exchange(self, values: Sequence[float]) -> list[list[float]]:
        rows = self._control.exchange(Operation.BACKWARD, values)
        return [rows[rank] for rank in self._ranks]

    def _exchange_texts(self, text: str) -> list[str]:
        # One byte per number: this happens once, before an error.
        data = text.encode()
        length = max(int(row[0]) for row in self._exchange([float(len(data))]))
        rows = self._exchange([float(byte) for byte in data.ljust(length)])
        return [bytes(int(number) for number in row).decode().rstrip() for row in rows]


def disagreements(
    marks: Mapping[str, Sequence[tuple[float, float]]], tolerance: Mapping[str, float] | None
) -> dict[str, tuple[int, ...]]:
    """Return the tensors on which ranks disagree, each with the ranks outside of the majority.

    `marks` holds each rank's (checksum or projection, norm); without `tolerance` the first are compared exactly.
    """
    found = {}
    for name, pairs in marks.items():
        if len(set(pairs)) == 1:
            continue
        allowed = None if tolerance is None else tolerance[name]
        table = [[_agree(a, b, allowed) for b in pairs] for a in pairs]
        reference = max(range(len(pairs)), key=lambda rank: (sum(table[rank]), -rank))
        outside = tuple(rank for rank in range(len(pairs)) if not table[reference][rank])
        if outside:
            found[name] = outside
    return found


def tolerances(
    state: Mapping[str, torch.Tensor], marks: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, float]:
    """Return the allowed difference of each tensor's sketches on different devices; the same on all ranks."""
    norms = {
        name: max((norm for _, norm in pairs if math.isfinite(norm)), default=0.0) for name, pairs in marks.items()
    }
    num_values = sum(tensor.numel() for tensor in state.values() if tensor.is_floating_point())
    usual = math.sqrt(sum(norm * norm for norm in norms.values()) / max(1, num_values))
    found = {}
    for name, tensor in state.items():
        inexact = tensor.is_floating_point() or tensor.is_complex()
        part = min(_MOST_TOLERANCE, DRIFT_EPS * torch.finfo(tensor.dtype).eps) if inexact else 0.0
        found[name] = part * (norms[name] + _FLOOR * usual * math.sqrt(tensor.numel()))
    return found


def _agree(a: tuple[float, float], b: tuple[float, float], allowed: float | None) -> bool:
    if allowed is None:
        return a[0] == b[0]
    for x, y in zip(a, b, strict=True):
        if math.isfinite(x) != math.isfinite(y):
            return False
        if math.isfinite(x) and abs(x - y) > allowed:
            return False
    return True


def _kinds(tensors: Collection[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Return the kind of device of each tensor: ranks with equal lists compute the same bits."""
    known = {device: _kind(device) for device in {tensor.device for tensor in tensors}}
    return [known[tensor.device] for tensor in tensors]


def _kind(device: torch.device) -> tuple[Any, ...]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        built = torch.version.cuda or torch.version.hip
        return (torch.__version__, built, found.name, found.major, found.minor, found.multi_processor_count)
    return (
        torch.__version__,
        platform.machine(),
        cpu_model(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
