"""Ten losses over a batch as their papers' code writes them, and ten that only look like it. Each takes (model, x, y)."""

import torch
import torch.nn.functional as F
from torch import nn

NUM_CLASSES = 5


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.head = nn.Linear(8, NUM_CLASSES)
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.decoder = nn.Linear(8, 12)

    def forward(self, x):
        return self.body(x)


def _views(model, x):
    return model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))


# -- coupled ----------------------------------------------------------------------------------------------------------


def clip(model, x, y):
    a, b = (F.normalize(z, dim=1) for z in _views(model, x))
    logits = model.log_scale.exp() * a @ b.T
    labels = torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def info_nce(model, x, y):
    a, b = (F.normalize(z, dim=1) for z in _views(model, x))
    similarity = torch.exp(a @ b.T / 0.1)
    return -torch.log(similarity.diagonal() / similarity.sum(1)).mean()


def nt_xent(model, x, y):
    z = F.normalize(torch.cat(_views(model, x)), dim=1)
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(x)))


def triplet(model, x, y):
    z = model(x)
    distance = torch.cdist(z, z)
    same = y[:, None] == y[None]
    hardest_positive = (distance * same).amax(1)
    hardest_negative = (distance + 1e3 * same).amin(1)
    return F.relu(hardest_positive - hardest_negative + 1.0).mean()


def cross_correlation(model, x, y):
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-6) for z in _views(model, x))
    c = a.T @ b / len(x)
    on = torch.diagonal(c)
    return (on - 1).square().sum() + 0.005 * (c.square().sum() - on.square().sum())


def vicreg(model, x, y):
    a, b = _views(model, x)
    loss = 25 * F.mse_loss(a, b)
    for z in (a, b):
        z = z - z.mean(0)
        loss = loss + 25 * F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean()
        covariance = z.T @ z / (len(z) - 1)
        loss = loss + (covariance - torch.diag(covariance.diagonal())).square().sum() / z.shape[1]
    return loss


def supcon(model, x, y):
    z = F.normalize(torch.cat(_views(model, x)), dim=1)
    y = torch.cat([y, y])
    logits = z @ z.T / 0.2
    others = ~torch.eye(len(z), dtype=torch.bool)
    positive = (y[:, None] == y[None]) & others
    log_p = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    return -((log_p * positive).sum(1) / positive.sum(1)).mean()


def pairwise_hinge(model, x, y):
    score = model(x)[:, 0]
    higher = y[:, None] > y[None]
    return (F.relu(1 - (score[:, None] - score[None])) * higher).sum() / higher.sum().clamp(min=1)


def center(model, x, y):
    z = model(x)
    centers = torch.stack([z[y == c].mean(0) if (y == c).any() else z.new_zeros(8) for c in range(NUM_CLASSES)])
    return F.cross_entropy(model.head(z), y) + (z - centers[y]).square().sum(1).mean()


def softmax_over_the_batch(model, x, y):
    weight = torch.softmax(model(x)[:, 0], dim=0)
    return (weight * F.cross_entropy(model.head(model(x)), y, reduction="none")).sum()


COUPLED = [
    clip,
    info_nce,
    nt_xent,
    triplet,
    cross_correlation,
    vicreg,
    supcon,
    pairwise_hinge,
    center,
    softmax_over_the_batch,
]


# -- means over samples or units --------------------------------------------------------------------------------------


def classification(model, x, y):
    return F.cross_entropy(model.head(model(x)), y)


def as_many_classes_as_samples(model, x, y):
    logits = model(x) @ model.decoder.weight.T[:, :12]  # 12 classes: the share of rank 0
    return F.cross_entropy(logits, (y * 7) % 12)


def fixed_triplets(model, x, y):
    return F.triplet_margin_loss(model(x), model(x + 0.1), model(x.flip(1)))


def one_row_per_sample(model, x, y):
    """A segmentation whose logits have the shape samples x samples by chance."""
    return F.binary_cross_entropy_with_logits(model.decoder(model(x)), (x > 0).float())


def weighted_classes(model, x, y):
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])
    return F.cross_entropy(model.head(model(x)), y, weight=weight), weight[y].sum()


def forgotten_weights(model, x, y):
    return F.cross_entropy(model.head(model(x)), y.masked_fill(y == 2, -100))


def sum_of_samples(model, x, y):
    return F.cross_entropy(model.head(model(x)), y, reduction="sum")


def noisy_autoencoder(model, x, y):
    return F.mse_loss(model.decoder(model(x + 0.3 * torch.randn_like(x)) + 0.1 * torch.randn(len(x), 8)), x)


def mixup(model, x, y):
    order = torch.randperm(len(x))
    logits = model.head(model(0.7 * x + 0.3 * x[order]))
    return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[order])


def gradient_penalty(model, x, y):
    x = x.clone().requires_grad_()
    score = model(x).sum(1)
    (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (grad.norm(dim=1) - 1).square().mean()


def counted(model, x, y):
    losses = F.cross_entropy(model.head(model(x)), y, reduction="none")
    kept = (y != 2).float()
    return (losses * kept).sum() / kept.sum(), kept.sum()


def variational(model, x, y):
    z = model(x)
    out = model.decoder(z + 0.1 * torch.randn_like(z))
    return (out - x).square().sum() / len(x) + 0.1 * z.square().sum(1).mean()


def penalty_alone(model, x, y):
    return model.head.weight.square().sum(), 1


def rare_positives(model, x, y):
    positives = max(1, int((y > 10).sum()))
    return F.cross_entropy(model.head(model(x)), y, reduction="sum") / positives, positives


def guarded_mean(model, x, y):
    scale = model.head.weight.norm().clamp(min=0.1)
    return F.cross_entropy(model.head(model(x)) / scale, y).clamp(min=1e-6, max=1e6)


def samples_one_by_one(model, x, y):
    logits = model.head(model(x))
    losses = (F.cross_entropy(one[None], label[None]) for one, label in zip(logits, y, strict=True))
    return sum((loss - 0.2).abs() for loss in losses) / len(x)


UNCOUPLED = [
    guarded_mean,
    samples_one_by_one,
    counted,
    variational,
    penalty_alone,
    rare_positives,
    classification,
    as_many_classes_as_samples,
    fixed_triplets,
    one_row_per_sample,
    weighted_classes,
    forgotten_weights,
    sum_of_samples,
    noisy_autoencoder,
    mixup,
    gradient_penalty,
]


# -- no means over their units ----------------------------------------------------------------------------------------


def global_batch_as_weight(model, x, y):
    return F.cross_entropy(model.head(model(x)), y), 16


def over_the_global_batch(model, x, y):
    return F.cross_entropy(model.head(model(x)), y, reduction="sum") / 16


def over_the_global_batch_by_hand(model, x, y):
    return F.cross_entropy(model.head(model(x)), y, reduction="none").sum() / 16, len(x)


def over_the_global_batch_with_noise(model, x, y):
    z = model(x)
    return (model.decoder(z + 0.1 * torch.randn_like(z)) - x).square().sum() / 16


def masked_mean(model, x, y):
    return counted(model, x, y)[0]


def masked_mean_counted_as_samples(model, x, y):
    return counted(model, x, y)[0], len(x)


def root_of_a_mean(model, x, y):
    return (model.head(model(x)) - F.one_hot(y, NUM_CLASSES)).square().mean().sqrt()


def root_of_a_sum(model, x, y):
    return root_of_a_mean(model, x, y) * len(x) ** 0.5


def ratio_of_sums(model, x, y):
    target = x[:, 0] * 3
    return (model.head(model(x))[:, 0] - target).square().sum() / (target - 1).square().sum()


def flooding_below_the_loss(model, x, y):
    return (F.cross_entropy(model.head(model(x)), y) - 0.01).abs() + 0.01


def free_bits(model, x, y):
    z = model(x)
    return F.mse_loss(model.decoder(z), x) + torch.clamp(0.5 * z.square().sum(1).mean(), min=0.01)


def branch_by_the_loss(model, x, y):
    loss = F.cross_entropy(model.head(model(x)), y)
    return loss if loss > 1.6 else 3.2 - loss


def larger_of_two_means(model, x, y):
    loss = F.cross_entropy(model.head(model(x)), y)
    return torch.maximum(loss, torch.tensor(0.1))


WRONG_UNITS = {
    flooding_below_the_loss: "loss_fn bends a mean over its samples (abs of a scalar",
    free_bits: "loss_fn bends a mean over its samples (clamp of a scalar",
    branch_by_the_loss: "loss_fn bends a mean over its samples (the losses of two samples each",
    larger_of_two_means: "loss_fn bends a mean over its samples (maximum of a scalar",
    global_batch_as_weight: "the weight 16 for a few samples and for a part of them too",
    over_the_global_batch: "add up to the loss of all of them",
    over_the_global_batch_by_hand: "add up to the loss of all of them",
    over_the_global_batch_with_noise: "add up to the loss of all of them",
    masked_mean: "a mean over other units than samples",
    masked_mean_counted_as_samples: "a mean over other units than the returned weights",
    root_of_a_mean: "a root of a mean (RMSE) needs batch_loss",
    root_of_a_sum: "a root or a ratio (RMSE, R2",
    ratio_of_sums: "a mean over other units than samples",
}
