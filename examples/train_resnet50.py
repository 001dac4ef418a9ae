"""Train ResNet-50 on Fashion-MNIST or on your own images, with one folder per class.

    python examples/train_resnet50.py --steps 100                                # one device
    evenload run examples/train_resnet50.py                                      # all devices of this machine
    evenload run examples/train_resnet50.py --images photos --size 224 --weights resnet50.pth

--weights takes a state_dict with torchvision's names, or `torchvision` to download its weights; a last layer for other classes
is skipped. BatchNorm computes its statistics over all devices, so the split does not change the result.
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
parser.add_argument("--images", type=Path, help="a folder with one subfolder per class; Fashion-MNIST by default")
parser.add_argument("--data", help="folder of the Fashion-MNIST files; searched for by default")
parser.add_argument("--weights", help="file with an initial state_dict, or torchvision")
parser.add_argument("--size", type=int, default=64, help="image size in pixels; most weights were trained with 224")
parser.add_argument("--width", type=int, default=64, help="channels of the first layer; 64 is ResNet-50")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--steps", type=int, help="optimizer steps in an epoch; all images by default")
parser.add_argument("--batch-size", type=int, default=64, help="images in a step, over all devices")
parser.add_argument("--workers", type=int, default=0, help="loader workers per device")
parser.add_argument("--every", type=int, default=100, help="print the mean loss after this many steps")
parser.add_argument("--seed", type=int, help="seed of the weights and the order; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/train_resnet50 by default")
parser.add_argument("--export", type=Path, help="file to write the weights to at the end")
args = parser.parse_args()


class Bottleneck(nn.Module):
    """A residual bottleneck of three convolutions."""

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
    """He et al. 2015, with the stride in the 3 x 3 convolution and torchvision's parameter names."""

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
    """Normalize bytes (3, size, size) with the mean and deviation of ImageNet, as most pretrained weights expect."""
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    return (image / 255 - mean) / std


class FashionMNIST(Dataset):
    """Grayscale images of 28 x 28 as color images of another size."""

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
    """Images in the subfolders of a folder, one class each, center-cropped to a square."""

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
            raise SystemExit(f"--images {folder}: found no images in its {len(self.classes)} subfolders")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with self.open(path) as image:
            square = self.fit(image.convert("RGB"), (self.size, self.size))
        return normalise(torch.from_numpy(np.array(square)).permute(2, 0, 1)), label


def pretrained(weights: str) -> dict[str, torch.Tensor]:
    """Load a state_dict from a file or from torchvision."""
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
    """Load the weights, without the last layer if its number of classes differs."""
    own, last = model.state_dict(), ("fc.weight", "fc.bias")
    fitting = {name: w for name, w in weights.items() if name not in last or w.shape == own[name].shape}
    missing, unknown = model.load_state_dict(fitting, strict=False)
    if unknown or set(missing) - set(last):
        raise SystemExit(
            f"--weights {args.weights} does not fit ResNet-50: missing {missing[:3]}, unexpected {unknown[:3]}"
        )


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

with run.main_first():  # rank 0 downloads first
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
        losses.append(loss.item())  # already of the global batch
        if len(losses) == args.every:
            if run.is_main:
                index = step.index % len(loader) + 1
                print(f"[epoch {epoch + 1}, step {index:5d} of {len(loader)}] loss {sum(losses) / args.every:.4f}")
            losses.clear()

if args.export:
    run.export(args.export)
