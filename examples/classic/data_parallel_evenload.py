"""The training of data_parallel_plain.py with Evenload: one process per device, shares by speed, also on CPUs.

    python examples/classic/data_parallel_evenload.py
    evenload run -d cpu:2 examples/classic/data_parallel_evenload.py

data_parallel.diff shows the changes; README.md explains why the weights are equal.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler
from toy import Net, options, spirals

import evenload

args = options(__doc__)
if args.double:
    torch.set_default_dtype(torch.float64)

run = evenload.init(seed=args.seed)

train_set, test_set = spirals(1437, seed=1), spirals(299, seed=2)
# The batch size is global. The order is that of the plain script; usually shuffle=True suffices.
order = torch.Generator().manual_seed(args.seed)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=RandomSampler(train_set, generator=order))
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
        # Usual mistake: the mean of the batch means, in which the last batch (29 samples) counts as much as the others.
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
