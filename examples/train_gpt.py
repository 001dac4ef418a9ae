"""Train a small GPT on the bytes of Python's standard library.

    python examples/train_gpt.py                                              # one device
    evenload run examples/train_gpt.py                                        # all devices of this machine
    evenload run -d cpu:2 --throttle 1,0.5 examples/train_gpt.py --steps 50   # two unequal ranks
    torchrun --nproc-per-node 2 examples/train_gpt.py

The batch size is global, and so is everything that depends on it: the losses of these four runs agree up to rounding.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=1, help="passes over the same crops")
parser.add_argument("--steps", type=int, default=200, help="optimizer steps in an epoch")
parser.add_argument("--batch-size", type=int, default=90, help="crops in a step, over all devices")
parser.add_argument("--context", type=int, default=128, help="bytes in a crop")
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--seed", type=int, help="seed of the weights and the order; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/train_gpt by default")
parser.add_argument("--sample-bytes", type=int, default=400, help="bytes to generate at the end")
args = parser.parse_args()


class Crops(Dataset):
    """`size` crops of a text, one byte longer than the context so that each byte has a next one."""

    def __init__(self, text: torch.Tensor, size: int, context: int) -> None:
        self.text, self.size, self.context = text, size, context

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * 104_729 % (len(self.text) - self.context)  # a prime spreads the crops, few of them equal
        piece = self.text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """A residual block of attention and MLP with pre-normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, 32).permute(2, 0, 3, 1, 4)  # heads of 32
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT that predicts the next byte."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for weight in (self.byte.weight, self.place.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.byte(x) + self.place.weight[: x.shape[1]]
        return self.norm(self.blocks(x)) @ self.byte.weight.T  # the embedding is also the last layer


@torch.no_grad()
def write(model: GPT, prompt: bytes, num_bytes: int, context: int, device: torch.device) -> str:
    """Generate bytes after a prompt."""
    text = torch.tensor([list(prompt)], device=device)
    for _ in range(num_bytes):
        logits = model(text[:, -context:])[:, -1] / 0.7
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in library)), dtype=torch.uint8)
train_text, val_text = text[:-50_000], text[-50_000:]
train_set = Crops(train_text, args.steps * args.batch_size, args.context)
val_set = Crops(val_text, 240, args.context)

model = GPT(args.width, args.depth, args.context)
loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)  # the global batch
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
total_steps = max(11, args.epochs * len(loader))  # with 10, OneCycleLR would divide by zero
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, pct_start=0.1)
run.resume(model=model, optimizer=optimizer, scheduler=scheduler)


def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


for _ in range(loader.epoch, args.epochs):
    for step in loader:
        loss = step.backward(loss_fn)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log({"loss": loss, "lr": scheduler.get_last_lr()[0]})
        run.checkpoint(every="10min")

model.eval()
total_loss, num_bytes = 0.0, 0
with torch.no_grad():
    for x, y in run.batches(DataLoader(val_set, batch_size=args.batch_size)):
        total_loss += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        num_bytes += y.numel()
total_loss, num_bytes = run.reduce((total_loss, num_bytes))  # every crop exactly once, on any number of devices
if run.is_main:
    print(f"validation loss {total_loss / num_bytes:.6f} nats a byte, over {num_bytes:,} bytes")
    print(write(model, b"def ", args.sample_bytes, args.context, run.device))
