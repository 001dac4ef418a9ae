"""One plain PyTorch process: the training that every split must equal. Nothing of Evenload is imported here.

A global batch of n samples is cut in K slices, the first n % K one sample larger. The loss of the step is
sum_m w_m l_m / N with N = sum_m w_m, where l_m is the mean loss that the user's loss_fn gives for slice m and w_m its weight
(its samples where loss_fn gives none). BatchNorm is torch's own, over each slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.ranks.exact.tasks import Recorder, Task


@dataclass
class LossScale:
    """The rule of torch.amp.GradScaler for the float16 logic: halve at a non-finite gradient, and skip the step."""

    scale: float = 2.0**16
    seen: list[float] = field(default_factory=list)


class Reference:
    """The plain loop over a task."""

    def __init__(self, task: Task, num_micro: list[int] | int = 1, *, scaled: bool = False) -> None:
        self.task = task
        self.num_micro = num_micro
        self.scale = LossScale() if scaled else None
        self.metrics: dict[str, float] = {}
        self._step = 0
        self._batch: list[Any] = []
        self._overflowed: set[torch.nn.Parameter] = set()

    def train(self) -> Recorder:
        """Trains to the end of the task."""
        task = self.task
        torch.manual_seed(task.seed)
        task.build()
        task.place(task.models)
        task.make_optimizers()
        for optimizer in task.optimizers:
            optimizer.register_step_post_hook(lambda *_: self._overflowed.clear())
        record = Recorder(task)
        epoch = 0
        while self._step < task.num_steps:
            order = list(task.order(epoch))
            for start in range(0, len(order), task.batch_size):
                if self._step >= task.num_steps:
                    break
                self._batch = order[start : start + task.batch_size]
                task.step_index = self._step
                self._overflowed.clear()
                task.body(self.backward, record)
                record.end_of_step(self.metrics)
                self._step += 1
            epoch += 1
        record.finish()
        if self.scale is not None:
            record.scales = self.scale.seen
        return record

    def backward(self, loss_fn: Any, *, batch_loss: Any = None) -> torch.Tensor:
        """What `step.backward` must equal."""
        earlier = [p.grad for p in self.task.parameters()]
        for p in self.task.parameters():
            p.grad = None
        scale = 1.0 if self.scale is None else self.scale.scale
        held, terms, weights, metrics = [], [], [], []
        parts: list[Any] = self._slices()
        if batch_loss is not None:
            parts, encode, loss_fn = [self._batch], loss_fn, lambda tensors: _loss_alone(batch_loss(*tensors))
        for part in parts:
            rows = self._read(part) if batch_loss is None else self._encoded(encode)
            loss, weight, extra = _read(loss_fn(rows))
            weights.append(float(len(part) if weight is None else weight))
            metrics.append(extra)
            # 0 units: the mean over them may be NaN, and has no part in the sum
            terms.append(loss.detach() * weights[-1] if weights[-1] else 0.0)
            if weight is None:
                # N is known, so each slice goes backward at once: the order in which checkpointing computes again
                (loss * (len(part) / len(self._batch) * scale)).backward()
            elif weights[-1]:
                held.append(loss * weight)
        units = math.fsum(weights)
        if held:
            (sum(held) / units * scale).backward()
        total = sum(terms) / units
        touched = [p for p in self.task.parameters() if p.grad is not None]
        for p, grad in zip(self.task.parameters(), earlier, strict=True):
            if p.grad is None:
                p.grad = grad
            else:
                p.grad.div_(scale)
                if grad is not None:
                    p.grad.add_(grad)
        if self.scale is not None:
            self._unless_finite(touched)
        self.metrics = {
            name: math.fsum(m[name] * w for m, w in zip(metrics, weights, strict=True) if w) / units
            for name in metrics[0]
        }
        return total

    def _read(self, part: list[Any]) -> Any:
        return self.task.collate([self.task.dataset[index] for index in part])

    def _encoded(self, encode: Any) -> list[torch.Tensor]:
        """The tensors of the whole batch, encoded slice by slice."""
        encoded = [encode(self._read(part)) for part in self._slices()]
        return [torch.cat(column) for column in zip(*encoded, strict=True)]

    def _unless_finite(self, touched: list[torch.nn.Parameter]) -> None:
        """The parameters of a backward that overflowed get no update, whatever later backwards add."""
        if not all(bool(p.grad.isfinite().all()) for p in touched):
            self.scale.scale /= 2.0
            self._overflowed.update(touched)
        for p in self._overflowed:
            p.grad = None
        self.scale.seen.append(self.scale.scale)

    def _slices(self) -> list[list[Any]]:
        count = self.num_micro if isinstance(self.num_micro, int) else self.num_micro[self._step]
        size, rest = divmod(len(self._batch), count)
        sizes = [size + 1] * rest + [size] * (count - rest)
        ends = [sum(sizes[: m + 1]) for m in range(count)]
        return [self._batch[end - n : end] for end, n in zip(ends, sizes, strict=True)]


def _loss_alone(returned: Any) -> Any:
    """The loss of the whole batch is that of the step, whatever its weight."""
    return returned[0] if isinstance(returned, tuple) else returned


def _read(returned: Any) -> tuple[torch.Tensor, Any, dict[str, float]]:
    if isinstance(returned, torch.Tensor):
        return returned, None, {}
    if isinstance(returned, tuple):
        return returned[0], returned[1], {}
    extra = {
        name: float(value)
        for name, value in returned.items()
        if name not in ("loss", "weight") and (not isinstance(value, torch.Tensor) or value.numel() == 1)
    }
    return returned["loss"], returned.get("weight"), extra
