"""DistributedSampler with torchrun, with the usual mistakes fixed.

    torchrun --nproc-per-node 2 examples/classic/distributed_sampler_plain.py

Comments name each usual mistake at the line that fixes it.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from toy import Net, options, spirals

args = options(__doc__)
if args.double:
    torch.set_default_dtype(torch.float64)

if torch.cuda.is_available():
    # Usual mistake: RANK, which is not a GPU index on the second machine.
    device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
    torch.cuda.set_device(device)
else:
    device, backend = torch.device("cpu"), "gloo"
dist.init_process_group(backend)  # reads torchrun's variables
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(args.seed)
train_set, test_set = spirals(1500, seed=1), spirals(299, seed=2)
# Usual mistake: the global batch here. DataLoader's batch_size is that of one rank, so 2 ranks would train with 128.
if args.batch_size % world_size:
    raise SystemExit(f"a global batch of {args.batch_size} cannot be split into {world_size} equal parts")
# drop_last=True: all ranks have equally many samples in each step, including the last, so DDP's mean over ranks is the mean
# over samples. The price: up to world_size - 1 samples per epoch are left out. Usual mistake: drop_last=False, which uses
# samples twice instead.
sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
loader = DataLoader(train_set, batch_size=args.batch_size // world_size, sampler=sampler)
model = Net().to(device)
parallel = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
optimizer = torch.optim.SGD(parallel.parameters(), lr=args.lr, momentum=0.9)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)  # usual mistake: left out, so that every epoch has the same order
    total_loss = torch.zeros((), device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total_loss += loss.detach() * len(y)
    dist.all_reduce(total_loss)
    if rank == 0:
        print(f"epoch {epoch}: loss {total_loss.item() / sampler.total_size:.6f}")

# Usual mistake: a DistributedSampler here, which shuffles, and counts one of 299 samples twice on 2 ranks.
model.eval()
num_right = torch.zeros((), dtype=torch.int64, device=device)
with torch.no_grad():
    for x, y in DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=256):
        num_right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
dist.all_reduce(num_right)
if rank == 0:
    print(f"{num_right.item()} of {len(test_set)} right")
    torch.save(model.state_dict(), args.save)

dist.destroy_process_group()
