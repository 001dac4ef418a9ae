"""The training of image_plain.py with Evenload.

evenload run -d cpu:2 examples/ports/image_evenload.py
"""

import argparse

import torch
from image_model import SmallResNet, load_data
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, RandomSampler

import evenload


def train_one_epoch(run, model, criterion, optimizer, loader, model_ema, epoch, args):
    def loss_fn(batch):
        image, target = batch
        return criterion(model(image), target)

    model.train()
    for index, step in enumerate(loader):
        optimizer.zero_grad()
        loss = step.backward(loss_fn)
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        if index % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)  # no average during the warm-up
        if index % args.print_freq == 0:
            run.print(f"epoch {epoch} [{index}/{len(loader)}] loss {loss.item():.6f}")


def evaluate(run, model, criterion, loader, name):
    model.eval()
    total_loss, num_correct, num_samples = 0.0, 0, 0
    with torch.inference_mode():
        for image, target in run.batches(loader):
            output = model(image)
            total_loss += criterion(output, target).item() * len(target)
            num_correct += (output.argmax(1) == target).sum().item()
            num_samples += len(target)
    total_loss, num_correct, num_samples = run.reduce([total_loss, num_correct, num_samples])
    run.print(f"{name}: loss {total_loss / num_samples:.6f}, acc@1 {100 * num_correct / num_samples:.2f}")


def main(args):
    run = evenload.init(project_dir=args.output_dir, seed=args.seed, precision="bf16" if args.amp else "no")
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    train_sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(args.seed))
    loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, num_workers=args.workers, drop_last=True)
    test_loader = DataLoader(test_set, args.batch_size, num_workers=args.workers)

    model, loader = run.prepare(SmallResNet(), loader)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=args.lr_warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs - args.lr_warmup_epochs)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [args.lr_warmup_epochs])
    average = get_ema_multi_avg_fn(args.model_ema_decay)
    model_ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True)

    run.resume(model=model, optimizer=optimizer, lr_scheduler=scheduler, model_ema=model_ema)

    for epoch in range(loader.epoch, args.epochs):
        train_one_epoch(run, model, criterion, optimizer, loader, model_ema, epoch, args)
        scheduler.step()
        evaluate(run, model, criterion, test_loader, name=f"epoch {epoch} test")
        evaluate(run, model_ema, criterion, test_loader, name=f"epoch {epoch} test of the average")
        run.checkpoint()


def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="images of a step, on all devices together")
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
    parser.add_argument("--print-freq", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs/image")
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
