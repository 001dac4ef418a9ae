"""Recognise errors that mean that memory ran out: the step can be repeated in smaller micro-batches."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from evenload.errors import EvenloadError

_CERTAIN = re.compile(
    # CUDA error: out of memory · CUDA driver error: out of memory · HIP out of memory · Triton Error [CUDA]: out of memory
    r"\bout of memory\b"
    # DefaultCPUAllocator, on Linux and on Windows; C++
    r"|can't allocate memory|DefaultCPUAllocator: not enough memory|std::bad_alloc"
    # cuBLAS, cuDNN 8, cuSPARSE, cuSOLVER; cuFFT; cuDNN 9
    r"|_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|_(?:HOST|DEVICE)_ALLOCATION_FAILED"
    # a loader worker: numpy's error has no constructor of one argument, so torch raises RuntimeError with its name
    r"|^Caught \w*MemoryError\b",
    re.IGNORECASE,
)
_POSSIBLE = re.compile(
    # The libraries' own handles and work space did not fit, or there is another reason.
    r"CUBLAS_STATUS_NOT_INITIALIZED when calling `?cublas(?:Lt)?Create|unable to find an engine to execute",
    re.IGNORECASE,
)
_FULL_BYTES = 256 * 2**20
"""A GPU with less free memory than the handles and work space of cuBLAS and cuDNN take is full."""

_FRAGMENTS_BYTES = 32 * 2**20
_FRAGMENTS_PART = 0.02
"""With less in free blocks, to return them gains too little for a second try."""


def is_out_of_memory(error: BaseException, free_bytes: int | None = None) -> bool:
    """Return whether `error` means that the memory of the device or of the process ran out.

    Libraries report a lack of memory by errors that have other causes, too; these count only where the GPU is full.
    `free_bytes` is its free memory, by default that of the current GPU.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, EvenloadError | dist.DistError):
        return False  # after an error of NCCL its communicator is lost: the step can't simply be repeated
    text = str(error)
    if _CERTAIN.search(text):
        return True
    return _POSSIBLE.search(text) is not None and (_free_bytes() if free_bytes is None else free_bytes) < _FULL_BYTES


def is_fragmented(device: torch.device) -> bool:
    """Return whether much of the memory that torch holds on a GPU is in free blocks, which no request fitted."""
    if device.type != "cuda":
        return False
    return is_much_unused(torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))


def is_much_unused(reserved_bytes: int, allocated_bytes: int) -> bool:
    return reserved_bytes - allocated_bytes >= max(_FRAGMENTS_BYTES, _FRAGMENTS_PART * reserved_bytes)


def _free_bytes() -> int:
    try:
        return torch.cuda.mem_get_info()[0]
    except (RuntimeError, AssertionError):  # a broken context; torch without CUDA
        return _FULL_BYTES
