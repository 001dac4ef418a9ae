"""The training of gpt_plain.py with Evenload.

evenload run -d cpu:2 examples/ports/gpt_evenload.py
"""

import argparse
import math

import torch
from gpt_model import GPT, load_data
from torch.utils.data import DataLoader, Dataset, RandomSampler

import evenload

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=48, help="windows of a step, on all devices together")
parser.add_argument("--block-size", type=int, default=64)
parser.add_argument("--n-layer", type=int, default=2)
parser.add_argument("--n-head", type=int, default=2)
parser.add_argument("--n-embd", type=int, default=64)
parser.add_argument("--learning-rate", type=float, default=3e-3)
parser.add_argument("--min-lr", type=float, default=3e-4)
parser.add_argument("--weight-decay", type=float, default=0.1)
parser.add_argument("--grad-clip", type=float, default=1.0)
parser.add_argument("--warmup-iters", type=int, default=20)
parser.add_argument("--max-iters", type=int, default=200)
parser.add_argument("--eval-interval", type=int, default=50)
parser.add_argument("--precision", choices=("no", "bf16", "fp16"), default="no")
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--out-dir", default="runs/gpt")
args = parser.parse_args()

run = evenload.init(project_dir=args.out_dir, seed=args.seed, precision=args.precision)
torch.manual_seed(args.seed)

train_data, val_data = load_data()


class Windows(Dataset):
    def __init__(self, data, starts):
        self.data, self.starts = data, starts

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        i = self.starts[index]
        return self.data[i : i + args.block_size].long(), self.data[i + 1 : i + 1 + args.block_size].long()


train_set = Windows(train_data, range(len(train_data) - args.block_size))
val_set = Windows(val_data, range(0, len(val_data) - args.block_size, args.block_size))
generator = torch.Generator().manual_seed(args.seed)
sampler = RandomSampler(train_set, replacement=True, num_samples=args.max_iters * args.batch_size, generator=generator)
loader = DataLoader(train_set, args.batch_size, sampler=sampler)
val_loader = DataLoader(val_set, args.batch_size)


@torch.no_grad()
def estimate_loss():
    model.eval()
    total_loss, num_windows = 0.0, 0
    for x, y in run.batches(val_loader):
        _, loss = model(x, y)
        total_loss += loss.item() * len(x)
        num_windows += len(x)
    model.train()
    total_loss, num_windows = run.reduce([total_loss, num_windows])
    return total_loss / num_windows


def get_lr(iteration):
    if iteration < args.warmup_iters:
        return args.learning_rate * (iteration + 1) / (args.warmup_iters + 1)
    done = (iteration - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.min_lr + 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0))) * (args.learning_rate - args.min_lr)


model = GPT(args.block_size, args.n_layer, args.n_head, args.n_embd)
model, loader = run.prepare(model, loader)
optimizer = model.configure_optimizers(args.weight_decay, args.learning_rate)
saved = run.resume(model=model, optimizer=optimizer)
best_val_loss = saved.get("best_val_loss", float("inf"))


def loss_fn(batch):
    x, y = batch
    return model(x, y)[1]


for _ in range(loader.epoch, 1):  # the sampler draws all iterations as one epoch
    for step in loader:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step.index)
        if step.index % args.eval_interval == 0:
            val_loss = estimate_loss()
            run.print(f"step {step.index}: val loss {val_loss:.6f}")
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                run.export(f"{args.out_dir}/best.pt")
        step.backward(loss_fn)
        if args.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.checkpoint(every="10min", values={"best_val_loss": best_val_loss})

val_loss = estimate_loss()
run.print(f"step {args.max_iters}: val loss {val_loss:.6f}")
