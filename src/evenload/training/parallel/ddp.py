"""Strategy ``ddp``: a replica of the model on each rank, with gradients summed over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from evenload.errors import PeerLostError
from evenload.training.comm.groups import Groups
from evenload.training.compute.grad_norms import GradNorms
from evenload.training.parallel.model_split.buckets import BucketSegments
from evenload.training.parallel.reducer import BucketReducer, Expectation

_NATIVE_DTYPES = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    )
)


class ReplicaStrategy:
    def __init__(self, grad_norms: GradNorms | None = None) -> None:
        self._grad_norms = grad_norms
        self._groups: Groups | None = None
        self._segments = BucketSegments()
        self._models: list[nn.Module] = []
        self._signature: list[tuple[int, bool, torch.dtype, torch.device]] = []
        self._reducer: BucketReducer | None = None
        self._expectations: dict[int, Expectation] = {}
        self._call_index = 0
        self._used: Expectation | None = None
        self._touched: list[int] = []

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        self.detach()
        self._groups = groups
        self._segments = BucketSegments(models, groups)
        for model in models:
            _broadcast(model, groups)
        self._models = list(models)
        self._build(groups)

    def detach(self) -> None:
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None

    def begin(self, call_index: int, *, expect: bool) -> None:
        self._follow_parameters()
        self._call_index = call_index
        self._used = self._expectations.get(call_index) if expect else None
        self._of().begin(self._used)

    def backward(self, loss: torch.Tensor, *, last: bool, idle: bool) -> None:
        reducer = self._of()
        reducer.micro(last=last, idle=idle)
        loss.backward()  # type: ignore[no-untyped-call]
        reducer.end_micro()
        if idle:
            reducer.end_idle()

    def report(self) -> tuple[float, bool]:
        reducer = self._of()
        return reducer.touched_key(), reducer.late

    def resolve(self, same: bool) -> None:
        reducer = self._of()
        self._touched = reducer.touched()
        if not same:
            self._touched = _over_ranks(self._touched, self._groups, dist.ReduceOp.MAX)

    def finish(self, correction: float) -> bool:
        reducer = self._of()
        finite = reducer.finish(self._touched, correction)
        known = self._expectations.get(self._call_index)
        if known is None or any(now and not then for now, then in zip(self._touched, known, strict=True)):
            expected = self._agreed(reducer.observed())
            if known is not None:
                expected = tuple(max(now, then) for now, then in zip(expected, known, strict=True))
            self._expectations[self._call_index] = expected
        return finite

    def rollback(self) -> None:
        self._of().rollback()

    def abort(self) -> None:
        if self._reducer is not None:
            self._reducer.abort()

    def clear(self) -> None:
        self._of().clear(self._touched)

    def clear_skip(self) -> None:
        self._of().clear_skip()

    def state_dict(self) -> Mapping[int, Expectation]:
        return dict(self._expectations)

    def load_state_dict(self, state: Mapping[int, Expectation]) -> None:
        self._expectations = dict(state)

    def covers(self, param: torch.Tensor) -> bool:
        return self._of().covers(param)

    def leftovers(self) -> list[str]:
        return self._of().leftovers()

    def _build(self, groups: Groups) -> None:
        self._reducer = BucketReducer(self._models, groups, self._segments, grad_norms=self._grad_norms)
        self._signature = self._sign()
        self._expectations.clear()

    def _sign(self) -> list[tuple[int, bool, torch.dtype, torch.device]]:
        return [(id(p), p.requires_grad, p.dtype, p.device) for model in self._models for p in model.parameters()]

    def _follow_parameters(self) -> None:
        # Parameters may be frozen, unfrozen, converted or replaced between steps, on all ranks.
        if self._reducer is not None and self._groups is not None and self._sign() != self._signature:
            self._reducer.remove()
            self._build(self._groups)

    def _of(self) -> BucketReducer:
        if self._reducer is None:
            raise RuntimeError("the strategy is not attached to a model")
        return self._reducer

    def _agreed(self, observed: Expectation) -> Expectation:
        # The same buckets must leave early on all ranks: none with a parameter that only some ranks touch.
        somewhere = _over_ranks([min(count, 1) for count in observed], self._groups, dist.ReduceOp.MAX)
        everywhere = _over_ranks([min(count, 1) for count in observed], self._groups, dist.ReduceOp.MIN)
        agreed = list(observed)
        for bucket in self._of().buckets:
            if any(somewhere[slot.index] != everywhere[slot.index] for slot in bucket.slots):
                for slot in bucket.slots:
                    agreed[slot.index] = 0
        return tuple(agreed)


def _broadcast(model: nn.Module, groups: Groups) -> None:
    if groups.gradients is None:
        return
    try:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dense = tensor.detach().contiguous()
                # Dtypes that gloo or NCCL don't support are sent as bytes.
                wire = dense if dense.dtype in _NATIVE_DTYPES else dense.reshape(-1).view(torch.uint8)
                dist.broadcast(wire, group_src=0, group=groups.gradients)
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)
    except RuntimeError as error:
        raise PeerLostError(f"rank 0's parameters did not arrive: {error}") from error


def _over_ranks(values: Sequence[int], groups: Groups | None, op: dist.ReduceOp.RedOpType) -> list[int]:
    if groups is None or groups.control is None:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int32)
    try:
        dist.all_reduce(tensor, op=op, group=groups.control)
    except RuntimeError as error:
        raise PeerLostError(f"the ranks could not agree on the parameters in use: {error}") from error
    return tensor.tolist()
