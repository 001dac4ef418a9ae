"""Contrastive learning (as in CLIP): the upper and lower half of a handwritten digit find each other among all in the batch.

    python examples/clip_like.py                                  # one device
    evenload run -d cpu:2 examples/clip_like.py                   # two CPU ranks: the same loss over the whole batch

The loss compares each sample with every other, so no device can compute its part alone. `encode` gives embeddings for this
device's samples; `batch_loss` receives those of the whole global batch.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

import evenload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=128, help="digits in a step, over all devices")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, help="seed of the weights and the order; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/clip_like by default")
args = parser.parse_args()


class TwoEncoders(nn.Module):
    """An encoder for each half, and the scale of their similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
        self.lower = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
        self.logit_scale = nn.Parameter(torch.tensor(2.66))


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

images = torch.from_numpy(load_digits().data / 16).float()
halves = TensorDataset(images[:, :32], images[:, 32:])
order = torch.randperm(len(halves), generator=torch.Generator().manual_seed(0)).tolist()
loader = DataLoader(Subset(halves, order[400:]), batch_size=args.batch_size, shuffle=True, drop_last=True)

model, loader = run.prepare(TwoEncoders(), loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
run.resume(model=model, optimizer=optimizer)


def encode(batch):
    upper, lower = batch
    return functional.normalize(model.upper(upper), dim=1), functional.normalize(model.lower(lower), dim=1)


def clip_loss(upper, lower):
    logits = model.logit_scale.exp() * upper @ lower.T
    labels = torch.arange(len(logits), device=logits.device)
    loss = (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2
    return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}


for _ in range(loader.epoch, args.epochs):
    for step in loader:
        loss = step.backward(encode, batch_loss=clip_loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": loss, **step.metrics})
        run.checkpoint(every=100)

model.eval()
if run.is_main:
    with torch.no_grad():
        upper, lower = encode([half[order[:400]].to(run.device) for half in halves.tensors])
        nearest = (upper @ lower.T).topk(5).indices
    found = (nearest == torch.arange(400, device=run.device)[:, None]).any(1).float().mean()
    print(f"{found:.0%} of 400 held-out digits have their other half among the 5 nearest")
