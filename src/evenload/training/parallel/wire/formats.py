"""The formats by name."""

from __future__ import annotations

import time

import torch

from evenload.balance.wire_bytes import GradientSize
from evenload.training.parallel.buckets import Bucket, real
from evenload.training.parallel.wire.bf16 import BFloat16
from evenload.training.parallel.wire.bucket_sum import WireFormat
from evenload.training.parallel.wire.codec import Codec, message_bytes, pack, unpack
from evenload.training.parallel.wire.fp16 import Float16
from evenload.training.parallel.wire.int8 import Int8
from evenload.training.parallel.wire.powersgd import PowerSGD, powersgd_seconds
from evenload.training.parallel.wire.quantised_sum import QuantisedSum

_NUM_TIMED = 1 << 20
CODECS: tuple[Codec, ...] = (BFloat16(), Float16(), Int8())


def open_format(name: str, seed: int) -> WireFormat | None:
    """Return the format, or None for float32 as it is."""
    if name == PowerSGD.name:
        return PowerSGD(seed)
    return next((QuantisedSum(codec) for codec in CODECS if codec.name == name), None)


def codec_seconds(device: torch.device, size: GradientSize) -> dict[str, float]:
    """Return the seconds that a format needs for a value: to encode it, to decode it from two ranks, and to keep what is lost.

    `size`: of all gradients. Takes about 0.1 s, and twice what PowerSGD computes in a step for different shapes.
    """
    found = {PowerSGD.name: powersgd_seconds(size.matrices, device) / max(1, size.num_values)}
    values = torch.randn(_NUM_TIMED, device=device)
    error, norm = torch.zeros_like(values), torch.zeros(1, device=device)[0]
    for codec in CODECS:
        message = torch.zeros(message_bytes(codec, len(values)), dtype=torch.uint8, device=device)
        times = []
        for _ in range(3):
            began_s = time.perf_counter()
            values.add_(error)
            pack(codec, values, norm, message)
            parts = torch.empty_like(values), torch.empty_like(values)
            for part in parts:
                unpack(codec, message, part)
            lost = values - parts[0]
            torch.add(*parts, out=parts[1])
            error.mul_(0.5).add_(lost)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began_s)
        found[codec.name] = sorted(times)[1] / len(values)
    return found


def wide_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype in which a bucket is encoded and its errors are kept."""
    return torch.float64 if real(bucket.flat).dtype == torch.float64 else torch.float32
