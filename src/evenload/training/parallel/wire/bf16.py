"""Format ``bf16``: the upper 16 bits of a float32, rounded to nearest; a relative error of at most 2^-9 per value."""

from __future__ import annotations

import torch

from evenload.training.parallel.wire.codec import Block


class BFloat16:
    name = "bf16"

    def num_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.bfloat16).copy_(values)

    def decode(self, encoded: torch.Tensor, num_values: int, here: Block, out: torch.Tensor) -> None:
        out.copy_(encoded.view(torch.bfloat16)[here.values])
