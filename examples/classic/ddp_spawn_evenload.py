"""The training of ddp_spawn_plain.py with evenload.spawn: all GPUs of this machine, else two CPU ranks.

    python examples/classic/ddp_spawn_evenload.py

ddp_spawn.diff shows the changes; README.md explains why the weights are equal.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler
from toy import Net, options, spirals

import evenload


def train(args: argparse.Namespace) -> None:
    if args.double:
        torch.set_default_dtype(torch.float64)
    run = evenload.init(seed=args.seed)

    train_set, test_set = spirals(1437, seed=1), spirals(299, seed=2)
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

    model.eval()
    num_right = 0
    with torch.no_grad():
        for x, y in run.batches(DataLoader(test_set, batch_size=256)):
            num_right += (model(x).argmax(1) == y).sum().item()
    num_right = run.reduce(num_right)
    if run.is_main:
        print(f"{num_right} of {len(test_set)} right")

    run.export(args.save)


if __name__ == "__main__":
    args = options(__doc__)
    evenload.spawn(train, devices="auto" if torch.cuda.is_available() else "cpu:2", args=(args,))
