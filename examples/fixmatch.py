"""Semi-supervised learning (FixMatch): 100 labeled and 1,297 unlabeled digits of scikit-learn, a batch of each in every step.

    python examples/fixmatch.py                                  # one device
    evenload run -d cpu:2 examples/fixmatch.py                   # two CPU ranks

A tuple of loaders makes one loader. A step has 16 labeled and 112 unlabeled images: 16 units of 1 + 7, which the devices share.
`--unlabeled-weight 0` trains on the labeled digits alone.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import evenload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=100, help="epochs of the labeled digits, of 6 steps each")
parser.add_argument(
    "--batch-size", type=int, default=16, help="labeled digits in a step, over all devices; 7 unlabeled for each"
)
parser.add_argument("--unlabeled-weight", type=float, default=1.0)
parser.add_argument("--threshold", type=float, default=0.9, help="confidence from which a guess counts as a label")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, help="seed of the weights, the order and the changes; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/fixmatch by default")
args = parser.parse_args()


class TwoViews(Dataset):
    """A digit changed a little and changed a lot. The changes are drawn here, so they depend on the digit's position alone."""

    def __init__(self, digits: Dataset) -> None:
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        image, label = self.digits[index]
        strong = shifted(image) + 0.2 * torch.randn(8, 8)
        row, column = torch.randint(0, 6, (2,)).tolist()
        strong[row : row + 3, column : column + 3] = 0.5
        return shifted(image), strong, label


def shifted(image: torch.Tensor) -> torch.Tensor:
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return torch.roll(image, (down, right), (0, 1))


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
digits = TensorDataset((images / 16).float().view(-1, 8, 8), labels)
order = torch.randperm(
    len(digits), generator=torch.Generator().manual_seed(0)
).tolist()  # the same split for every seed
labeled_set, unlabeled_set, val_set = (Subset(digits, part) for part in (order[:100], order[100:1397], order[1397:]))

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
labeled = DataLoader(TwoViews(labeled_set), batch_size=args.batch_size, shuffle=True, drop_last=True)
unlabeled = DataLoader(TwoViews(unlabeled_set), batch_size=7 * args.batch_size, shuffle=True)
val_loader = DataLoader(val_set, batch_size=100)
model, loader = run.prepare(model, (labeled, unlabeled))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
run.resume(model=model, optimizer=optimizer)


def loss_fn(batch: tuple[list[torch.Tensor], list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    (view, _, label), (weak, strong, _) = batch  # the labels of the second loader are not used
    with torch.no_grad():
        confidence, guess = model(weak).softmax(1).max(1)
    sure = (confidence >= args.threshold).float()
    unlabeled_loss = (functional.cross_entropy(model(strong), guess, reduction="none") * sure).mean()
    loss = functional.cross_entropy(model(view), label) + args.unlabeled_weight * unlabeled_loss
    return {"loss": loss, "sure": sure.mean()}


for epoch in range(loader.epoch, args.epochs):
    for step in loader:
        loss = step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": loss, **step.metrics})
    run.checkpoint(every="1min")
    if (epoch + 1) % 10 == 0 or epoch + 1 == args.epochs:
        with torch.no_grad():
            num_right = sum((model(x).argmax(1) == y).sum().item() for x, y in run.batches(val_loader))
        accuracy = run.reduce(num_right) / len(val_set)
        run.log({"val_accuracy": accuracy})
        if run.is_main:
            print(
                f"epoch {epoch}: loss {loss:.6f}, {step.metrics['sure']:.0%} of the guesses count, accuracy {accuracy:.1%}"
            )
