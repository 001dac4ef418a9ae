"""Small training scripts: correct ones, and ones with exactly one fault each. Each takes an open run."""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload


def _pairs(num=24, features=6, classes=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, features, generator=generator)
    return TensorDataset(x, torch.randint(0, classes, (num,), generator=generator))


def _mlp(*between):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.ReLU(), nn.Linear(8, 3))


def _train(run, model, loss_fn, dataset=None, batch_size=16, collate_fn=None, others=()):
    loader = DataLoader(dataset or _pairs(), batch_size=batch_size, shuffle=True, collate_fn=collate_fn)
    model, loader = run.prepare(model, loader)
    parameters = [*model.parameters(), *(p for other in others for p in other.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    run.resume(model=model, optimizer=optimizer)
    for _ in range(loader.epoch, 2):
        for step in loader:
            loss = step.backward(loss_fn)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": loss})
            run.checkpoint(every=1)


def _classify(run, model, **options):
    _train(run, model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), **options)


# -- correct ----------------------------------------------------------------------------------------------------------


def plain(run):
    _classify(run, _mlp())


def batch_norm(run):
    _classify(run, _mlp(nn.BatchNorm1d(8)))


def casts(run):
    """Asks for float32 by name, uses a frozen model and class weights that were never prepared."""
    model, teacher, weights = _mlp(), _mlp().requires_grad_(False), torch.tensor([1.0, 2.0, 0.5])

    def loss_fn(batch):
        x, y = batch
        logits = model(x.to(torch.float32)).float()
        target = teacher(x).softmax(-1)
        # A mean over class weights is a mean over them, not over samples.
        share = weights[y].sum()
        return F.cross_entropy(logits, y, weight=weights) + F.kl_div(
            logits.log_softmax(-1), target, reduction="sum"
        ) / share, share

    _train(run, model, loss_fn)


class _Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        return self.head(self.table(ids))


class _Sentences(torch.utils.data.Dataset):
    """Sequences of many lengths, padded; the labels of the padding are ignored."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 11, (12,), generator=generator)
        labels = ids.clone()
        labels[1 + index % 11 :] = -100
        return {"input_ids": ids, "labels": labels}


def _next_token_loss(model, batch):
    logits = model(batch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


class _OfNumbers(torch.utils.data.Dataset):
    """Makes its tensors of Python's numbers, which float32 rounds."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([0.1 * index + 0.01 * column for column in range(6)]), index % 3


def of_numbers(run):
    model = _mlp()
    _train(
        run, model, lambda batch: F.cross_entropy(model(batch[0] * torch.tensor(0.1)), batch[1]), dataset=_OfNumbers()
    )


def token_weights(run):
    model = _Language()

    def loss_fn(batch):
        return {
            "loss": _next_token_loss(model, batch),
            "weight": evenload.count_tokens(batch["labels"]),
            "ones": torch.ones(()),
        }

    _train(run, model, loss_fn, _Sentences())


def gan(run, noise_in_loss=False):
    """Two models, two losses and two optimizer steps in one step."""
    torch.manual_seed(4)
    generator, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    x = _pairs().tensors[0]
    data = TensorDataset(x, torch.randn(len(x), 4, generator=torch.Generator().manual_seed(5)))
    generator, critic, loader = run.prepare(generator, critic, DataLoader(data, batch_size=16))
    opt_g, opt_c = torch.optim.SGD(generator.parameters(), lr=0.5), torch.optim.SGD(critic.parameters(), lr=0.5)

    def draw(batch):
        return torch.randn(len(batch[0]), 4) if noise_in_loss else batch[1]

    def critic_loss(batch):
        return F.softplus(-critic(batch[0])).mean() + F.softplus(critic(generator(draw(batch)).detach())).mean()

    def generator_loss(batch):
        return F.softplus(-critic(generator(draw(batch)))).mean()

    for step in loader:
        opt_c.zero_grad()
        step.backward(critic_loss)
        opt_c.step()
        opt_g.zero_grad()
        step.backward(generator_loss)
        opt_g.step()


def dropout(run):
    _classify(run, _mlp(nn.Dropout(0.5)))


def functional_dropout(run):
    model = _mlp()
    _train(run, model, lambda batch: F.cross_entropy(model(F.dropout(batch[0], 0.3)), batch[1]))


def noise(run):
    gan(run, noise_in_loss=True)


def leaves_by_break(run):
    model = _mlp()
    model, loader = run.prepare(model, DataLoader(_pairs(), batch_size=16))
    for _ in range(3):
        for step in loader:
            step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
            break


def compiled(run):
    model = _mlp()
    model.compile()
    _classify(run, model)


class _Float32Only(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype == torch.float64:
            raise TypeError("this kernel knows no float64")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def float32_only(run):
    model = _mlp()
    _train(run, model, lambda batch: F.cross_entropy(_Float32Only.apply(model(batch[0])), batch[1]))


class _MeanInFloat32(torch.autograd.Function):
    """A mean as a kernel gives it that takes any dtype, and computes in float32."""

    @staticmethod
    def forward(ctx, x):
        ctx.num = len(x)
        return (x.float().sum() / len(x)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return (grad * float(np.float32(1 / ctx.num))).expand(ctx.num)


def rounds_inside(run):
    model = _mlp()
    _train(run, model, lambda batch: _MeanInFloat32.apply(F.cross_entropy(model(batch[0]), batch[1], reduction="none")))


# -- one fault each ---------------------------------------------------------------------------------------------------


def sum_loss(run):
    model = _mlp()
    _train(run, model, lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"))


def forgotten_weights(run):
    model = _Language()
    _train(run, model, lambda batch: _next_token_loss(model, batch), _Sentences())


class _OneSentence(_Sentences):
    """Only one sample has labels that count, so a part without it has no loss."""

    def __getitem__(self, index):
        sample = super().__getitem__(index + 5)
        if index:
            sample["labels"] = torch.full((12,), -100)
        return sample


def forgotten_where_nothing_counts(run):
    model = _Language()
    loader = DataLoader(_OneSentence(), batch_size=16)
    model, loader = run.prepare(model, loader)
    for step in loader:
        step.backward(lambda batch: _next_token_loss(model, batch))


def forgotten_class_weights(run):
    model, weights = _mlp(), torch.tensor([1.0, 5.0, 0.2])
    _train(run, model, lambda batch: F.cross_entropy(model(batch[0]), batch[1], weight=weights))


def contrastive(run):
    model = _mlp()

    def loss_fn(batch):
        x, _ = batch
        one, two = F.normalize(model(x), dim=-1), F.normalize(model(x * 0.9 + 0.1), dim=-1)
        return F.cross_entropy(one @ two.T / 0.2, torch.arange(len(x)))

    _train(run, model, loss_fn)


class _OwnBatchNorm(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) * 1.5


def own_batch_norm(run):
    _classify(run, _mlp(_OwnBatchNorm(8)))


def forgotten_head(run):
    torch.manual_seed(6)
    model, head = _mlp(), nn.Linear(3, 3)
    _train(run, model, lambda batch: F.cross_entropy(head(model(batch[0])), batch[1]), others=(head,))


def counts_calls(run):
    model, calls = _mlp(), [0]

    def loss_fn(batch):
        calls[0] += 1
        return F.cross_entropy(model(batch[0] * calls[0]), batch[1])

    _train(run, model, loss_fn)


def random_collation(run):
    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        return x + torch.from_numpy(np.random.default_rng().normal(size=x.shape)).float(), y

    _classify(run, _mlp(), collate_fn=collate)


def numpy_noise(run):
    model = _mlp()
    _train(
        run,
        model,
        lambda batch: F.cross_entropy(
            model(batch[0] + torch.from_numpy(np.random.normal(size=batch[0].shape)).float()), batch[1]
        ),
    )


def weights_on_one_rank(run):
    model = _mlp()
    model, loader = run.prepare(model, DataLoader(_pairs(), batch_size=16))
    if run.rank == 1:
        with torch.no_grad():
            model[0].bias.add_(1.0)
    for step in loader:
        step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))


def knows_its_rank(run):
    model = _mlp()
    _train(run, model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]) * (1 + run.rank))


def nothing_counts(run):
    """All labels are ignored: the loss is NaN, and its gradient 0 on both sides."""
    model = _Language()
    data = TensorDataset(torch.ones(24, 12, dtype=torch.int64))
    model, loader = run.prepare(model, DataLoader(data, batch_size=16))
    for step in loader:
        step.backward(lambda batch: _next_token_loss(model, {"input_ids": batch[0], "labels": batch[0] * -100}))


def not_finite(run):
    model = _mlp()
    _train(run, model, lambda batch: (model(batch[0]).sum() * 0.0).log())


# -- losses over the whole batch --------------------------------------------------------------------------------------


class _Contrasted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def nt_xent(self, first, second):
        z = F.normalize(torch.cat([first, second]), dim=1)
        logits = (z @ z.T / self.log_temperature.exp()).fill_diagonal_(float("-inf"))
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(first)))


def noisy_contrastive(run):
    """Noise and dropout, drawn in loss_fn: as in SimCLR."""
    model = _Contrasted()

    def loss_fn(batch):
        x = batch[0]
        return model.nt_xent(model.body(x + 0.1 * torch.randn_like(x)), model.body(x + 0.1 * torch.randn_like(x)))

    _train(run, model, loss_fn)


def shuffled_contrastive(run):
    """Random numbers that belong to no sample: each is mixed with another, as mixup does."""
    model = _Contrasted()

    def loss_fn(batch):
        x = batch[0]
        mixed = 0.9 * x + 0.1 * x[torch.randperm(len(x))]
        return model.nt_xent(model.body(x), model.body(mixed))

    _train(run, model, loss_fn)


def mixup(run):
    """Mixes samples, but the loss is a mean over them: equal on average."""
    model = _mlp()

    def loss_fn(batch):
        x, y = batch
        order = torch.randperm(len(x))
        logits = model(0.8 * x + 0.2 * x[order])
        return 0.8 * F.cross_entropy(logits, y) + 0.2 * F.cross_entropy(logits, y[order])

    _train(run, model, loss_fn)


def batch_loss(run):
    """The same by batch_loss, which is exact."""
    model = _Contrasted()
    loader = DataLoader(_pairs(), batch_size=16, shuffle=True)
    model, loader = run.prepare(model, loader)

    def encode(batch):
        x = batch[0]
        return model.body(x), model.body(x + 0.1 * torch.randn_like(x))

    for step in loader:
        step.backward(encode, batch_loss=model.nt_xent)


def looks_at_padding(run):
    """Each part is padded to its own longest sequence."""
    torch.manual_seed(3)
    model = nn.GRU(2, 4, batch_first=True, bidirectional=True)
    sequences = [torch.randn(2 + index, 2) for index in range(24)]
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    _train(run, model, lambda batch: model(batch)[0].square().mean(), sequences, collate_fn=pad)
