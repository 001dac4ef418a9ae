"""Train an image classifier: the loop of torchvision's reference scripts, with DDP.

    python examples/ports/image_plain.py
    torchrun --nproc-per-node 2 examples/ports/image_plain.py

Written for this project after the structure of `references/classification/train.py`. image_evenload.py is the same training
with Evenload.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from image_model import SmallResNet, load_data
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler


def init_distributed_mode(args):
    args.distributed = "RANK" in os.environ
    args.rank, args.world_size = 0, 1
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not args.distributed:
        print("Not using distributed mode")
        return
    if args.device.type == "cuda":
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()


def train_one_epoch(model, criterion, optimizer, loader, model_ema, scaler, epoch, args):
    model.train()
    for index, (image, target) in enumerate(loader):
        image, target = image.to(args.device), target.to(args.device)
        with torch.autocast(args.device.type, enabled=args.amp):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if args.clip_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        if index % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)  # no average during the warm-up
        if index % args.print_freq == 0 and args.rank == 0:
            print(f"epoch {epoch} [{index}/{len(loader)}] loss {loss.item():.6f}")


def evaluate(model, criterion, loader, args, name):
    model.eval()
    total_loss, num_correct, num_samples = 0.0, 0, 0
    with torch.inference_mode():
        for image, target in loader:
            image, target = image.to(args.device), target.to(args.device)
            output = model(image)
            total_loss += criterion(output, target).item() * len(target)
            num_correct += (output.argmax(1) == target).sum().item()
            num_samples += len(target)
    if args.distributed:  # the last batch of the sampler repeats samples, which are counted twice
        totals = torch.tensor([total_loss, num_correct, num_samples], device=args.device, dtype=torch.float64)
        dist.all_reduce(totals)
        total_loss, num_correct, num_samples = totals.tolist()
    if args.rank == 0:
        print(f"{name}: loss {total_loss / num_samples:.6f}, acc@1 {100 * num_correct / num_samples:.2f}")


def main(args):
    init_distributed_mode(args)
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    if args.distributed:
        train_sampler = DistributedSampler(train_set)
        test_sampler = DistributedSampler(test_set, shuffle=False)
    else:
        train_sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(args.seed))
        test_sampler = SequentialSampler(test_set)
    loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, num_workers=args.workers, drop_last=True)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler, num_workers=args.workers)

    model = SmallResNet().to(args.device)
    if args.distributed and args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=args.lr_warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs - args.lr_warmup_epochs)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [args.lr_warmup_epochs])
    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module
    average = get_ema_multi_avg_fn(args.model_ema_decay)
    model_ema = AveragedModel(model_without_ddp, multi_avg_fn=average, use_buffers=True)

    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["lr_scheduler"])
        model_ema.load_state_dict(checkpoint["model_ema"])
        scaler.load_state_dict(checkpoint["scaler"])
        start_epoch = checkpoint["epoch"] + 1

    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, loader, model_ema, scaler, epoch, args)
        scheduler.step()
        evaluate(model, criterion, test_loader, args, name=f"epoch {epoch} test")
        evaluate(model_ema, criterion, test_loader, args, name=f"epoch {epoch} test of the average")
        if args.rank == 0:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            checkpoint = {
                "model": model_without_ddp.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": scheduler.state_dict(),
                "model_ema": model_ema.state_dict(),
                "scaler": scaler.state_dict(),
                "epoch": epoch,
            }
            torch.save(checkpoint, Path(args.output_dir) / "checkpoint.pth")
    if args.distributed:
        dist.destroy_process_group()


def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="images per device")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--lr-warmup-epochs", type=int, default=1)
    parser.add_argument("--clip-grad-norm", type=float)
    parser.add_argument("--model-ema-steps", type=int, default=4)
    parser.add_argument("--model-ema-decay", type=float, default=0.9)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--print-freq", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", help="a checkpoint")
    parser.add_argument("--output-dir", default="runs/image")
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
