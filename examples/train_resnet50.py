"""ResNet-50 learns 10 classes: Fashion-MNIST, or your own images in a folder for each class.

    python examples/train_resnet50.py --steps 100                                # one device
    evenload run examples/train_resnet50.py                                      # every device here
    evenload run examples/train_resnet50.py --images photos --size 224 --weights resnet50.pth

--weights takes a state_dict with torchvision's names (or `torchvision`, to have it download its own); a last layer for other
classes is left out. BatchNorm takes its statistics over all devices, so the split changes nothing.
"""

import argparse
from pathlib import Path

import fashion_mnist
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import evenload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--images", type=Path, help="a folder with a sub-folder for each class; else Fashion-MNIST")
parser.add_argument("--data", help="the folder of Fashion-MNIST's files; looked for if nobody says")
parser.add_argument("--weights", help="a file with a state_dict to begin with, or torchvision")
parser.add_argument("--size", type=int, default=64, help="pixels of a side; 224 is what most weights were trained with")
parser.add_argument("--width", type=int, default=64, help="channels of the first layer; 64 is ResNet-50")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--steps", type=int, help="optimizer steps in an epoch; all images if nobody says")
parser.add_argument("--batch-size", type=int, default=64, help="images in a step, over all devices")
parser.add_argument("--workers", type=int, default=0, help="processes that read images, for each device")
parser.add_argument("--every", type=int, default=100, help="steps that the printed loss is the mean of")
parser.add_argument("--seed", type=int, help="of the weights and the order; 0 if nobody says")
parser.add_argument("--project-dir", help="the run folder; runs/train_resnet50 if nobody says")
parser.add_argument("--export", type=Path, help="where to write the weights at the end")
args = parser.parse_args()


class Bottleneck(nn.Module):
    """Three convolutions, added to what came in: narrow, look around, widen."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, num_out, 1, bias=False), nn.BatchNorm2d(num_out)
        self.downsample = None
        if stride != 1 or num_in != num_out:
            self.downsample = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """He et al. 2015, with the stride in the 3 x 3 convolution. Its parts are named as torchvision names them."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.layer1 = self._layer(width, width, 3, 1)
        self.layer2 = self._layer(4 * width, 2 * width, 4, 2)
        self.layer3 = self._layer(8 * width, 4 * width, 6, 2)
        self.layer4 = self._layer(16 * width, 8 * width, 3, 2)
        self.fc = nn.Linear(32 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _layer(num_in: int, width: int, depth: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            Bottleneck(num_in, width, stride), *(Bottleneck(4 * width, width, 1) for _ in range(depth - 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def normalise(image: torch.Tensor) -> torch.Tensor:
    """Bytes (3, size, size) as most pretrained weights know them: ImageNet's mean and deviation taken out."""
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    return (image / 255 - mean) / std


class FashionMNIST(Dataset):
    """Grey images of 28 x 28 as colour images of another size."""

    def __init__(self, folder: Path, size: int) -> None:
        self.images, self.labels = fashion_mnist.load(folder, "train")
        self.classes, self.size = fashion_mnist.CLASSES, size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index].float()[None, None]
        image = F.interpolate(image, (self.size, self.size), mode="bilinear", align_corners=False)[0]
        return normalise(image.expand(3, -1, -1)), self.labels[index]


class ImageFolder(Dataset):
    """The images in a folder's sub-folders; each sub-folder is a class. Cut to a square, as large as fits."""

    def __init__(self, folder: Path, size: int) -> None:
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise SystemExit("--images needs Pillow: pip install pillow") from None
        self.open, self.fit, self.size = Image.open, ImageOps.fit, size
        endings = Image.registered_extensions()
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in endings
        ]
        if not self.files:
            raise SystemExit(f"--images {folder}: found no images in sub-folders ({len(self.classes)} sub-folders)")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with self.open(path) as image:
            square = self.fit(image.convert("RGB"), (self.size, self.size))
        return normalise(torch.from_numpy(np.array(square)).permute(2, 0, 1)), label


def pretrained(weights: str) -> dict[str, torch.Tensor]:
    """A state_dict from a file, or torchvision's own."""
    if weights != "torchvision":
        return torch.load(weights, map_location="cpu", weights_only=True)
    try:
        from torchvision.models import ResNet50_Weights
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise SystemExit(
            f"--weights torchvision: it does not import here ({error}); give a state_dict's file"
        ) from None
    return ResNet50_Weights.DEFAULT.get_state_dict(progress=True)


def begin_with(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Takes over the weights; the last layer only where it is for as many classes."""
    own, last = model.state_dict(), ("fc.weight", "fc.bias")
    fitting = {name: w for name, w in weights.items() if name not in last or w.shape == own[name].shape}
    missing, unknown = model.load_state_dict(fitting, strict=False)
    if unknown or set(missing) - set(last):
        raise SystemExit(f"--weights {args.weights} is no ResNet-50's: it lacks {missing[:3]} and has {unknown[:3]}")


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

with run.main_first():  # what must be downloaded, rank 0 downloads for all
    if args.images:
        dataset = ImageFolder(args.images, args.size)
    else:
        dataset = FashionMNIST(fashion_mnist.find(args.data), args.size)
    weights = pretrained(args.weights) if args.weights else {}

model = ResNet50(len(dataset.classes), args.width)
if weights:
    begin_with(model, weights)
sampler = RandomSampler(dataset, num_samples=args.steps and args.steps * args.batch_size)  # None: all of them
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
run.resume(model=model, optimizer=optimizer)


def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


losses = []
for epoch in range(loader.epoch, args.epochs):
    for step in loader:
        loss = step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": loss})
        run.checkpoint(every="10min")
        losses.append(loss.item())  # of the global batch already: nothing to sum over the ranks
        if len(losses) == args.every:
            if run.is_main:
                index = step.index % len(loader) + 1
                print(f"[epoch {epoch + 1}, step {index:5d} of {len(loader)}] loss {sum(losses) / args.every:.4f}")
            losses.clear()

if args.export:
    run.export(args.export)
