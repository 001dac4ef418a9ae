"""`Codec`: a format that stores each value in fewer bits, and messages of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

CHUNK = 1024
"""Values that share a scale."""
BLOCK = 128 * CHUNK
"""Values that a CPU encodes at a time: what is computed on the way stays in its cache, and in memory that it has."""
_HEADER_BYTES = 8
"""A float64 in front of the values: the norm, which must show a NaN or an overflow whatever the format loses."""


class Block(NamedTuple):
    """Places of values, and those of their chunks."""

    values: slice
    chunks: slice


class Codec(Protocol):
    name: str

    def num_bytes(self, num_values: int) -> int:
        """Return the length of encoded values."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write values, float32 or float64 of shape ``(n,)``, into bytes of shape ``(num_bytes(n),)``, aligned to 8."""

    def decode(self, encoded: torch.Tensor, num_values: int, here: Block, out: torch.Tensor) -> None:
        """Write a block of so many values back; a chunk with a NaN or an infinity gives some again."""


def message_bytes(codec: Codec, num_values: int) -> int:
    """Return the length of a message, a multiple of 8."""
    return -(-(_HEADER_BYTES + codec.num_bytes(num_values)) // 8) * 8


def pack(codec: Codec, values: torch.Tensor, norm: torch.Tensor, out: torch.Tensor) -> None:
    """Write a message into bytes of shape ``(message_bytes,)`` or more."""
    out[:_HEADER_BYTES].view(torch.float64).copy_(norm)
    codec.encode(values, out[_HEADER_BYTES : _HEADER_BYTES + codec.num_bytes(len(values))])


def unpack(codec: Codec, message: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the values of a message into `out`, and return the norm in front of them."""
    for here in blocks(out):
        unpack_block(codec, message, len(out), here, out[here.values])
    return norm_of(message)


def unpack_block(codec: Codec, message: torch.Tensor, num_values: int, here: Block, out: torch.Tensor) -> None:
    """Write a block of the `num_values` values of a message into `out`."""
    codec.decode(message[_HEADER_BYTES : _HEADER_BYTES + codec.num_bytes(num_values)], num_values, here, out)


def norm_of(message: torch.Tensor) -> torch.Tensor:
    """Return the norm in front of a message."""
    return message[:_HEADER_BYTES].view(torch.float64)[0]


def blocks(values: torch.Tensor) -> Iterator[Block]:
    """Yield the places of values to encode at a time."""
    size = BLOCK if values.device.type == "cpu" else max(1, len(values))
    for low in range(0, len(values), size):
        high = min(low + size, len(values))
        yield Block(slice(low, high), slice(low // CHUNK, -(-high // CHUNK)))


def in_chunks(values: torch.Tensor) -> torch.Tensor:
    """Return values as rows of `CHUNK`, the last filled with zeros."""
    missing = -len(values) % CHUNK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, CHUNK)


def scales_and_values(encoded: torch.Tensor, num_values: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of encoded bytes: a float32 scale for each chunk, and behind them the values, of shape ``(num_values,)``."""
    num_bytes = 4 * -(-num_values // CHUNK)
    return encoded[:num_bytes].view(torch.float32), encoded[num_bytes:].view(dtype)
