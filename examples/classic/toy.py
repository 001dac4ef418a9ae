"""Data, model and options of all scripts in this folder."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import TensorDataset


def options(description: str | None) -> argparse.Namespace:
    """Parse the command line; ``--double`` computes in float64, to compare two scripts to the last digits."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all devices")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--save", default="weights.pt", help="where the weights are written")
    return parser.parse_args()


def spirals(num_samples: int, seed: int) -> TensorDataset:
    """Return points on three arms of a spiral, and the arm of each."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (num_samples,), generator=generator)
    radius = torch.rand(num_samples, generator=generator)
    noise = 0.15 * torch.randn(num_samples, generator=generator)
    angle = 4 * radius + arm * (2 * math.pi / 3) + noise
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


class Net(nn.Sequential):
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
