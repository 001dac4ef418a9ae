"""Bytes of a step's gradients on the link, by format; see docs/wire.md."""

from __future__ import annotations

from dataclasses import dataclass

POWERSGD_RANK = 4
_CHUNK = 1024
FORMATS = ("fp32", "bf16", "fp16", "int8", "powersgd")
EXACT_FORMATS = ("fp32",)


@dataclass(frozen=True)
class GradientSize:
    """Size of the gradients of a step."""

    num_values: int
    value_bytes: int = 4
    matrices: tuple[tuple[int, int], ...] = ()
    """Rows and columns of each parameter of two or more axes."""


def is_compressed(num_rows: int, num_columns: int) -> bool:
    """Return whether PowerSGD sends a matrix as two narrow ones: if they have at most half as many values."""
    return 2 * POWERSGD_RANK * (num_rows + num_columns) <= num_rows * num_columns


def payload_bytes(wire: str, size: GradientSize) -> float:
    """Return the bytes of one rank's gradients in a format, without what is constant for each bucket."""
    if wire == "powersgd":
        small = [(rows, columns) for rows, columns in size.matrices if is_compressed(rows, columns)]
        saved = sum(rows * columns - POWERSGD_RANK * (rows + columns) for rows, columns in small)
        return size.value_bytes * (size.num_values - saved)
    scale_bytes = 4 / _CHUNK
    per_value = {"fp32": size.value_bytes, "bf16": 2, "fp16": 2 + scale_bytes, "int8": 1 + scale_bytes}
    return per_value[wire] * size.num_values


def sent_bytes(wire: str, size: GradientSize, num_machines: int) -> float:
    """Return what each machine sends in a step, and receives: 2 (m - 1) / m times the payload."""
    return 2 * (num_machines - 1) / num_machines * payload_bytes(wire, size)
