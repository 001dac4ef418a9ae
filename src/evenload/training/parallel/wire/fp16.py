"""Format ``fp16``: float16 with a power of two for each chunk of 1,024 values, so that none overflows.

With s = 2^e > max |v| of the chunk, v travels as fp16(v / s). A value within 2^-14 of the largest has a relative error of at
most 2^-11; smaller ones an absolute error of at most s · 2^-25.
"""

from __future__ import annotations

import torch

from evenload.training.parallel.wire.codec import CHUNK, in_chunks


class Float16:
    name = "fp16"

    def num_bytes(self, num_values: int) -> int:
        return 2 * num_values + 4 * -(-num_values // CHUNK)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        chunks = in_chunks(values)
        largest = chunks.abs().amax(1)
        scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1])
        # The exponent of what is not finite is undefined.
        scales = torch.where(largest.isfinite(), scales, largest)
        num_scales = 4 * len(scales)
        out[:num_scales].view(torch.float32).copy_(scales)
        scaled = chunks / out[:num_scales].view(torch.float32).to(values.dtype).unsqueeze(1)
        out[num_scales:].view(torch.float16).copy_(scaled.view(-1)[: len(values)])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        num_scales = 4 * -(-len(out) // CHUNK)
        scales = encoded[:num_scales].view(torch.float32).to(out.dtype)
        out.copy_(encoded[num_scales:].view(torch.float16))
        out.mul_(scales.repeat_interleave(CHUNK)[: len(out)])
