"""Format ``fp16``: float16 with a power of two for each chunk of 1,024 values, so that none overflows.

With s = 2^e > max |v| of the chunk, v travels as fp16(v / s). A value within 2^-14 of the largest has a relative error of at
most 2^-11; smaller ones an absolute error of at most s · 2^-25.
"""

from __future__ import annotations

import torch

from evenload.training.parallel.wire.codec import CHUNK, Block, blocks, in_chunks, scales_and_values


class Float16:
    name = "fp16"

    def num_bytes(self, num_values: int) -> int:
        return 2 * num_values + 4 * -(-num_values // CHUNK)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scales, coded = scales_and_values(out, len(values), torch.float16)
        for here, rows in blocks(values):
            chunks = in_chunks(values[here])
            largest = chunks.abs().amax(1)
            powers = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1])
            # The exponent of what is not finite is undefined.
            scales[rows] = torch.where(largest.isfinite(), powers, largest)
            scaled = chunks / scales[rows].to(values.dtype).unsqueeze(1)
            coded[here] = scaled.view(-1)[: here.stop - here.start]

    def decode(self, encoded: torch.Tensor, num_values: int, here: Block, out: torch.Tensor) -> None:
        scales, coded = scales_and_values(encoded, num_values, torch.float16)
        out.copy_(coded[here.values])
        out.mul_(scales[here.chunks].to(out.dtype).repeat_interleave(CHUNK)[: len(out)])
