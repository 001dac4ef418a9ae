"""Checksums of tensors that depend on every bit and its place, and sketches that tolerate rounding.

Note [The checksum]
  The bytes of all tensors, one after the other, are read as rows of 1023 integers of 64 bits. What is kept are the sums of
  the rows and of the columns, modulo 2^64: two passes over the memory and no product, so that it runs at the speed of the
  memory on any device. Each sum is then mixed with its place (splitmix64's finalizer), and all of them are added.

  One flipped bit changes one row's sum and one column's; two values that change places change two of each, unless they are
  equal. 1023 is odd, so a change that is the same everywhere (a sign flipped in a whole tensor) does not cancel in a row.
  It does not detect changes that add up to zero in every row and every column, or a collision of 53 bits.

Note [The sketch]
  Different kinds of devices round differently, so after some steps their bits differ without an error. A sketch of x is
  (s·x, ‖x‖) in float64, s a fixed row of ±1 by place. Where every value is off by a random error of relative size d, s·x is
  off by d‖x‖; a value that changed its sign, or two that changed places, move it by about that value.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter

import torch

from evenload.training.data.randomness import mix

COLUMNS = 1023
_ROW_BYTES = 8 * COLUMNS
_CPU_BLOCK_BYTES = 128 * _ROW_BYTES
"""About 1 MiB: the copy that is summed stays in the cache."""
_DEVICE_BLOCK_BYTES = 8192 * _ROW_BYTES
"""About 64 MiB of memory on a GPU, for a moment."""
_SMALL_VALUES, _MOST_JOINED = 1 << 12, 1 << 10
"""So many tensors of so many values are joined: six small calls for each would take longer than the sum."""
_SKETCH_VALUES = 1 << 20
_KIND_OF = attrgetter("dtype", "device", "is_quantized")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


@torch.no_grad()
def queue_checksums(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Start the checksums, one int64 scalar per block of the tensors in order; see `QueuedScalars`."""
    return [_checksum(block) for block in _blocks(tensors)]


class QueuedScalars:
    """Scalars of 64 bits that devices compute; copied to the host without waiting for the devices."""

    def __init__(self, scalars: Sequence[torch.Tensor]) -> None:
        self._parts: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        for device, group in itertools.groupby(scalars, key=lambda scalar: scalar.device):
            # On a GPU, `to` takes pinned memory for the result, so that it need not wait.
            values = torch.stack([scalar.view(torch.int64) for scalar in group]).to("cpu", non_blocking=True)
            event = None
            if device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
            self._parts.append((values, event))

    def read(self) -> list[int]:
        """Return the bits of all scalars, in order; wait for what is still being computed."""
        found: list[int] = []
        for values, event in self._parts:
            if event is not None:
                event.synchronize()
            found += values.tolist()
        return found


def fold(values: Sequence[int]) -> float:
    """Combine numbers of 64 bits into one integer from 1 to 2^53 - 1, which a float64 holds exactly."""
    return float(1 + mix(*values) % (2**53 - 1))


def checksum(tensor: torch.Tensor) -> float:
    return fold(QueuedScalars(queue_checksums([tensor])).read())


def sketch(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the projection of a tensor on a fixed row of ±1, and its Euclidean norm.

    For integers, which are never rounded, return the checksum and 0.
    """
    return QueuedSketches([tensor]).read()[0]


class QueuedSketches:
    """The sketches of tensors, all read at once."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._rounded: list[bool] = []
        self._counts: list[int] = []
        scalars: list[torch.Tensor] = []
        for tensor in tensors:
            self._rounded.append(tensor.is_floating_point() or tensor.is_complex())
            own = _queue_sketch(tensor) if self._rounded[-1] else queue_checksums([tensor])
            self._counts.append(len(own))
            scalars += own
        self._scalars = QueuedScalars(scalars)

    def read(self) -> list[tuple[float, float]]:
        """Return the sketch of each tensor, see `sketch`."""
        values = iter(self._scalars.read())
        found = []
        for rounded, count in zip(self._rounded, self._counts, strict=True):
            own = list(itertools.islice(values, count))
            if rounded:
                projection, squared_sum = struct.unpack("2d", struct.pack("2q", *own))
                found.append((projection, math.sqrt(squared_sum)))
            else:
                found.append((fold(own), 0.0))
        return found


@torch.no_grad()
def _queue_sketch(tensor: torch.Tensor) -> list[torch.Tensor]:
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = values.detach().reshape(-1)
    projection = torch.zeros((), dtype=torch.float64, device=flat.device)
    squared_sum = torch.zeros_like(projection)
    for index, part in enumerate(torch.split(flat, _SKETCH_VALUES)):
        wide = part.double()
        sign = 1.0 if mix(index) & 1 else -1.0
        projection += sign * torch.dot(wide, _signs(flat.device)[: wide.numel()])
        squared_sum += torch.dot(wide, wide)
    return [projection, squared_sum]


def _blocks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    # The bytes of all tensors in order, in blocks of limited size, each of one device.
    block: list[torch.Tensor] = []
    free = 0
    for data in _joined(tensors):
        limit = _CPU_BLOCK_BYTES if data.device.type == "cpu" else _DEVICE_BLOCK_BYTES
        if block and block[0].device != data.device:
            yield block
            block = []
        if not block:
            free = limit
        while data.numel() > free:
            block.append(data[:free])
            yield block
            data, block, free = data[free:], [], limit
        block.append(data)
        free -= data.numel()
    if block:
        yield block


def _joined(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Return the bytes of all tensors in order, those of small neighbours of one kind in one piece, made by one call."""
    tensors = list(tensors)
    sizes = map(_SMALL_VALUES.__lt__, map(torch.Tensor.numel, tensors))
    kinds = zip(map(_KIND_OF, tensors), sizes, strict=True)  # no call of Python for each tensor
    for ((_, _, is_quantized), is_large), pairs in itertools.groupby(zip(kinds, tensors, strict=True), itemgetter(0)):
        group = map(itemgetter(1), pairs)
        if is_large or is_quantized:
            yield from map(_bytes_of, group)
            continue
        while run := list(itertools.islice(group, _MOST_JOINED)):
            yield _bytes_of(torch._C._nn.flatten_dense_tensors(run) if len(run) > 1 else run[0])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.reshape(-1).view(torch.uint8)


def _checksum(block: list[torch.Tensor]) -> torch.Tensor:
    size = sum(part.numel() for part in block)
    # The copy is aligned to 8 bytes and padded to whole rows.
    table = torch.cat([*block, block[0].new_zeros(-size % _ROW_BYTES)]).view(torch.int64).view(-1, COLUMNS)
    return _mixed(torch.cat([table.sum(1), table.sum(0)])).sum()


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Each value hashed with its place (splitmix64, Steele et al. 2014); int64 wraps around."""
    x = values + torch.arange(1, values.numel() + 1, device=values.device) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right with zeros; torch's shift of a negative number inserts ones."""
    return (values >> count) & ((1 << (64 - count)) - 1)


@functools.lru_cache(maxsize=8)
def _signs(device: torch.device) -> torch.Tensor:
    """±1 by place, the same on every device."""
    bits = _mixed(torch.zeros(_SKETCH_VALUES, dtype=torch.int64, device=device)) & 1
    return (2 * bits - 1).double()
