"""Errors that mean that memory ran out, and those that only sound like it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import StepError
from evenload.records.reader import read_events
from evenload.training.compute.out_of_memory import is_fragmented, is_much_unused, is_out_of_memory

GIB = 2**30


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes.",
        "std::bad_alloc",
    ],
)
def test_texts_that_say_so(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text), free_bytes=10 * GIB)


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "CUDA error: device-side assert triggered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
        "CUDA error: too many resources requested for launch",
        "out of resource: shared memory, Required: 131072, Hardware limit: 101376.",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared "
        "memory. Please try to raise your shared memory limit.",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    ],
)
def test_other_errors(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text), free_bytes=0)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_unclear_errors_count_on_a_full_gpu_alone(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text), free_bytes=GIB // 16)
    assert not is_out_of_memory(RuntimeError(text), free_bytes=GIB)
    if not torch.cuda.is_available():
        assert not is_out_of_memory(RuntimeError(text))


def test_types() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("any text"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(StepError("rank 1 ran out of memory in a model"))
    assert not is_out_of_memory(
        dist.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'")
    )
    assert not is_out_of_memory(ValueError("out of memory"))


def test_errors_of_this_machine() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(10**15)
    with pytest.raises(MemoryError) as of_numpy:
        np.zeros(10**15)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_numpy.value)


def test_memory_error_of_a_loader_worker() -> None:
    try:
        np.zeros(10**15)
    except MemoryError:
        caught = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises((RuntimeError, MemoryError)) as error:
        caught.reraise()
    assert is_out_of_memory(error.value)


def test_free_blocks_worth_returning() -> None:
    assert is_much_unused(10 * GIB, 9 * GIB)
    assert not is_much_unused(10 * GIB, 10 * GIB - GIB // 8)
    assert not is_much_unused(GIB // 32, GIB // 64)
    assert not is_fragmented(torch.device("cpu"))


def test_one_sample_that_did_not_fit_is_repeated_and_no_change_is_named(tmp_path: Path) -> None:
    run = evenload.init(project_dir=tmp_path, micro_batch=1)
    model, loader = run.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(2, 1)), 2))
    failures = iter([torch.OutOfMemoryError("out of memory")])

    def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        for error in failures:
            raise error
        return torch.as_tensor(model(batch[0]).mean())

    for step in loader:
        step.backward(loss_fn)
    run.close()
    (event,) = [event for event in read_events(tmp_path) if event.kind == "memory"]
    assert event.message == "rank 0 ran out of memory in step 0 with one sample in a micro-batch; the step is repeated"
