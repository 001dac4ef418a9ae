"""The training of distributed_sampler_plain.py with Evenload: every sample exactly once, on any number of ranks.

    evenload run -d cpu:2 examples/classic/distributed_sampler_evenload.py

distributed_sampler.diff shows the changes; README.md explains why the weights are equal.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler
from toy import Net, options, spirals

import evenload

args = options(__doc__)
if args.double:
    torch.set_default_dtype(torch.float64)

run = evenload.init(seed=args.seed)


class SameOrder(Sampler):
    """The order of DistributedSampler, to compare the two scripts; usually shuffle=True suffices."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed, self.epoch = num_samples, seed, 0

    def set_epoch(self, epoch: int) -> None:  # called by Evenload
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.num_samples, generator=generator).tolist())

    def __len__(self) -> int:
        return self.num_samples


train_set, test_set = spirals(1500, seed=1), spirals(299, seed=2)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=SameOrder(len(train_set), args.seed))
model, loader = run.prepare(Net(), loader)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)


def loss_fn(batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


for epoch in range(args.epochs):
    total_loss = 0.0
    for step in loader:
        loss = step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        total_loss += loss.item() * step.num_samples
    if run.is_main:
        print(f"epoch {epoch}: loss {total_loss / len(train_set):.6f}")

model.eval()
num_right = 0
with torch.no_grad():
    for x, y in run.batches(DataLoader(test_set, batch_size=256)):
        num_right += (model(x).argmax(1) == y).sum().item()
num_right = run.reduce(num_right)
if run.is_main:
    print(f"{num_right} of {len(test_set)} right")

run.export(args.save)
