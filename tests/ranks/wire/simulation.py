"""The formats in one process, written from the formulas of docs/wire.md with numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Encode = Callable[[Values], Values]
"""Values -> what the other side reads."""


def bf16(values: Values) -> Values:
    # float64 is rounded to bfloat16 over float32, as torch does.
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def fp16(values: Values) -> Values:
    out = np.empty_like(values)
    for low in range(0, len(values), 1024):
        part = values[low : low + 1024]
        scale = 2.0 ** np.frexp(np.abs(part).max())[1]
        out[low : low + 1024] = (part / scale).astype(np.float32).astype(np.float16).astype(np.float64) * scale
    return out


def int8(values: Values) -> Values:
    out = np.empty_like(values)
    for low in range(0, len(values), 1024):
        part = values[low : low + 1024]
        scale = float(np.float32(np.abs(part).max() / 127))
        out[low : low + 1024] = np.clip(np.round(part * (1 / scale)), -127, 127) * scale
    return out


CODECS: dict[str, Encode] = {"bf16": bf16, "fp16": fp16, "int8": int8}


def quantised_sum(terms: Sequence[Values], encode: Encode) -> tuple[Values, list[Values]]:
    """Return the sum, and what each term lost."""
    num_parts, size = len(terms), len(terms[0])
    if num_parts == 2:
        read = [encode(term) for term in terms]
        return read[0] + read[1], [term - part for term, part in zip(terms, read, strict=True)]
    step = -(-size // (1024 * num_parts)) * 1024
    out, lost = np.zeros(size), [np.zeros(size) for _ in terms]
    for owner in range(num_parts):
        span = slice(owner * step, min(size, (owner + 1) * step))
        total = np.zeros(len(out[span]))
        for rank, term in enumerate(terms):
            part = term[span] if rank == owner else encode(term[span])
            lost[rank][span] = term[span] - part
            total += part
        out[span] = encode(total)
        lost[owner][span] += total - out[span]
    return out, lost


def orthonormal(columns: Values) -> Values:
    q, r = np.linalg.qr(columns)
    return q * np.sign(np.diag(r))


def powersgd_sum(
    terms: Sequence[Values], spans: Sequence[tuple[int, int, int]], starts: dict[int, Values]
) -> tuple[Values, list[Values]]:
    """`spans`: start, rows and columns of each matrix; `starts` is updated."""
    out, lost = sum(terms[1:], terms[0].copy()), [np.zeros_like(term) for term in terms]
    for start, rows, columns in spans:
        part = slice(start, start + rows * columns)
        matrices = [term[part].reshape(rows, columns) for term in terms]
        basis = orthonormal(sum(matrix @ starts[start] for matrix in matrices))
        factors = [matrix.T @ basis for matrix in matrices]
        starts[start] = sum(factors)
        out[part] = (basis @ starts[start].T).ravel()
        for rank, (matrix, factor) in enumerate(zip(matrices, factors, strict=True)):
            lost[rank][part] = (matrix - basis @ factor.T).ravel()
    return out, lost
