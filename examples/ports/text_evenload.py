"""The training of text_plain.py on any number of devices.

evenload run -d cpu:2 examples/ports/text_evenload.py
"""

import argparse

import torch
from text_data import MODULES, load_splits
from torch.utils.data import DataLoader, RandomSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    DataCollatorWithPadding,
    get_scheduler,
)

import evenload

parser = argparse.ArgumentParser()
parser.add_argument("--max_length", type=int, default=128)
parser.add_argument("--hidden_size", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--train_batch_size", type=int, default=32)
parser.add_argument("--learning_rate", type=float, default=2e-3)
parser.add_argument("--weight_decay", type=float, default=0.01)
parser.add_argument("--num_train_epochs", type=int, default=3)
parser.add_argument("--max_train_samples", type=int)
parser.add_argument("--lr_scheduler_type", default="linear")
parser.add_argument("--num_warmup_steps", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output_dir", default="runs/text")
args = parser.parse_args()

run = evenload.init(project_dir=args.output_dir, seed=args.seed)
torch.manual_seed(args.seed)

tokenizer = ByT5Tokenizer(extra_ids=0)
train_set, eval_set = load_splits(tokenizer, args.max_length)
train_set = train_set[: args.max_train_samples]
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=args.hidden_size,
    intermediate_size=2 * args.hidden_size,
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_dropout_prob=args.dropout,
    attention_probs_dropout_prob=args.dropout,
    max_position_embeddings=args.max_length,
    num_labels=len(MODULES),
)
model = BertForSequenceClassification(config)

collator = DataCollatorWithPadding(tokenizer)  # pads to the longest of a batch
sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(args.seed))
train_loader = DataLoader(train_set, batch_size=args.train_batch_size, sampler=sampler, collate_fn=collator)
eval_loader = DataLoader(eval_set, batch_size=32, collate_fn=collator)
model, train_loader = run.prepare(model, train_loader)

no_decay = ("bias", "LayerNorm.weight")
decayed = [p for n, p in model.named_parameters() if not n.endswith(no_decay)]
others = [p for n, p in model.named_parameters() if n.endswith(no_decay)]
groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
scheduler = get_scheduler(
    args.lr_scheduler_type, optimizer, args.num_warmup_steps, args.num_train_epochs * len(train_loader)
)
run.resume(model=model, optimizer=optimizer, scheduler=scheduler)


def loss_fn(batch):
    return model(**batch).loss


for epoch in range(train_loader.epoch, args.num_train_epochs):
    model.train()
    total_loss = 0.0
    for step in train_loader:
        total_loss += step.backward(loss_fn)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    num_correct = 0
    with torch.no_grad():
        for batch in run.batches(eval_loader):
            predictions = model(**batch).logits.argmax(dim=-1)
            num_correct += (predictions == batch["labels"]).sum().item()
    accuracy = run.reduce(num_correct) / len(eval_set)
    run.print(f"epoch {epoch}: train_loss {total_loss / len(train_loader):.6f}, accuracy {accuracy:.4f}")
    run.checkpoint()

if run.is_main:
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
