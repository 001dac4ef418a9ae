"""Binary classification of a table: a small network on the breast-cancer data bundled with scikit-learn.

    python examples/tabular.py                                   # one device
    evenload run -d cpu:2 examples/tabular.py                    # two CPU ranks

569 rows of 30 measurements; the label is 1 for benign tumors.
"""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32, help="rows in a step, over all devices")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--seed", type=int, help="seed of the weights and the order; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/tabular by default")
args = parser.parse_args()

run = evenload.init(project_dir=args.project_dir, seed=args.seed)

columns, labels = (torch.from_numpy(array).float() for array in load_breast_cancer(return_X_y=True))
order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))  # the same split for every seed
train, val = order[:455], order[455:]
mean, std = columns[train].mean(0), columns[train].std(0)  # of the training rows only
columns = (columns - mean) / std
train_set, val_set = (TensorDataset(columns[rows], labels[rows]) for rows in (train, val))

model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1))
loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)  # the last batch has 7 rows and counts as 7
val_loader = DataLoader(val_set, batch_size=args.batch_size)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
criterion = nn.BCEWithLogitsLoss()
run.resume(model=model, optimizer=optimizer)


def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
    rows, label = batch
    return criterion(model(rows).squeeze(1), label)


for epoch in range(loader.epoch, args.epochs):
    model.train()
    for step in loader:
        loss = step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": loss})
    run.checkpoint(every="1min")

    model.eval()
    num_right, total_loss = 0, 0.0
    with torch.no_grad():
        for rows, label in run.batches(val_loader):  # this rank's part: every row exactly once
            logits = model(rows).squeeze(1)
            num_right += ((logits > 0) == label.bool()).sum().item()
            total_loss += criterion(logits, label).item() * len(label)
    num_right, total_loss = run.reduce((num_right, total_loss))
    accuracy, val_loss = num_right / len(val_set), total_loss / len(val_set)
    run.log({"val_loss": val_loss, "val_accuracy": accuracy})
    if run.is_main:
        print(f"epoch {epoch}: validation loss {val_loss:.6f}, {num_right} of {len(val_set)} right ({accuracy:.1%})")
