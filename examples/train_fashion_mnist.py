"""Train a small convolutional network on Fashion-MNIST: more than 88 % test accuracy after one epoch.

    python examples/train_fashion_mnist.py                        # one device
    evenload run examples/train_fashion_mnist.py                  # all devices of this machine
    evenload run -d cpu:2 --throttle 1,0.5 examples/train_fashion_mnist.py --steps 200   # two unequal ranks

The data: Debian's package dataset-fashion-mnist, a folder (--data), or a download of 30 MB; see fashion_mnist.py.
"""

import argparse

import fashion_mnist
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="a folder with the four files; searched for by default")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--steps", type=int, help="optimizer steps in an epoch; all images by default")
parser.add_argument("--batch-size", type=int, default=64, help="images in a step, over all devices")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--seed", type=int, help="seed of the weights and the order; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/train_fashion_mnist by default")
args = parser.parse_args()


class Net(nn.Module):
    """Two convolutions and two linear layers, from images as bytes (n, 28, 28) to logits (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.hidden, self.classes = nn.Linear(64 * 7 * 7, 128), nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = (images.unsqueeze(1).float() - 73) / 90  # mean and standard deviation of all pixels
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.classes(F.relu(self.hidden(x.flatten(1))))


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

with run.main_first():  # rank 0 downloads first
    folder = fashion_mnist.find(args.data)
images, labels = fashion_mnist.load(folder, "train")
used = len(images) if args.steps is None else args.steps * args.batch_size
train_set = TensorDataset(images[:used], labels[:used])
test_set = TensorDataset(*fashion_mnist.load(folder, "t10k"))

model = Net()
loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)  # the global batch
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(loader))
run.resume(model=model, optimizer=optimizer, scheduler=scheduler)


def loss_fn(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, y = batch
    logits = model(x)
    return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}


for _ in range(loader.epoch, args.epochs):
    for step in loader:
        loss = step.backward(loss_fn)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log({"loss": loss, **step.metrics})  # both are means over the global batch
        run.checkpoint(every="10min")

model.eval()
num_right, total_loss = 0, 0.0
with torch.no_grad():
    for x, y in run.batches(DataLoader(test_set, batch_size=500)):
        logits = model(x)
        num_right += (logits.argmax(1) == y).sum().item()
        total_loss += F.cross_entropy(logits, y, reduction="sum").item()
num_right, total_loss = run.reduce((num_right, total_loss))  # every image exactly once, on any number of devices
if run.is_main:
    accuracy, loss = num_right / len(test_set), total_loss / len(test_set)
    print(f"test accuracy {accuracy:.2%} of {len(test_set):,} images, loss {loss:.6f}")
