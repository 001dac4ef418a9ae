"""Gradients reduced by hand over gloo, without DDP: the tutorial "Writing Distributed Applications" with its mistakes fixed.

    torchrun --nproc-per-node 2 examples/classic/by_hand_plain.py

Comments name each usual mistake at the line that fixes it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler
from toy import Net, options, spirals

args = options(__doc__)
if args.double:
    torch.set_default_dtype(torch.float64)

dist.init_process_group("gloo")  # reads torchrun's variables
rank, world_size = dist.get_rank(), dist.get_world_size()


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients over all ranks."""
    # Usual mistake: skip parameters without a gradient on one rank only, so that the others wait forever.
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    # One message for all. Usual mistake: one per parameter, most of them too short to be efficient.
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)  # a sum: the losses are already divided by the samples of the whole batch
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p).clone()


torch.manual_seed(args.seed)
train_set = spirals(1437, seed=1)
points, arms = train_set.tensors
model = Net()
# Usual mistake: left out, so that with different seeds each rank trains a different model.
for p in model.parameters():
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
# Usual mistake: split the data once, so that a rank never sees the rest. Here every global batch is split, in an order that is
# the same on all ranks.
order = torch.Generator().manual_seed(args.seed)
batches = BatchSampler(RandomSampler(train_set, generator=order), args.batch_size, drop_last=False)

for epoch in range(args.epochs):
    total_loss = torch.zeros(())
    for batch in batches:
        mine = batch[rank::world_size]  # of the last batch, 29 samples, one rank gets 15 and the other 14
        # Usual mistake: means of unequal parts, averaged over ranks. A rank without samples has loss 0 here.
        loss = F.cross_entropy(model(points[mine]), arms[mine], reduction="sum") / len(batch)
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        total_loss += loss.detach() * len(batch)
    dist.all_reduce(total_loss)  # usual mistake: each rank prints the loss of its part
    if rank == 0:
        print(f"epoch {epoch}: loss {total_loss.item() / len(train_set):.6f}")

if rank == 0:
    torch.save(model.state_dict(), args.save)
dist.destroy_process_group()
