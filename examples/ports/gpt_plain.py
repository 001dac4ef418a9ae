"""Train a small GPT on random windows of a text: the loop made well known by nanoGPT, with DDP.

    python examples/ports/gpt_plain.py
    torchrun --nproc-per-node 2 examples/ports/gpt_plain.py

Written for this project from the description of that loop. gpt_evenload.py is the same training with Evenload.
"""

import argparse
import contextlib
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt_model import GPT, load_data

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=12, help="windows of a micro-batch")
parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
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
parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--out-dir", default="runs/gpt")
parser.add_argument("--init-from", choices=("scratch", "resume"), default="scratch")
args = parser.parse_args()

ddp = "RANK" in os.environ
device = "cuda" if torch.cuda.is_available() else "cpu"
rank, world_size = 0, 1
if ddp:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    assert args.gradient_accumulation_steps % world_size == 0
    args.gradient_accumulation_steps //= world_size
torch.manual_seed(args.seed)
generator = torch.Generator().manual_seed(args.seed + rank)
autocast = contextlib.nullcontext()
if args.dtype != "float32":
    autocast = torch.autocast(device.split(":")[0], getattr(torch, args.dtype))
scaler = torch.amp.GradScaler(enabled=args.dtype == "float16")

train_data, val_data = load_data()


def windows(data, starts):
    x = torch.stack([data[i : i + args.block_size].long() for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + args.block_size].long() for i in starts])
    return x.to(device), y.to(device)


def get_batch():
    return windows(
        train_data, torch.randint(len(train_data) - args.block_size, (args.batch_size,), generator=generator)
    )


@torch.no_grad()
def estimate_loss():
    model.eval()
    total_loss, num_windows = 0.0, 0
    starts = range(0, len(val_data) - args.block_size, args.block_size)
    for low in range(0, len(starts), args.batch_size):
        x, y = windows(val_data, starts[low : low + args.batch_size])
        _, loss = model(x, y)
        total_loss += loss.item() * len(x)
        num_windows += len(x)
    model.train()
    return total_loss / num_windows


def get_lr(iteration):
    if iteration < args.warmup_iters:
        return args.learning_rate * (iteration + 1) / (args.warmup_iters + 1)
    done = (iteration - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.min_lr + 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0))) * (args.learning_rate - args.min_lr)


model = GPT(args.block_size, args.n_layer, args.n_head, args.n_embd).to(device)
optimizer = model.configure_optimizers(args.weight_decay, args.learning_rate)
iter_num, best_val_loss = 0, float("inf")
path = Path(args.out_dir) / "ckpt.pt"
if args.init_from == "resume":
    checkpoint = torch.load(path, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
raw_model = model
if ddp:
    model = torch.nn.parallel.DistributedDataParallel(model)

x, y = get_batch()
while iter_num < args.max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % args.eval_interval == 0 and rank == 0:
        val_loss = estimate_loss()
        print(f"step {iter_num}: val loss {val_loss:.6f}")
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
            }
            torch.save(checkpoint, path)
    for micro_step in range(args.gradient_accumulation_steps):
        if ddp:  # synchronize gradients at the last micro-batch only
            model.require_backward_grad_sync = micro_step == args.gradient_accumulation_steps - 1
        with autocast:
            _, loss = model(x, y)
            loss = loss / args.gradient_accumulation_steps
        x, y = get_batch()
        scaler.scale(loss).backward()
    if args.grad_clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

if rank == 0:
    print(f"step {iter_num}: val loss {estimate_loss():.6f}")
if ddp:
    dist.destroy_process_group()
