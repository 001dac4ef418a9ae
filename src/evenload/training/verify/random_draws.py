"""Draw random numbers per sample: a part of a batch draws the same numbers as within the whole.

A draw whose first dimension is the number of samples is made for the whole slice, and the part's rows are taken. With equal
seeds a split and one process then see the same noise, so a loss that draws noise can be compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from evenload.training.compute import randomness

HALF = (torch.float16, torch.bfloat16)
_SIZED = (torch.rand, torch.randn, torch.randint)
_LIKE: dict[Any, Any] = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
_FILLING = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.random_, torch.Tensor.bernoulli_)


class OwnState:
    """A state of all generators beside the one that the program sees."""

    def __init__(self, device: torch.device, *key: int) -> None:
        self._device = device
        with randomness.set_aside(device):
            randomness.seed_all(device, *key)
            self._state = randomness.capture(device)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Draw from it in the body."""
        with randomness.set_aside(self._device):
            randomness.restore(self._state, self._device)
            yield
            self._state = randomness.capture(self._device)


class SharedDraws(TorchFunctionMode):
    """Makes draws those of the rows ``[low, low + num)`` of a slice of ``num_whole`` samples."""

    def __init__(self, low: int, num: int, num_whole: int, apart: OwnState | None = None) -> None:
        """`apart` holds the generators that these draws use; others, which belong to no sample, leave it as it is."""
        super().__init__()
        self._low, self._num, self._num_whole = low, num, num_whole
        self.saw_half = False
        """True if something was computed in float16 or bfloat16."""
        self._apart = contextlib.nullcontext if apart is None else apart.used

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _LIKE:
            like = args[0]
            options = {"dtype": like.dtype, "device": like.device, **kwargs}
            options.pop("memory_format", None)
            return self._rows(_LIKE[func], tuple(like.shape), options)
        if func in _SIZED and "out" not in kwargs and "generator" not in kwargs:
            return self._sized(func, args, kwargs)
        if func is torch.bernoulli and len(args) == 1 and not kwargs:
            return (self._rows(torch.rand, tuple(args[0].shape), {"device": args[0].device}) < args[0]).to(
                args[0].dtype
            )
        if func in _FILLING and self._matches(tuple(args[0].shape)) and "generator" not in kwargs:
            target = args[0]
            whole = target.new_empty(self._whole(tuple(target.shape)))
            with torch.no_grad(), self._apart():
                func(whole, *args[1:], **kwargs)
                return target.copy_(self._cut(whole, target.shape[0]))
        result = func(*args, **kwargs)
        self.saw_half = self.saw_half or (isinstance(result, torch.Tensor) and result.dtype in HALF)
        return result

    def _sized(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bounds: tuple[Any, ...] = ()
        if func is torch.randint:
            # randint(high, size) or randint(low, high, size)
            bounds = tuple(a for a in args if isinstance(a, int))
            sizes = [a for a in args if not isinstance(a, int)] + ([kwargs.pop("size")] if "size" in kwargs else [])
            if len(sizes) != 1:
                return func(*args, **kwargs)
            size = tuple(sizes[0])
        elif "size" in kwargs:
            size = tuple(kwargs.pop("size"))
        else:
            size = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)
        return self._rows(lambda shape, **options: func(*bounds, shape, **options), size, kwargs)

    def _rows(self, draw: Callable[..., Any], size: tuple[int, ...], options: dict[str, Any]) -> Any:
        if not self._matches(size):
            return draw(size, **options)
        with self._apart():
            return self._cut(draw(self._whole(size), **options), size[0])

    def _matches(self, size: tuple[int, ...]) -> bool:
        return bool(size) and size[0] > 0 and size[0] % self._num == 0

    def _whole(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return (size[0] // self._num * self._num_whole, *size[1:])

    def _cut(self, whole: torch.Tensor, rows: int) -> torch.Tensor:
        per_sample = rows // self._num
        return whole[self._low * per_sample : self._low * per_sample + rows].clone()
