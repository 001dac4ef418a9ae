"""The training of by_hand_plain.py with Evenload, which handles sums, parts and order.

    evenload run -d cpu:2 examples/classic/by_hand_evenload.py

by_hand.diff shows the changes; README.md explains why the weights are equal.
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

train_set = spirals(1437, seed=1)
# The order is that of the plain script, to compare the two; usually shuffle=True suffices.
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
        total_loss += loss.item() * step.num_samples
    if run.is_main:
        print(f"epoch {epoch}: loss {total_loss / len(train_set):.6f}")

run.export(args.save)
