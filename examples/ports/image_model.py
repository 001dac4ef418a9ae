"""Data and model of the image port: scikit-learn's bundled digits, and a small residual network with BatchNorm."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,500 images of 1 x 8 x 8 pixels for training and 297 for validation."""
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.get_default_dtype())[:, None] / 16
    labels = torch.as_tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out)
        self.conv2, self.norm2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False), nn.BatchNorm2d(num_out)
        self.shortcut = nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Sequential):
    def __init__(self, width: int = 16) -> None:
        super().__init__(
            Block(1, width, 1),
            Block(width, 2 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )
