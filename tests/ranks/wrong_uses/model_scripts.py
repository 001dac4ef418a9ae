"""Unusual models: each function is a user's script."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.ranks.wrong_uses.gradient_jobs import Job

# models


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, 5, num_layers=2, bidirectional=True, proj_size=3, batch_first=True)
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x[:, 0] > 0).long() + 2
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 3, 2), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=3)
        return self.out(padded.sum(1) / lengths[:, None])


def packed_sequences(job: Job) -> Any:
    torch.manual_seed(job.rank)
    job.prepare(_Recurrent().double())
    return job.train()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True, norm_first=True)
        self.query = nn.Parameter(torch.ones(1, 1, 2))
        self.out = nn.ParameterDict({"weight": torch.full((2,), 0.3), "unused": torch.zeros(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.cat([self.query.expand(len(x), 1, 2), x.view(-1, 3, 2)], 1)
        mask = torch.cat([torch.zeros(len(x), 1, dtype=torch.bool), x.view(-1, 3, 2)[..., 0] > 1], 1)
        return self.layer(z, src_key_padding_mask=mask)[:, 0] @ self.out["weight"][:, None]


def attention_with_a_mask_of_the_samples(job: Job) -> Any:
    torch.manual_seed(0)
    job.prepare(_Attention().double())
    return job.train()


def bags_of_embeddings(job: Job) -> Any:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=True, padding_idx=3).double()
    model = job.prepare(nn.ModuleDict({"bag": bag, "out": nn.Linear(4, 1).double()}))

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        words, offsets = (x.tanh() * 8 + 10).long().flatten(), torch.arange(0, x.numel() + 1, x.shape[1])
        return functional.mse_loss(model["out"](model["bag"](words, offsets, x.flatten())), y)

    return job.train(loss_fn)


def adaptive_softmax(job: Job) -> Any:
    """Classes that no sample of a micro-batch has: their weights have no gradient in it."""
    torch.manual_seed(0)
    head = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8], div_value=2.0)
    model = job.prepare(nn.ModuleDict({"body": nn.Linear(6, 8), "head": head}).double())
    return job.train(lambda b: model["head"](model["body"](b[0]), ((b[1][:, 0] + 1) * 5.9).long()).loss)


def lazy_layers_initialised_before(job: Job) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)).double()
    model(torch.zeros(2, 6, dtype=torch.float64))
    job.prepare(model)
    return job.train()


def layer_used_many_times(job: Job) -> Any:
    """A fixed point by iteration, as often as the step says."""
    model = job.prepare(job.network())
    times = [1]

    def loss_fn(batch: Any) -> torch.Tensor:
        z = model[:2](batch[0])
        for _ in range(times[0]):
            z = model[2:4](z)
        return functional.mse_loss(model[4](z), batch[1])

    def update(optimizer: Any, step: Any) -> None:
        optimizer.step()
        times[0] = step.index % 3 + 1

    return job.train_by(update, loss_fn)


def two_dtypes(job: Job) -> Any:
    """The body in float64, a scale in complex128."""
    model = job.network()
    model.register_parameter("phase", nn.Parameter(torch.tensor([1.0 + 0.5j], dtype=torch.complex128)))
    model = job.prepare(model)
    return job.train(lambda b: functional.mse_loss((model(b[0]) * model.phase).real, b[1]))
