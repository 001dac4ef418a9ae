"""mp.spawn and DistributedDataParallel with the usual mistakes fixed, on one machine: a rank per GPU, else two CPU ranks.

    python examples/classic/ddp_spawn_plain.py

Comments name each usual mistake at the line that fixes it.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset
from toy import Net, options, spirals


class Parts:
    """This rank's part of each global batch: every sample exactly once."""

    def __init__(self, batches: BatchSampler, rank: int, world_size: int) -> None:
        self.batches, self.rank, self.world_size = batches, rank, world_size

    def __iter__(self):
        for batch in self.batches:
            # Usual mistake: the same order on all ranks without a split, so that all compute the same batch.
            yield batch[self.rank :: self.world_size]

    def __len__(self) -> int:
        return len(self.batches)


def train(rank: int, world_size: int, rendezvous: str, args: argparse.Namespace) -> None:
    if args.double:
        torch.set_default_dtype(torch.float64)
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)  # usual mistake: left out, so that every rank also uses memory on GPU 0
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))  # usual mistake: each rank uses all cores
    # Usual mistake: a fixed port such as 12355, which collides with a second job on this machine. A temporary file does not.
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)

    # The same seed everywhere: the same order of samples, and the same model (DDP broadcasts rank 0's in any case). Seed what
    # should differ between ranks (dropout) again after it: torch.manual_seed(args.seed + 1 + rank).
    torch.manual_seed(args.seed)
    train_set, test_set = spirals(1437, seed=1), spirals(299, seed=2)
    order = torch.Generator().manual_seed(args.seed)  # a separate generator: the same order on all ranks
    batches = BatchSampler(RandomSampler(train_set, generator=order), args.batch_size, drop_last=False)
    loader = DataLoader(train_set, batch_sampler=Parts(batches, rank, world_size))
    if 0 < len(train_set) % args.batch_size < world_size:
        raise SystemExit("the last batch has fewer samples than there are ranks")
    model = Net().to(device)
    parallel = DistributedDataParallel(model, device_ids=[rank] if device.type == "cuda" else None)
    # Usual mistake: multiply the learning rate by the number of ranks although the global batch is unchanged.
    optimizer = torch.optim.SGD(parallel.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        total_loss = torch.zeros((), device=device)
        for index, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            num_samples = min(args.batch_size, len(train_set) - index * args.batch_size)  # of the global batch
            # DDP averages over ranks. Usual mistake: the mean loss of each rank's part: of the last batch, 29 samples, 15 would
            # count as much as 14. So take the sum over this part, divided by the samples of the whole batch, times
            # world_size, by which DDP divides.
            loss = F.cross_entropy(parallel(x), y, reduction="sum")
            (loss / num_samples * world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            total_loss += loss.detach()
        # Usual mistakes: every rank prints; or rank 0 prints the loss of its part as the total.
        dist.all_reduce(total_loss)
        if rank == 0:
            print(f"epoch {epoch}: loss {total_loss.item() / len(train_set):.6f}")

    # Usual mistake: a DistributedSampler, which repeats samples until all ranks have equally many: 300 instead of 299. Use the
    # plain model, because the number of batches may differ between ranks.
    model.eval()
    num_right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for x, y in DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=256):
            num_right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    dist.all_reduce(num_right)
    if rank == 0:
        print(f"{num_right.item()} of {len(test_set)} right")

    # Usual mistakes: all ranks write the same file; parallel.state_dict(), whose names start with "module."; a file that is
    # read before it is written; without map_location, all ranks load onto GPU 0.
    if rank == 0:
        torch.save(model.state_dict(), args.save)
    dist.barrier()
    model.load_state_dict(torch.load(args.save, map_location=device, weights_only=True))

    dist.destroy_process_group()  # usual mistake: left out, so that processes exit with warnings or hang


if __name__ == "__main__":  # usual mistake: left out, so that each spawned process spawns again
    args = options(__doc__)
    world_size = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(world_size, f"{folder}/rendezvous", args), nprocs=world_size)
