"""Train a small GAN to draw digits: two models, two optimizers, and three passes per step.

    python examples/gan.py                                       # one device
    evenload run -d cpu:2 examples/gan.py                        # two CPU ranks

The data are the 1,797 images of 8 x 8 pixels bundled with scikit-learn. At the end the script prints samples as text.
"""

import argparse
from statistics import fmean

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--steps", type=int, help="optimizer steps in an epoch; all images by default")
parser.add_argument("--batch-size", type=int, default=64, help="images in a step, over all devices")
parser.add_argument("--noise", type=int, default=16, help="size of the generator's input")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, help="seed of the weights and the order; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/gan by default")
args = parser.parse_args()


class WithNoise(Dataset):
    """Images, each with its own noise.

    Drawn here, the noise belongs to the sample (seed, epoch and position), whichever rank computes it: the training is the
    same on any number of devices. Drawn in loss_fn it would belong to the rank: as good, but not the same.
    """

    def __init__(self, images: torch.Tensor, num_noise: int) -> None:
        self.images, self.num_noise = images, num_noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], torch.randn(self.num_noise)


def draw(images: torch.Tensor) -> str:
    """Format images of 64 numbers from -1 to 1 side by side as text."""
    shades = " .:-=+*#%@"
    rows = ((images.clamp(-1, 1) + 1) / 2 * 9).round().int().view(-1, 8, 8)
    return "\n".join("   ".join("".join(2 * shades[p] for p in row) for row in rows[:, y].tolist()) for y in range(8))


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

images = torch.from_numpy(load_digits().data).float() / 8 - 1  # (1797, 64), from -1 to 1
used = len(images) if args.steps is None else args.steps * args.batch_size
loader = DataLoader(WithNoise(images[:used], args.noise), batch_size=args.batch_size, shuffle=True, drop_last=True)

generator = nn.Sequential(nn.Linear(args.noise, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
generator.extend([nn.Linear(128, 64), nn.Tanh()])  # pixels from -1 to 1
discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2))
discriminator.append(nn.Linear(64, 1))  # the logit that the image is real
generator, discriminator, loader = run.prepare(generator, discriminator, loader)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
run.resume(generator=generator, discriminator=discriminator, optimizer_g=optimizer_g, optimizer_d=optimizer_d)


def taken_for(images: torch.Tensor, real: float) -> torch.Tensor:
    """Return the discriminator's loss for images that are real (1) or not (0)."""
    logits = discriminator(images)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def on_real(batch: list[torch.Tensor]) -> torch.Tensor:
    image, _ = batch
    return taken_for(image, 0.9)  # one-sided label smoothing, so that the generator keeps learning


def on_fake(batch: list[torch.Tensor]) -> torch.Tensor:
    _, noise = batch
    return taken_for(generator(noise).detach(), 0.0)


def fooling(batch: list[torch.Tensor]) -> torch.Tensor:
    _, noise = batch
    return taken_for(generator(noise), 1.0)


for epoch in range(loader.epoch, args.epochs):
    losses = []
    for step in loader:
        optimizer_d.zero_grad()  # includes gradients from the generator's pass in the previous step
        loss_d = step.backward(on_real) + step.backward(on_fake)  # two passes; their gradients add up
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = step.backward(fooling)  # against the updated discriminator
        optimizer_g.step()

        run.log({"loss_d": loss_d, "loss_g": loss_g})
        losses.append((loss_d.item(), loss_g.item()))
    run.checkpoint(every="1min")
    if run.is_main:
        mean_d, mean_g = (fmean(column) for column in zip(*losses, strict=True))
        print(f"epoch {epoch}: loss of the discriminator {mean_d:.6f}, of the generator {mean_g:.6f}")

if run.is_main:
    noise = torch.randn(5, args.noise, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        print(draw(generator(noise.to(run.device)).cpu()))
