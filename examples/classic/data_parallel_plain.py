"""nn.DataParallel with the usual mistakes fixed: one process, one thread per GPU, equal parts of each batch.

    python examples/classic/data_parallel_plain.py

Comments name each usual mistake at the line that fixes it.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from toy import Net, options, spirals

args = options(__doc__)
if args.double:
    torch.set_default_dtype(torch.float64)

# Usual mistake: to assume several devices. Without a GPU, DataParallel silently uses one.
num_gpus = torch.cuda.device_count()
device = torch.device("cuda:0" if num_gpus else "cpu")
print(f"computes on {num_gpus} GPUs" if num_gpus else "computes on the CPU: nn.DataParallel spreads over GPUs only")

torch.manual_seed(args.seed)
train_set, test_set = spirals(1437, seed=1), spirals(299, seed=2)
# The batch size is global: each of 4 GPUs gets 16 of 64. Usual mistake: 16 here, so that each gets 4. The order has a separate
# generator, so that no other random draw changes it.
order = torch.Generator().manual_seed(args.seed)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=RandomSampler(train_set, generator=order))
model = Net().to(device)  # on the first GPU; each step copies it to the others
parallel = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

for epoch in range(args.epochs):
    total_loss = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        # The loss of the gathered outputs. Usual mistake: a loss inside the model, whose mean over the GPUs is not the mean over
        # the samples if the last batch cannot be split equally.
        loss = F.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Usual mistake: the mean of the batch means, in which the last batch (29 samples) counts as much as the others.
        total_loss += loss.item() * len(y)
    print(f"epoch {epoch}: loss {total_loss / len(train_set):.6f}")

model.eval()
num_right = 0
with torch.no_grad():
    for x, y in DataLoader(test_set, batch_size=256):
        num_right += (parallel(x.to(device)).argmax(1).cpu() == y).sum().item()
print(f"{num_right} of {len(test_set)} right")

# Usual mistake: parallel.state_dict(), whose names start with "module." and do not fit the plain model.
torch.save(model.state_dict(), args.save)
