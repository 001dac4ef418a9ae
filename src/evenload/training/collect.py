"""Values over ranks: `run.reduce` and `run.any`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from evenload.errors import ConfigError, PeerLostError
from evenload.training.launch.control import Control, Operation
from evenload.training.launch.groups import Groups

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def reduce_value(value: Any, op: str, groups: Groups, control: Control) -> Any:
    """A number, a tensor, or a dict, list or tuple of them, over all ranks; of the same kind as it came.

    Integers are summed exactly as int64, floats in float64, tensors in their own dtype (on the CPU).

    Raises:
        ConfigError: an unknown operation or kind of value.
    """
    if op not in _OPERATIONS:
        raise ConfigError(f"run.reduce(op={op!r}): expected one of {', '.join(_OPERATIONS)}")
    if isinstance(value, dict):
        return {key: reduce_value(value[key], op, groups, control) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return type(value)(reduce_value(part, op, groups, control) for part in value)
    if isinstance(value, torch.Tensor):
        return _reduce(value, op, groups, control).to(value.device)
    if isinstance(value, bool | int):
        total = _reduce(
            torch.tensor(int(value), dtype=torch.float64 if op == "mean" else torch.int64), op, groups, control
        )
        return total.item()
    if isinstance(value, float) or hasattr(value, "__float__"):
        return _reduce(torch.tensor(float(value), dtype=torch.float64), op, groups, control).item()
    raise ConfigError(f"run.reduce got a {type(value).__name__}; it takes numbers, tensors, and dicts or lists of them")


def any_flag(flag: Any, control: Control) -> bool:
    """Whether any rank's flag is true."""
    return any(row[0] for row in control.exchange(Operation.ANY, [float(bool(flag))]))


def _reduce(tensor: torch.Tensor, op: str, groups: Groups, control: Control) -> torch.Tensor:
    result = tensor.detach().cpu().clone()
    if op == "mean" and not (result.is_floating_point() or result.is_complex()):
        result = result.double()
    control.exchange(Operation.REDUCE, [float(result.numel()), float(result.dim())])
    if groups.control is None:
        return result
    # gloo has no booleans.
    wire = result.to(torch.int32) if result.dtype == torch.bool else result.contiguous()
    try:
        dist.all_reduce(wire, op=_OPERATIONS[op], group=groups.control)
    except RuntimeError as error:
        raise PeerLostError(f"run.reduce failed: {error}") from error
    if op == "mean":
        wire = wire / groups.world_size
    return wire.bool() if result.dtype == torch.bool else wire
