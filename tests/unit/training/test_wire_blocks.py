"""Sums of a bucket on a CPU are decoded in blocks: the same bits, without memory for whole terms that is new in each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenload.training.comm.wire_groups import WireGroups
from evenload.training.parallel.wire.bucket_sum import BucketSum
from evenload.training.parallel.wire.codec import BLOCK, CHUNK, Codec, message_bytes, pack, unpack
from evenload.training.parallel.wire.formats import CODECS
from evenload.training.parallel.wire.quantised_sum import QuantisedSum

ALONE = WireGroups((0, 1), 0, True, None, (), on_gpus=False)
"""Both ranks send the same: without a link, each receives what it has sent."""


class _LargeMemory(TorchDispatchMode):
    """Counts the float32 tensors of at least so many values that operations make."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self._num_values = num_values
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32 and found.numel() >= self._num_values:
            given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, torch.Tensor)]
            self.count += all(one.untyped_storage().data_ptr() != found.untyped_storage().data_ptr() for one in given)
        return found


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_bucket_of_several_blocks_has_the_bits_of_one_that_is_decoded_whole(codec: Codec) -> None:
    values = torch.randn(2 * BLOCK + 3 * CHUNK + 5)
    job, whole = BucketSum(values.clone(), torch.tensor(2.0)), torch.empty_like(values)
    message = torch.zeros(message_bytes(codec, len(values)), dtype=torch.uint8)
    pack(codec, values, job.scalar, message)
    assert unpack(codec, message, whole) == 2.0
    assert torch.allclose(whole, values, rtol=0.1, atol=0.1)
    with _LargeMemory(len(values)) as memory:
        for _ in QuantisedSum(codec).sum(job, ALONE):
            pytest.fail("it began a collective without a link")
    assert torch.equal(job.values, whole + whole) and job.scalar == 4.0
    assert job.lost is not None and torch.equal(job.lost, values - whole)
    assert memory.count == 1  # what is lost
