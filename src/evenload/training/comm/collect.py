"""Reduce values over ranks: `run.reduce`."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenload.errors import ConfigError, DesyncError, PeerLostError
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.groups import RankGroup

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_INTEGER, _FLOAT = 0, 1
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
_FIRST_DTYPE = 2
_INTEGERS = (int, np.integer, np.bool_)


def flag_value(flag: Any) -> float:
    """Return 1 for what counts as true, else 0; ConfigError for several values, or a text."""
    if isinstance(flag, str):
        raise ConfigError(f"run.any({flag!r}): every text but '' counts as true; pass True, False or a comparison")
    try:
        return float(bool(flag))
    except (RuntimeError, ValueError):
        raise ConfigError(
            f"run.any received {len(flag)} values; it takes one flag of this rank: run.any(flags.any())"
        ) from None


def reduce_value(value: Any, op: str, members: RankGroup, control: Control) -> Any:
    """Reduce a number, tensor, array, or a dict, list or tuple of them over the members; the result has the same kind.

    Integers are summed exactly as int64, floats in float64, tensors in their own dtype (on the CPU). A number that is an
    integer on one rank and a float on another is a float on all.

    Raises:
        ConfigError: an unknown operation or kind of value.
        DesyncError: the ranks pass different dicts, lists, shapes or dtypes.
    """
    outline = check_reducible(value, op)
    return control.guarded(lambda: _reduce_on_all(value, outline, op, members, control))


def check_reducible(value: Any, op: str) -> str:
    """Return the structure of a value, without its numbers; ConfigError as in `reduce_value`."""
    if op not in _OPERATIONS:
        raise ConfigError(f"run.reduce(op={op!r}): expected one of {', '.join(_OPERATIONS)}")
    return _outline(value, op)


def _reduce_on_all(value: Any, outline: str, op: str, members: RankGroup, control: Control) -> Any:
    rows = control.exchange(Operation.REDUCE, [float(zlib.crc32(outline.encode()))])
    for rank, row in zip(members.ranks, rows, strict=True):
        if row != rows[0]:
            raise DesyncError(
                f"run.reduce received different values: rank {members.ranks[0]} and rank {rank} differ in keys, lengths or "
                f"kinds; on rank {members.rank} the value is {outline}"
            )
    return map_parts(value, op, lambda tensor, kind: _reduce(tensor, kind, op, members, control))


def _outline(value: Any, op: str) -> str:
    """Describe the structure of a value, without its numbers; ConfigError if a part can't be reduced."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_outline(value[key], op)}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_outline(part, op) for part in value) + "]"
    if isinstance(value, torch.Tensor | np.ndarray):
        _check_tensor(_as_tensor(value) if isinstance(value, np.ndarray) else value, op)
        return "tensor"
    if isinstance(value, _INTEGERS) and not -(2**63) <= int(value) < 2**63:
        raise ConfigError(f"run.reduce received the integer {value}, which has more than 64 bits; reduce float(value)")
    if isinstance(value, _INTEGERS) or hasattr(value, "__float__"):
        return "number"
    raise ConfigError(
        f"run.reduce received a {type(value).__name__}; it takes numbers, tensors, and dicts or lists of them. run.gather(x) "
        "joins any values of all ranks"
    )


def _check_tensor(tensor: torch.Tensor, op: str) -> None:
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
        what = tensor.dtype if tensor.dtype not in _DTYPES else tensor.layout
        raise ConfigError(
            f"run.reduce received a tensor of {what}; convert it to a dense one of the usual dtypes first"
        )
    if tensor.is_complex() and op in ("min", "max"):
        raise ConfigError(f"run.reduce(op={op!r}) got complex numbers, which have no order; take sum or mean")


def map_parts(value: Any, op: str, part: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """Return a value with `part` of each number, tensor and array in it, in an order that is the same on all ranks.

    `part` takes a tensor on the CPU, an integer that differs where the kinds do, and returns the reduced one.
    """
    if isinstance(value, dict):
        reduced = {key: map_parts(value[key], op, part) for key in sorted(value, key=repr)}
        return {key: reduced[key] for key in value}
    if isinstance(value, list | tuple):
        parts = [map_parts(each, op, part) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, np.ndarray):
        return map_parts(_as_tensor(value), op, part).numpy()
    if isinstance(value, torch.Tensor):
        own = value.detach().cpu().clone()
        if op == "mean" and not (own.is_floating_point() or own.is_complex()):
            own = own.double()
        return part(own, _FIRST_DTYPE + _DTYPES.index(value.dtype)).to(value.device)
    if isinstance(value, _INTEGERS):
        dtype = torch.float64 if op == "mean" else torch.int64
        return part(torch.tensor(int(value), dtype=dtype), _INTEGER).item()
    return part(torch.tensor(float(value), dtype=torch.float64), _FLOAT).item()


def reduce_here(parts: Sequence[tuple[torch.Tensor, int]], op: str) -> torch.Tensor:
    """Reduce what ranks have passed to `map_parts`, in their order; DesyncError if they differ in kind or shape."""
    tensors = [tensor for tensor, _ in parts]
    if {kind for _, kind in parts} == {_INTEGER, _FLOAT}:
        tensors = [tensor.double() for tensor in tensors]
    elif any((kind, tensor.shape) != (parts[0][1], tensors[0].shape) for tensor, kind in parts):
        received = "; ".join(_describe(kind, tensor.numel()) for tensor, kind in parts)
        raise DesyncError(
            f"run.reduce received different values: {received}; pass the same shape and dtype on every rank"
        )
    total = functools.reduce({"min": torch.minimum, "max": torch.maximum}.get(op, torch.add), tensors)
    return total / len(tensors) if op == "mean" else total


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    try:
        return torch.from_numpy(array.copy())  # it may be read-only, or run backwards
    except TypeError as error:
        raise ConfigError(
            f"run.reduce received an array of {array.dtype}; convert it to one of the usual dtypes first"
        ) from error


def _reduce(tensor: torch.Tensor, kind: int, op: str, members: RankGroup, control: Control) -> torch.Tensor:
    result = tensor
    shape = float(zlib.crc32(repr(tuple(result.shape)).encode()))
    rows = control.exchange(Operation.REDUCE, [float(kind), float(result.numel()), shape])
    kinds = {row[0] for row in rows}
    if kinds == {_INTEGER, _FLOAT}:
        result = result.double()
    elif any(row != rows[0] for row in rows):
        received = "; ".join(
            f"rank {rank} {_describe(int(row[0]), int(row[1]))}" for rank, row in zip(members.ranks, rows, strict=True)
        )
        raise DesyncError(
            f"run.reduce received different values: {received}; pass the same shape and dtype on every rank"
        )
    if members.control is None:
        return result
    # gloo has no integers of 16 bits, and sums booleans as bytes.
    wire = result.to(torch.int32) if result.dtype in (torch.bool, torch.int16) else result.contiguous()
    try:
        members.wait(dist.all_reduce(wire, op=_OPERATIONS[op], group=members.control, async_op=True))
    except RuntimeError as error:
        raise PeerLostError(f"run.reduce failed: {error}") from error
    if op == "mean":
        wire = wire / members.world_size
    return wire.to(result.dtype) if result.dtype in (torch.bool, torch.int16) else wire


def _describe(kind: int, num_elements: int) -> str:
    if kind < _FIRST_DTYPE:
        return "a number"
    return f"a tensor of {num_elements} values of {_DTYPES[kind - _FIRST_DTYPE]}"
