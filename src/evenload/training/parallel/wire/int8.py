"""Format ``int8``: integers from -127 to 127 with a float32 scale for each chunk of 1,024 values.

With s = max |v| / 127 of the chunk, v travels as round(v / s), so its error is at most s / 2. Scales per block: Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from __future__ import annotations

import torch

from evenload.training.parallel.wire.codec import CHUNK, Block, blocks, in_chunks, scales_and_values

_LEVELS = 127
_LEAST_SCALE = 1e-37
"""Below it, 1 / scale overflows: such values travel as zeros, and error feedback keeps them."""


class Int8:
    name = "int8"

    def num_bytes(self, num_values: int) -> int:
        return num_values + 4 * -(-num_values // CHUNK)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scales, coded = scales_and_values(out, len(values), torch.int8)
        for here, rows in blocks(values):
            chunks = in_chunks(values[here])
            scales[rows] = chunks.abs().amax(1).div_(_LEVELS)
            wide = scales[rows].to(values.dtype)
            # Of a scale that is not finite, whatever is written decodes to a NaN.
            inverse = torch.where((wide > _LEAST_SCALE) & wide.isfinite(), wide.reciprocal(), 0.0)
            rounded = (chunks * inverse.unsqueeze(1)).round_().clamp_(-_LEVELS, _LEVELS).nan_to_num_(0.0)
            coded[here] = rounded.view(-1)[: here.stop - here.start]

    def decode(self, encoded: torch.Tensor, num_values: int, here: Block, out: torch.Tensor) -> None:
        scales, coded = scales_and_values(encoded, num_values, torch.int8)
        out.copy_(coded[here.values])
        out.mul_(scales[here.chunks].to(out.dtype).repeat_interleave(CHUNK)[: len(out)])
