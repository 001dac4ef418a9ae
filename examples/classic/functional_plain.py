"""data_parallel(), the function behind nn.DataParallel, with the usual mistakes fixed.

    python examples/classic/functional_plain.py

Comments name each usual mistake at the line that fixes it.
"""

import torch
import torch.nn.functional as F
from torch.nn.parallel import data_parallel
from torch.utils.data import DataLoader, RandomSampler
from toy import Net, options, spirals

args = options(__doc__)
if args.double:
    torch.set_default_dtype(torch.float64)

num_gpus = torch.cuda.device_count()
device = torch.device("cuda:0" if num_gpus else "cpu")

torch.manual_seed(args.seed)
train_set = spirals(1437, seed=1)
order = torch.Generator().manual_seed(args.seed)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=RandomSampler(train_set, generator=order))
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

for epoch in range(args.epochs):
    total_loss = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        # Usual mistake: to call it on any machine. Without a GPU it raises, or computes on one device.
        output = data_parallel(model, x, device_ids=list(range(num_gpus))) if num_gpus else model(x)
        loss = F.cross_entropy(output, y)  # of the gathered outputs: a mean over all samples, however they were split
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total_loss += loss.item() * len(y)
    print(f"epoch {epoch}: loss {total_loss / len(train_set):.6f}")

torch.save(model.state_dict(), args.save)
