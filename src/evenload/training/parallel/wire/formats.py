"""The formats by name."""

from __future__ import annotations

import torch

from evenload.training.parallel.buckets import Bucket, real
from evenload.training.parallel.wire.bf16 import BFloat16
from evenload.training.parallel.wire.bucket_sum import WireFormat
from evenload.training.parallel.wire.codec import Codec
from evenload.training.parallel.wire.fp16 import Float16
from evenload.training.parallel.wire.int8 import Int8
from evenload.training.parallel.wire.powersgd import PowerSGD
from evenload.training.parallel.wire.quantised_sum import QuantisedSum

CODECS: tuple[Codec, ...] = (BFloat16(), Float16(), Int8())


def open_format(name: str, seed: int) -> WireFormat | None:
    """Return the format, or None for float32 as it is."""
    if name == PowerSGD.name:
        return PowerSGD(seed)
    return next((QuantisedSum(codec) for codec in CODECS if codec.name == name), None)


def wide_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype in which a bucket is encoded and its errors are kept."""
    return torch.float64 if real(bucket.flat).dtype == torch.float64 else torch.float32
