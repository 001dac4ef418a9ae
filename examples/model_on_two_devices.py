"""Train a model that is too large for one device, split over two: a deep stack of blocks that classifies digits.

    python examples/model_on_two_devices.py                          # two GPUs, or one GPU and the CPU, or the CPU twice
    python examples/model_on_two_devices.py --devices cuda:0,cpu
    evenload run -d 0+1 examples/model_on_two_devices.py             # the same with the launcher
    evenload run -d 0+1,2+3 examples/model_on_two_devices.py         # two ranks, each with a split model
    evenload run -d cpu+cpu,cpu+cpu examples/model_on_two_devices.py # the same on a CPU

It adds one line to a script for one device: model = evenload.place(model, ...). The loop and the losses do not change.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload

num_gpus = torch.cuda.device_count()
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--devices",
    default=None if num_gpus > 1 else "cuda:0,cpu" if num_gpus else "cpu,cpu",
    help="devices of the model; by default those of -d, or the available ones",
)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, help="optimizer steps in an epoch; all by default")
parser.add_argument("--batch-size", type=int, default=64, help="images in a step, over all ranks")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, help="seed of the weights and the order; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/model_on_two_devices by default")
args = parser.parse_args()


class Block(nn.Module):
    """A residual MLP block with pre-normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Reader(nn.Module):
    """A classifier of 8 x 8 images into ten digits, written without devices."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.pixels = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.digit = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pixels(x)
        for block in self.blocks:
            x = block(x)
        return self.digit(self.norm(x))


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

images, digits = load_digits(return_X_y=True)
images, digits = torch.from_numpy(images).float() / 16, torch.from_numpy(digits)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, val = order[:1437], order[1437:]
if args.steps:
    train = train[: args.steps * args.batch_size]
train_set, val_set = (TensorDataset(images[rows], digits[rows]) for rows in (train, val))

model = Reader(args.width, args.depth)
devices = args.devices.split(",") if args.devices else None
model = evenload.place(model, devices, example=images[: args.batch_size])  # before prepare; prints the split
loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
run.resume(model=model, optimizer=optimizer)


def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)  # the output is on the device of x and y


for epoch in range(loader.epoch, args.epochs):
    model.train()
    for step in loader:
        loss = step.backward(loss_fn)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": loss})
    run.checkpoint()

    model.eval()
    num_right, total_loss = 0, 0.0
    with torch.no_grad():
        for x, y in run.batches(DataLoader(val_set, batch_size=args.batch_size)):
            logits = model(x)
            num_right += (logits.argmax(1) == y).sum().item()
            total_loss += F.cross_entropy(logits, y, reduction="sum").item()
    num_right, total_loss = run.reduce((num_right, total_loss))
    run.log({"val_loss": total_loss / len(val_set), "val_accuracy": num_right / len(val_set)})
    if run.is_main:
        print(f"epoch {epoch}: validation loss {total_loss / len(val_set):.6f}, {num_right} of {len(val_set)} right")
