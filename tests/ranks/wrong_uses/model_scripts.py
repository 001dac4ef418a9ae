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


# losses and derivatives


def learned_weights_of_losses(job: Job) -> Any:
    torch.manual_seed(0)
    model = job.network()
    model.register_parameter("log_var", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    model = job.prepare(model)

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        out = model(x)
        a, b = functional.mse_loss(out, y), functional.l1_loss(out, y)
        return (-model.log_var).exp()[0] * a + (-model.log_var).exp()[1] * b + model.log_var.sum()

    return job.train(loss_fn)


def adversarial_samples(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        near = x.clone()
        for _ in range(3):
            near.requires_grad_()
            (slope,) = torch.autograd.grad(functional.mse_loss(model(near), y), near)
            near = (near.detach() + 0.05 * slope.sign()).clamp(x - 0.1, x + 0.1)
        return functional.mse_loss(model(near), y)

    return job.train(loss_fn)


def sparse_inputs(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        rare = torch.where(x > 0.5, x, 0.0).to_sparse()
        z = torch.sparse.mm(rare, model[0].weight.t()) + model[0].bias
        return functional.mse_loss(model[1:](z), y)

    return job.train(loss_fn)


def nested_tensors(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        nested = torch.nested.nested_tensor(
            [row[None].expand(1 + int(row[0] > 0), -1) for row in x], layout=torch.jagged
        )
        out = model(nested)
        return torch.stack([(a - b).square().mean() for a, b in zip(out.unbind(), y, strict=True)]).mean()

    return job.train(loss_fn)


class _Fft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.view_as_real(torch.ones(4, dtype=torch.complex64)) + 0.1)
        self.t = nn.Parameter(torch.arange(6.0).view(1, 6).t() * 0.1)
        self.wide = nn.Parameter((torch.arange(36.0).view(6, 6) * 0.01).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=6)
        return torch.tanh(z @ self.wide) @ self.t


def filters_of_frequencies(job: Job) -> Any:
    """And parameters that are not contiguous."""
    job.prepare(_Fft().double())
    return job.train()


def orthogonal_weights(job: Job) -> Any:
    model = job.network()
    nn.utils.parametrizations.orthogonal(model[2])
    nn.utils.parametrizations.weight_norm(model[0])
    job.prepare(model)
    return job.train()


def surrogate_by_gradients(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        params = list(model.parameters())
        grads = torch.autograd.grad(job.loss(batch), params)
        return sum((p * g).sum() for p, g in zip(params, grads, strict=True))

    return job.train(loss_fn)


def assigned_state(job: Job) -> Any:
    """`load_state_dict(assign=True)` replaces the parameters."""
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
        if step.index == 1:
            model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
            optimizer = job.optimizer()
    return model.parameters()


def previous_gradient_in_loss_fn(job: Job) -> Any:
    model = job.prepare(job.network())
    last: dict[Any, torch.Tensor] = {}

    def loss_fn(batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        return loss + sum(0.1 * (p * g).sum() for p, g in last.items())

    def update(optimizer: Any, step: Any) -> None:
        last.update({p: p.grad.clone() for p in model.parameters()})
        optimizer.step()

    return job.train_by(update, loss_fn)


def backward_pre_hook_scales(job: Job) -> Any:
    model = job.prepare(job.network())
    model[2].register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))
    model[0].register_full_backward_hook(lambda m, gi, go: None)
    return job.train()


def focal_and_label_smoothing(job: Job) -> Any:
    torch.manual_seed(0)
    model = job.prepare(nn.Linear(6, 4).double())

    def loss_fn(batch: Any) -> torch.Tensor:
        labels = ((batch[1][:, 0] + 1) * 1.9).long()
        ce = functional.cross_entropy(model(batch[0]), labels, reduction="none", label_smoothing=0.1)
        return ((1 - (-ce).exp()) ** 2 * ce).mean()

    return job.train(loss_fn)


def connectionist_classification(job: Job) -> Any:
    torch.manual_seed(0)
    model = job.prepare(nn.Linear(6, 12).double())

    def loss_fn(batch: Any) -> torch.Tensor:
        num = len(batch[0])
        scores = model(batch[0]).view(num, 4, 3).log_softmax(-1).transpose(0, 1)
        targets = torch.tensor([1, 2]).expand(num, 2)
        lengths = torch.full((num,), 4), torch.full((num,), 2)
        return functional.ctc_loss(scores, targets, *lengths, reduction="sum") / num

    return job.train(loss_fn)


def parameters_of_numpy(job: Job) -> Any:
    """share memory with numpy, updated by it"""
    model = job.prepare(job.network())
    for step in job.steps():
        step.backward(job.loss)
        for p in model.parameters():
            p.detach().numpy()[...] -= 0.05 * p.grad.numpy()
        model.zero_grad()
    return job.weights()


def swapped_tensors(job: Job) -> Any:
    model = job.prepare(job.network())

    def update(optimizer: Any, step: Any) -> None:
        optimizer.step()
        if step.index == 2:
            model.float().double()

    return job.train_by(update)
