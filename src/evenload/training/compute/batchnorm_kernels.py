"""The arithmetic of BatchNorm over ranks: what each rank computes of its own part, before and after an exchange.

Note [CPU]
  torch has no BatchNorm on a CPU with statistics from elsewhere, but two native calls that can be used for it. The backward
  in evaluation form, without the input's gradient, is a fast sum of dy and of dy (x - mean) per channel; with the centred
  input in the place of both it also gives the variance, in a third of the time of the native statistics. The forward in
  evaluation form is an affine map per channel. So dx = weight inv (dy - S1 / n - xhat S2 / n) takes one reading of
  x and dy for the sums, and two passes.

Note [Accuracy]
  A variance is a sum of squares around the mean: a difference of sums, which cancels, was wrong by 1e-2 in float32 where the
  mean is 300 standard deviations from zero. Half precision has statistics and sums in float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

_SMALL_PLANE = 32
"""Planes (values of one sample and channel) with fewer values are summed over samples first: native sums go plane by plane."""
_SMALLEST_PLANE = 16
"""The same in a backward, whose native sums are faster."""
_FEW_VALUES = 1 << 16
"""Fewer values are read by the native statistics: one slow operation costs less than five fast ones."""
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_native_backward = torch.ops.aten.native_batch_norm_backward.default


class ChannelMoments(NamedTuple):
    """ChannelMoments of each channel over all ranks."""

    mean: torch.Tensor
    var: torch.Tensor
    """The biased variance."""
    inv: torch.Tensor
    """``1 / sqrt(var + eps)``."""
    num_values: float | torch.Tensor
    """Values per channel: a number on a CPU; on a GPU a tensor, so that the host does not wait for it."""
    counts: torch.Tensor
    """Values per channel of each rank."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics for inputs of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in a layout that native kernels are fast with: contiguous or channels_last."""
    if x.is_contiguous():
        return x
    channels_last = _CHANNELS_LAST.get(x.dim())
    if channels_last is not None and x.is_contiguous(memory_format=channels_last):
        return x
    return x.contiguous()


def like(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the layout of `x`; an average over the plane gives an expanded one, for instance."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x, dtype=grad.dtype).copy_(grad)


def own_statistics(x: torch.Tensor, *, idle: bool) -> torch.Tensor:
    """Return each channel's mean and biased variance, and the number of values: shape ``(2 * channels + 1,)``.

    A part that does not count (`idle`) has a count of 0.
    """
    channels, wide = x.shape[1], wide_dtype(x.dtype)
    count = x.numel() // channels
    if idle:
        return torch.zeros(2 * channels + 1, dtype=wide, device=x.device)
    if x.dtype != wide:
        # Running statistics that nobody reads: on a CPU their dtype is that of the result.
        unread = torch.empty(2, channels, dtype=wide, device=x.device)
        mean, var = torch.batch_norm_update_stats(x, unread[0], unread[1], 0.0)
    elif x.is_cuda or x.dim() == 2 or x.numel() < _FEW_VALUES or not x.is_contiguous():
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    elif _has_small_planes(x, _SMALL_PLANE):
        mean = _plane_sums(x).div_(count)
        var = _plane_sums((x - mean.view(_per_channel(x))).square_()).div_(count)
    else:
        mean = x.mean(_all_but_channels(x.dim()))
        centred = x - mean.view(_per_channel(x))
        # Sums of squares, divided by the count: the native operation divides by the root of the variance that it is given.
        zero, square = _filled(0.0, channels, wide, x.device), _filled(float(count) ** 2, channels, wide, x.device)
        var = _native_backward(centred, centred, None, zero, square, None, None, False, 0.0, [False, True, True])[1]
    return torch.cat([mean, var, _filled(float(count), 1, wide, x.device)])


def combine(table: torch.Tensor, channels: int, eps: float) -> ChannelMoments:
    """Return the moments over all ranks from their rows ``(mean, variance, count)``.

    mu = sum_r n_r mu_r / n,   var = sum_r n_r (var_r + (mu_r - mu)²) / n

    Raises:
        ValueError: there are fewer than two values per channel; on a GPU the host does not wait to know.
    """
    if table.device.type != "cpu":
        num_values = table[:, -1].sum()
        parts = table[:, -1:] / num_values
        inside = (table * parts).sum(0)
        mean = inside[:channels]
        between = (table[:, :channels] - mean).square_().mul_(parts).sum(0)
        var = between.add_(inside[channels:-1])
        return ChannelMoments(mean, var, (var + eps).rsqrt_(), num_values, table[:, -1])
    # The same in numpy, where a small operation costs a third: 35 µs a layer and not 70.
    rows = table.numpy()
    total = float(sum(rows[:, -1].tolist()))
    if total <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel over all ranks, got {int(total)}")
    shares = rows[:, -1:] / total
    within = np.add.reduce(rows * shares, 0)
    centre = within[:channels]
    spread = rows[:, :channels] - centre
    spread *= spread
    spread *= shares
    var = torch.from_numpy(np.add.reduce(spread, 0) + within[channels:-1])
    return ChannelMoments(torch.from_numpy(centre), var, (var + eps).rsqrt_(), total, table[:, -1])


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    moments: ChannelMoments,
    eps: float,
) -> torch.Tensor:
    """Return ``(x - mean) * inv * weight + bias``, in the dtype of `x`."""
    if not x.numel():  # a loss over some samples only; the native operations divide by their number
        return torch.empty_like(x)
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, moments.mean, moments.inv, eps)
    wide = moments.mean.dtype
    return torch.batch_norm(x, _in(weight, wide), _in(bias, wide), moments.mean, moments.var, False, 0.0, eps, False)


class OwnSums(NamedTuple):
    """This rank's sums per channel in a backward, in the statistics' dtype."""

    grad: torch.Tensor
    """Sum of dy."""
    product: torch.Tensor
    """Sum of dy xhat, with xhat = (x - mean) * inv."""
    grad_input: torch.Tensor | None
    """The gradient of the input if this rank's part were the whole batch; in half precision on a CPU only."""


def own_sums(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, moments: ChannelMoments, eps: float
) -> OwnSums:
    """Sum over this rank's part; `grad` has the layout of `x`."""
    mean, var, inv = moments.mean, moments.var, moments.inv
    if not x.numel():
        return OwnSums(torch.zeros_like(mean), torch.zeros_like(mean), None)
    if x.is_cuda:
        total, product, _, _ = torch.batch_norm_backward_reduce(grad, x, mean, inv, weight, True, False, False)
        return OwnSums(total, product * inv, None)
    if x.dtype != inv.dtype:
        # Adding up in half precision would round three times: so the native gradient is corrected (input_gradient).
        wide = _in(weight, inv.dtype)
        grad_input, product, total = _native_backward(
            grad, x, wide, None, None, mean, inv, True, 0.0, [True, True, True]
        )
        return OwnSums(total, product, grad_input)
    if _has_small_planes(x, _SMALLEST_PLANE):
        products = (x - mean.view(_per_channel(x))).mul_(grad)
        return OwnSums(_plane_sums(grad), _plane_sums(products).mul_(inv), None)
    _, product, total = _native_backward(grad, x, None, mean, var, None, None, False, eps, [False, True, True])
    return OwnSums(total, product, None)


def input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    moments: ChannelMoments,
    eps: float,
    own: OwnSums,
    sums: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of this rank's input; `sums` holds those of dy and of dy xhat over all ranks."""
    mean, var, inv, num_values, counts = moments
    channels = x.shape[1]
    if x.is_cuda:
        return torch.batch_norm_backward_elemt(
            grad, x, mean, inv, weight, sums[:channels], sums[channels:] / inv, counts.to(torch.int32)
        )
    scale = inv if weight is None else inv * weight.to(inv.dtype)
    if own.grad_input is None:
        shift, slope = (sums.view(2, channels) * (scale * (-1.0 / num_values))).unbind()
        affine = torch.batch_norm(x, slope, shift, mean, var, False, 0.0, eps, False)
        return affine.addcmul_(grad, scale.view(_per_channel(x)))
    # The native gradient has this rank's means of dy and of dy xhat subtracted.
    means = torch.cat([own.grad, own.product]).div_(x.numel() // channels)
    shift, slope = means.sub_(sums, alpha=1.0 / float(num_values)).view(2, channels).mul_(scale).unbind()
    return own.grad_input.add_(torch.batch_norm(x, slope, shift, mean, var, False, 0.0, eps, False))


def _has_small_planes(x: torch.Tensor, num_values: int) -> bool:
    return x.dim() > 2 and x.numel() < num_values * x.shape[0] * x.shape[1] and x.is_contiguous()


def _plane_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0).flatten(1).sum(1)


def _per_channel(x: torch.Tensor) -> tuple[int, ...]:
    return (1, x.shape[1], *(1,) * (x.dim() - 2))


def _in(values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return values if values is None or values.dtype == dtype else values.to(dtype)


@functools.cache
def _all_but_channels(num_dims: int) -> list[int]:
    return [dim for dim in range(num_dims) if dim != 1]


@functools.lru_cache(maxsize=256)
def _filled(value: float, num: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a vector that nobody changes."""
    return torch.full((num,), value, dtype=dtype, device=device)
