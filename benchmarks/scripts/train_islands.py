"""One arm of ``benchmarks islands``: the same GPT by Evenload's strategies, or by torch alone over gloo."""

import argparse
import copy
import json
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import example_classes

parser = argparse.ArgumentParser()
parser.add_argument("--arm", required=True, help="evenload, ddp, bf16, powersgd or diloco")
parser.add_argument("--store", default="", help="host:port, without Evenload")
parser.add_argument("--pids", required=True, help="folder for this process's id")
parser.add_argument("--out", required=True, help="folder for the result")
parser.add_argument("--size", required=True, help="batch, context, width, depth")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--every", type=int, required=True, help="steps between two synchronisations, and two validations")
parser.add_argument("--offset", type=int, required=True, help="steps from a synchronisation to a validation")
parser.add_argument("--validates", type=int, default=1)
args = parser.parse_args()

RANK = int(socket.gethostname() == "box2")
batch_size, context, width, depth = map(int, args.size.split(","))
NUM_WARM = 5
"""Steps that start everything, before the clock does."""
Path(args.pids, str(RANK)).write_text(str(os.getpid()))
time.sleep(0.3)  # the quota holds from here
torch.set_num_threads(1)
torch.manual_seed(0)
library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in library)), dtype=torch.uint8)
classes = example_classes()
model = classes.GPT(width, depth, context)
train_set = classes.Crops(text[:-50_000], batch_size * args.steps, context)
val_loader = DataLoader(classes.Crops(text[-50_000:], 64, context), batch_size=64)
found: dict[str, Any] = {"curve": [], "steps_s": []}
paused_s = 0.0
clock_s = 0.0


def loss_fn(batch: Any) -> torch.Tensor:
    x, y = batch
    loss: torch.Tensor = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
    return loss


def validate(done: int, batches: Callable[[Any], Any]) -> None:
    """Add this rank's part of the loss to the curve; the clock stands still while it is computed."""
    global paused_s
    total, count, seconds = 0.0, 0, 0.0
    for x, y in batches(val_loader):
        began_s = time.perf_counter()
        with torch.no_grad():
            total += float(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"))
        count += y.numel()
        seconds += time.perf_counter() - began_s
    paused_s += seconds
    found["curve"].append((done, time.perf_counter() - clock_s - paused_s, total, count))


def train(
    steps: Any,
    backward: Callable[[Any], Any],
    optimizer: Any,
    after: Callable[[int], None] = lambda _: None,
    batches: Callable[[Any], Any] = lambda loader: loader,
) -> None:
    """Make the steps; `after` gets their number, `batches` returns those of this rank in a validation."""
    global clock_s
    clock_s = time.perf_counter()
    before_s = last_s = 0.0
    for done, batch in enumerate(steps, 1):
        backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        after(done)
        if done == 1:
            found["first_s"] = time.perf_counter() - clock_s
        if done == NUM_WARM:
            before_s = time.perf_counter() - clock_s - paused_s
        if args.validates and (done % args.every == args.offset or done == args.steps):
            validate(done, batches)
        last_s = time.perf_counter() - clock_s - paused_s
    found["warm_s"], found["seconds"] = before_s, last_s
    found["step_s"] = (last_s - before_s) / (args.steps - NUM_WARM)


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


def with_evenload() -> None:
    import evenload

    global net
    run = evenload.init(seed=0, check_every="off")
    torch.set_num_threads(1)  # each machine believes that it has all cores
    net, loader = run.prepare(model, DataLoader(train_set, batch_size=batch_size))
    found["shares"] = []

    def backward(step: Any) -> None:
        found["shares"].append(step.batch.plan.num_samples)
        step.backward(loss_fn)

    train(loader, backward, adamw(), batches=run.batches)
    run.close()


def with_torch() -> None:
    global net
    host, _, port = args.store.partition(":")
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=RANK, world_size=2)
    own = batch_size // 2
    order = [step * batch_size + RANK * own + i for step in range(args.steps) for i in range(own)]
    loader = DataLoader(Subset(train_set, order), batch_size=own)
    optimizer = adamw()
    outer = DiLoCo(model) if args.arm == "diloco" else None
    if outer is not None:
        net = model
    else:
        # Over gloo, on a late link, ranks take the sums of several buckets in different orders, and it ends.
        net = wrapped = DistributedDataParallel(model, bucket_cap_mb=1000 if args.arm == "powersgd" else None)
        if args.arm == "bf16":
            wrapped.register_comm_hook(None, bf16_hook)  # torch's own fails over gloo
        elif args.arm == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(loader, lambda batch: loss_fn(batch).backward(), optimizer, *(() if outer is None else (outer.after,)))
    dist.barrier()
    dist.destroy_process_group()


def bf16_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    small = flat.to(torch.bfloat16).div_(2)
    work = dist.all_reduce(small, async_op=True)

    def decode(future: Any) -> torch.Tensor:
        flat.copy_(small)
        return flat

    result: torch.futures.Future[torch.Tensor] = work.get_future().then(decode)
    return result


class DiLoCo:
    """torchft's: equal steps, a blocking average of the pseudo-gradients in float32, Nesterov outside."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())
        self._start = [param.detach().clone() for param in self._params]
        self._outer = torch.optim.SGD(self._start, lr=OUTER[0], momentum=OUTER[1], nesterov=OUTER[1] > 0)

    def after(self, done: int) -> None:
        """Synchronise if it is time."""
        if done % args.every:
            return
        flat = torch.cat([(s - p.detach()).flatten() for s, p in zip(self._start, self._params, strict=True)])
        dist.all_reduce(flat)
        for start, part in zip(self._start, torch.split(flat / 2, [s.numel() for s in self._start]), strict=True):
            start.grad = part.view_as(start)
        self._outer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._start)


OUTER = (1.0, 0.0)
"""The plain average: with DiLoCo's momentum of 0.9 a few synchronisations do not get far."""
net: nn.Module = copy.copy(model)
(with_evenload if args.arm == "evenload" else with_torch)()
Path(args.out, f"{RANK}.json").write_text(json.dumps(found))
