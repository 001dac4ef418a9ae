"""Put the rows of all ranks together in global order, bit for bit, whatever their dtypes.

Ranks hold unequal numbers of rows, for which gloo has no all-gather. So each rank writes its rows into zeros of the whole
batch's size, and the sum over ranks, taken of the bits as integers, is what all ranks hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from evenload.errors import StepError
from evenload.training.compute.batchnorm import Statistics

_ALIGNMENT = 8
_LAYOUT_CHARS = 160
Rows = tuple[int, int]
"""A span ``[low, high)`` of the global batch."""


def gather_rows(
    own: Sequence[tuple[Rows, Sequence[torch.Tensor]]],
    idle: Sequence[torch.Tensor],
    num_rows: int,
    statistics: Statistics,
    device: torch.device,
) -> list[torch.Tensor]:
    """Return the tensors of the global batch, each of shape ``(num_rows, ...)``; all ranks that compute call it.

    Args:
        own: this rank's parts: the rows of each, and its tensors of shape ``(high - low, ...)``.
        idle: tensors of a sample that does not count, which show the layout where `own` is empty.
        num_rows: samples of the global batch.
        statistics: exchanges over ranks.
        device: of the result.

    Raises:
        StepError: the tensors of two parts differ in number, dtype or shape.
    """
    layout = _layout(idle if not own else own[0][1])
    for (low, high), tensors in own:
        if _layout(tensors) != layout:
            raise StepError(
                f"encode returned other tensors for samples {low} to {high} of the global batch than for others: "
                f"({_layout(tensors)}) and ({layout}), in shapes without samples; with batch_loss they must be equal, so pad "
                "sequences to one length"
            )
    if statistics.world_size == 1:
        parts = [tensors for _, tensors in own]
        return [torch.cat([part[index].detach() for part in parts]) for index in range(len(parts[0]))]
    _compare(layout, statistics, device)
    like = idle if not own else own[0][1]
    sizes = [-(-_row_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT for tensor in like]
    table = torch.zeros(num_rows, sum(sizes), dtype=torch.uint8, device=device)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    for (low, high), tensors in own:
        for tensor, start in zip(tensors, starts, strict=True):
            table[low:high, start : start + _row_bytes(tensor)] = _as_bytes(tensor)
    whole = statistics.sum(table.view(-1).view(torch.int64)).view(torch.uint8).view(num_rows, -1)
    return [
        whole[:, start : start + _row_bytes(tensor)]
        .contiguous()
        .view(tensor.dtype)
        .reshape(num_rows, *tensor.shape[1:])
        for tensor, start in zip(like, starts, strict=True)
    ]


def _layout(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape[1:])}" for t in tensors)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(tensor.shape[0], -1).contiguous().view(torch.uint8)


def _compare(layout: str, statistics: Statistics, device: torch.device) -> None:
    text = layout.encode()[:_LAYOUT_CHARS]
    row = [float(zlib.crc32(layout.encode())), *map(float, text), *[0.0] * (_LAYOUT_CHARS - len(text))]
    rows = statistics.gather(torch.tensor(row, dtype=torch.float64, device=device)).tolist()
    layouts = dict.fromkeys(bytes(int(code) for code in other[1:] if code).decode() for other in rows)
    if len({other[0] for other in rows}) > 1:
        raise StepError(
            f"encode returned different tensors on different devices: {' and '.join(f'({one})' for one in layouts)}, in shapes "
            "without samples; with batch_loss they must be equal on all devices, so pad sequences to one length"
        )
