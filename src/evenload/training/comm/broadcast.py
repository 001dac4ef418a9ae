"""Send tensors of rank 0 to the other ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from evenload.training.comm.collective_errors import collective_error
from evenload.training.comm.groups import Groups

_NATIVE_DTYPES = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    )
)


def broadcast(tensors: Iterable[torch.Tensor], groups: Groups) -> None:
    """Send rank 0's values to all ranks that share gradients; PeerLostError if one is gone."""
    if groups.gradients is None:
        return
    try:
        with torch.no_grad():
            for tensor in tensors:
                dense = tensor.detach().contiguous()
                # Dtypes that gloo or NCCL don't support are sent as bytes.
                wire = dense if dense.dtype in _NATIVE_DTYPES else dense.reshape(-1).view(torch.uint8)
                groups.wait(dist.broadcast(wire, group_src=0, group=groups.gradients, async_op=True), wire.device)
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)
    except RuntimeError as error:
        raise collective_error(error, "rank 0's parameters did not arrive") from error
