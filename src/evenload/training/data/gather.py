"""Gather values of unequal length from all ranks, in the order of `run.batches`: `run.gather`; reduce inside its loops.

Note [Order of gathered values]
  `run.batches` cuts each round over the ranks, so the ranks' parts of one round, joined by rank, are in the loader's order. The
  parts of all rounds are not: each rank has a part of every round. A rank whose value has as many samples as it received from
  the newest `run.batches` sends the positions of its parts; where all ranks do, the parts are put back in the loader's order.
  Every other value is joined by rank.

Note [Ranks without batches]
  A rank with a share of 0 has no batches, so it never reaches a gather inside the loop. It takes part from wherever it waits
  next, with nothing of its own: see `Control.join_gathers`. The same holds for a sum inside the loop, which is over the ranks
  that have a batch: their values are gathered, and each adds them up.
"""

from __future__ import annotations

import itertools
import operator
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenload.errors import ConfigError, DesyncError, PeerLostError, StepError
from evenload.training.comm import collect
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.groups import Groups
from evenload.training.comm.subset import Subset


class EvaluationParts:
    """This rank's parts of the newest `run.batches`, in the order of its rounds."""

    def __init__(self) -> None:
        self.without_batches: frozenset[str] = frozenset()
        """The workers that have no batches in the loop, or none any more."""
        self._batch_sizes: list[int] = []
        """Samples of each batch that this rank has received in the loop."""
        self._gathers = (0, 0)
        """Number of batches at the last gather inside the loop, and at the last one of an earlier batch."""
        self.sizes: list[int] = []
        self.starts: list[int] = []
        """Position of the first sample of each part, in the loader's order."""
        self._is_running = False
        self._gathered: set[tuple[str, int]] = set()

    def begin(self, without_batches: Collection[str]) -> None:
        self.sizes, self.starts, self._batch_sizes, self._gathers, self._gathered = [], [], [], (0, 0), set()
        self._is_running = True
        self.go_on(without_batches)

    def go_on(self, without_batches: Collection[str]) -> None:
        """Continue the loop with the batches of ranks that were lost in it."""
        self.without_batches = frozenset(without_batches)

    def add(self, spans: Sequence[tuple[int, int]]) -> None:
        """Add a batch: the spans of its positions in the loader's order."""
        self._batch_sizes.append(sum(high - low for low, high in spans))
        for low, high in spans:
            self.sizes.append(high - low)
            self.starts.append(low)

    def batches_of(self, num_samples: int) -> tuple[int, int]:
        """Return the first and last batch that a gather of so many samples joins: since the last gather, or all, or one."""
        newest = len(self._batch_sizes)
        since = self._gathers[self._gathers[0] == newest]
        return next((low + 1 for low in (since, 0) if sum(self._batch_sizes[low:]) == num_samples), newest), newest

    def note_gather(self, batches: Mapping[str, tuple[int, int]]) -> None:
        """Note a gather inside the loop: each worker's batches from the first to the last of these are not lost with it.

        All ranks note it, also those without batches, so that they agree on what a lost rank leaves.
        """
        self._gathered |= {
            (worker, number) for worker, (low, high) in batches.items() for number in range(low, high + 1)
        }
        if self._gathers[0] != (newest := len(self._batch_sizes)):
            self._gathers = newest, self._gathers[0]

    def was_gathered(self, worker: str, number: int) -> bool:
        """Return whether a worker's batch of this number was gathered inside the loop."""
        return (worker, number) in self._gathered

    def end(self) -> None:
        self._is_running = False

    @property
    def is_inside(self) -> bool:
        """True inside the body of a loop over `run.batches`."""
        return self._is_running and bool(self.sizes)

    @property
    def are_for_some(self) -> bool:
        """True inside a loop in which other ranks have no batches: what is called there is not for them."""
        return self.is_inside and bool(self.without_batches)


def follow_evaluation(groups: Groups, control: Control) -> EvaluationParts:
    """Return the parts of the newest `run.batches`; see Note [Ranks without batches]."""
    parts = EvaluationParts()

    def without_batches() -> list[int]:
        without = parts.without_batches
        return [rank for rank, worker in enumerate(groups.membership.workers) if worker in without] if without else []

    def send_nothing(table: NDArray[np.float64]) -> Callable[[], None]:
        _exchange_bytes(b"", [int(length) for length in table[:, 0]], groups)
        batches = _batches_of(table, groups)
        return lambda: parts.note_gather(batches)

    control.join_gathers(without_batches, send_nothing)
    return parts


def _batches_of(table: NDArray[np.float64], groups: Groups) -> dict[str, tuple[int, int]]:
    """Return by worker the batches that each rank sent, as long as the groups are those in which it was sent."""
    return {w: (int(row[1]), int(row[2])) for w, row in zip(groups.membership.workers, table, strict=False) if row[2]}


@dataclass(frozen=True)
class _TensorPart:
    """A tensor of one rank, as it travels."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> torch.Tensor:
        flat = (
            torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
            if self.data
            else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class _Sent:
    """The values that one rank sends."""

    outline: str
    leaves: list[Any]
    sizes: list[int]
    """Sizes of the rank's parts of all rounds, if its value has that many samples; otherwise empty."""
    starts: list[int]
    """Their positions in the loader's order."""


def gather_values(value: Any, parts: EvaluationParts, groups: Groups, control: Control) -> Any:
    """Join the values of all ranks; see `Run.gather`, Note [Order of gathered values].

    Raises:
        ConfigError: a value that can't be sent (pickled).
        DesyncError: the ranks pass values of different kinds or shapes.
        PeerLostError: a rank is gone.
    """
    leaves: list[Any] = []
    outline = _flatten(value, leaves)
    counts = {_count(leaf) for leaf in leaves}
    sizes = parts.sizes if counts == {sum(parts.sizes)} and parts.sizes else []
    try:
        own = pickle.dumps(
            _Sent(outline, [_pack(leaf) for leaf in leaves], sizes, parts.starts), protocol=pickle.HIGHEST_PROTOCOL
        )
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"run.gather can't send a {type(value).__name__} to another rank ({error}); pass tensors, arrays, numbers, "
            "texts or lists of them"
        ) from error
    newest = parts.batches_of(counts.pop() if len(counts) == 1 else -1)
    operation = Operation.GATHER_BATCH if parts.is_inside else Operation.GATHER

    def exchange() -> tuple[list[tuple[int, bytes]], dict[str, tuple[int, int]]]:
        table = control.exchange_table(operation, [float(len(own)), *map(float, newest)])
        payloads = _exchange_bytes(own, [int(length) for length in table[:, 0]], groups)
        # Here, not after it: the members may be others by then, on some ranks only.
        return list(zip(groups.ranks, payloads, strict=True)), _batches_of(table, groups)

    payloads, batches = control.guarded(exchange)
    sent = {rank: pickle.loads(data) for rank, data in payloads if data}
    _check_outlines(sent, groups.rank)
    if operation is Operation.GATHER_BATCH:
        parts.note_gather(batches)
    order = _round_order(list(sent.values()))
    joined = [
        _join({rank: each.leaves[index] for rank, each in sent.items()}, leaf, order)
        for index, leaf in enumerate(leaves)
    ]
    return _rebuild(value, iter(joined).__next__)


def reduce_values(
    value: Any, op: str, subset: Subset | None, parts: EvaluationParts, groups: Groups, control: Control
) -> Any:
    """Reduce a value over all ranks, or a subset; in a loop over `run.batches` over the ranks that have a batch there.

    Errors as in `collect.reduce_value`; StepError: a rank of the subset has no batches in such a loop.
    """
    if subset is None:
        return (_reduce_in_loop if parts.are_for_some else collect.reduce_value)(value, op, groups, control)
    without = [rank for rank in subset.ranks if groups.membership.workers[rank] in parts.without_batches]
    if without and parts.are_for_some:
        raise StepError(
            f"run.reduce(group=...) in a loop over run.batches that has no batch for rank {without[0]} of the group; call it "
            "after the loop"
        )
    return collect.reduce_value(value, op, subset, Control(subset))


def _reduce_in_loop(value: Any, op: str, groups: Groups, control: Control) -> Any:
    """Reduce a value over the ranks that have a batch, beside others that have none; see Note [Ranks without batches]."""
    outline = collect.check_reducible(value, op)
    own: list[tuple[_TensorPart, int]] = []

    def note(tensor: torch.Tensor, kind: int) -> torch.Tensor:
        own.append((_pack(tensor), kind))
        return tensor

    collect.map_parts(value, op, note)
    data = pickle.dumps((outline, own), protocol=pickle.HIGHEST_PROTOCOL)

    def exchange() -> list[bytes]:
        table = control.exchange_table(Operation.REDUCE_BATCH, [float(len(data)), 0.0, 0.0])
        return _exchange_bytes(data, [int(length) for length in table[:, 0]], groups)

    sent = [pickle.loads(each) for each in control.guarded(exchange) if each]
    if any(outline != sent[0][0] for outline, _ in sent):
        raise DesyncError(f"run.reduce received different values: {'; '.join(outline for outline, _ in sent)}")
    parts = iter(
        [[(part.tensor(), kind) for part, kind in each] for each in zip(*(own for _, own in sent), strict=True)]
    )
    return collect.map_parts(value, op, lambda *_: collect.reduce_here(next(parts), op))


def _exchange_bytes(own: bytes, lengths: Sequence[int], groups: Groups) -> list[bytes]:
    if groups.control is None:
        return [own]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    if own:
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    everyone = [torch.empty_like(padded) for _ in lengths]
    try:
        groups.wait(dist.all_gather(everyone, padded, group=groups.control, async_op=True))
    except RuntimeError as error:
        raise PeerLostError(f"run.gather failed: {error}") from error
    return [part[:length].numpy().tobytes() for part, length in zip(everyone, lengths, strict=True)]


def _flatten(value: Any, leaves: list[Any]) -> str:
    """Collect the leaves of dicts and tuples; return the structure as text. A list is a leaf: a sequence of samples."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_flatten(part, leaves)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_flatten(part, leaves) for part in value) + ")"
    leaves.append(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return "tensor"
    return "list" if isinstance(value, list) else "object"


def _rebuild(value: Any, take: Callable[[], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _rebuild(part, take) for key, part in value.items()}
    if isinstance(value, tuple):
        rebuilt = [_rebuild(part, take) for part in value]
        return type(value)(*rebuilt) if hasattr(value, "_fields") else tuple(rebuilt)
    return take()


def _count(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return len(leaf) if leaf.ndim else -1
    return len(leaf) if isinstance(leaf, list) else -1


def _pack(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout != torch.strided or leaf.is_quantized:
        raise ConfigError(f"run.gather received a tensor of {leaf.layout}; convert it to a dense one first")
    host = leaf.detach().cpu().contiguous()
    return _TensorPart(host.dtype, tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy().tobytes())


def _check_outlines(sent: Mapping[int, _Sent], rank: int) -> None:
    different = [other for other, each in sent.items() if each.outline != sent[rank].outline]
    if different:
        raise DesyncError(
            f"run.gather received different values: {sent[rank].outline} on rank {rank}, {sent[different[0]].outline} on rank "
            f"{different[0]}; pass the same keys and kinds on every rank"
        )


def _round_order(sent: Sequence[_Sent]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Return the places, in the values joined by rank, of the samples in the loader's order; None for the order by rank.

    See Note [Order of gathered values].
    """
    totals = [sum(each.sizes) for each in sent]
    if not any(totals) or any(
        {_count_packed(leaf) for leaf in each.leaves} != {total} for each, total in zip(sent, totals, strict=True)
    ):
        return None
    places = itertools.accumulate((size for each in sent for size in each.sizes), initial=0)
    parts = [(start, size) for each in sent for start, size in zip(each.starts, each.sizes, strict=True)]
    pieces = [(start, np.arange(place, place + size)) for (start, size), place in zip(parts, places, strict=False)]
    return np.concatenate([piece for _, piece in sorted(pieces, key=operator.itemgetter(0))])


def _count_packed(leaf: Any) -> int:
    if isinstance(leaf, _TensorPart):
        return leaf.shape[0] if leaf.shape else -1
    return _count(leaf)


def _join(parts: Mapping[int, Any], own: Any, order: np.ndarray[Any, np.dtype[np.int64]] | None) -> Any:
    """Join one leaf of all ranks; `own` gives the kind and the device of the result."""
    if isinstance(own, list):
        joined = [item for part in parts.values() for item in part]
        return joined if order is None else [joined[place] for place in order]
    if not isinstance(own, torch.Tensor | np.ndarray):
        return list(parts.values())
    if isinstance(own, np.ndarray):
        arrays = _matching({rank: np.asarray(part) for rank, part in parts.items()})
        joined_array = np.concatenate([array.reshape(-1) if array.ndim == 0 else array for array in arrays])
        return joined_array if order is None else joined_array[order]
    tensors = _matching({rank: part.tensor() for rank, part in parts.items()})
    joined_tensor = torch.cat([tensor.reshape(-1) if tensor.ndim == 0 else tensor for tensor in tensors])
    return (joined_tensor if order is None else joined_tensor[torch.from_numpy(order)]).to(own.device)


def _matching(parts: Mapping[int, Any]) -> list[Any]:
    """Return the parts that have samples; DesyncError if they differ in dtype or in a dimension after the first."""
    full = {rank: part for rank, part in parts.items() if part.ndim == 0 or len(part)}
    if not full:
        return list(parts.values())[:1]
    kinds = {(part.dtype, part.ndim, tuple(part.shape[1:])) for part in full.values()}
    if len(kinds) > 1:
        shapes = "; ".join(f"rank {rank}: {tuple(part.shape)} {part.dtype}" for rank, part in full.items())
        raise DesyncError(
            f"run.gather received tensors that differ beyond their first dimension: {shapes}. Pad them to the same length, or "
            "pass a list with one tensor for each sample"
        )
    return list(full.values())
