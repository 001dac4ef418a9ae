"""Fine-tune a Hugging Face model on the functions of Python's standard library: sequences of any length, weighted by tokens.

    python examples/finetune_hf.py                               # one device; a small Llama, built from a config
    evenload run examples/finetune_hf.py                         # all devices of this machine
    evenload run examples/finetune_hf.py --model gpt2 --lr 5e-5  # a model from the hub or a folder

The loss of the model is a mean over its predicted tokens, and a rank with long functions has more of them. loss_fn returns
their number, so that the mean is taken over the global batch. Afterwards the model is a plain one: generate and save_pretrained
work. Without --model nothing is downloaded: the tokens are bytes.
"""

import argparse
import re
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import evenload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder or hub name of the initial model; a small Llama from a config by default")
parser.add_argument("--width", type=int, default=128, help="width of the small Llama")
parser.add_argument("--depth", type=int, default=4, help="depth of the small Llama")
parser.add_argument("--context", type=int, default=256, help="maximum tokens of a function; longer ones are truncated")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--steps", type=int, help="maximum optimizer steps in an epoch; all functions by default")
parser.add_argument("--batch-size", type=int, default=16, help="functions in a step, over all devices")
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--seed", type=int, help="seed of the weights and the order; 0 by default")
parser.add_argument("--project-dir", help="the run folder; runs/finetune_hf by default")
parser.add_argument("--save", default="runs/finetune_hf/model", help="folder to save the model to")
args = parser.parse_args()


def functions() -> list[str]:
    """Return the top-level functions of the standard library's modules as text."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces = re.split(r"^(?=\S)", file.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE)
        found += [piece.rstrip() + "\n" for piece in pieces if piece.startswith("def ")]
    return found


def collate(texts: list[str]) -> dict[str, torch.Tensor]:
    """Return tokens (n, longest) and labels, without labels for the padding."""
    batch = tokenizer(texts, padding=True, truncation=True, max_length=args.context, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


run = evenload.init(project_dir=args.project_dir, seed=args.seed)

if args.model is None:
    tokenizer = ByT5Tokenizer(extra_ids=0)  # one token per byte; needs no file
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.depth,
        num_attention_heads=args.width // 32,
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
else:
    with run.main_first():  # rank 0 downloads first
        tokenizer, model = AutoTokenizer.from_pretrained(args.model), AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

texts = functions()
val_texts, train_texts = texts[::20], [text for index, text in enumerate(texts) if index % 20]
if args.steps is not None:
    train_texts = train_texts[: args.steps * args.batch_size]
loader = DataLoader(train_texts, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(loader))
run.resume(model=model, optimizer=optimizer, scheduler=scheduler)


def loss_fn(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(**batch).loss, evenload.count_tokens(batch["labels"])


model.train()
for _ in range(loader.epoch, args.epochs):
    for step in loader:
        loss = step.backward(loss_fn)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log({"loss": loss, "lr": scheduler.get_last_lr()[0]})
        run.checkpoint(every="10min")

model.eval()
total_loss, num_tokens = 0.0, 0
with torch.no_grad():
    for batch in run.batches(DataLoader(val_texts, batch_size=args.batch_size, collate_fn=collate)):
        loss, count = loss_fn(batch)
        total_loss, num_tokens = total_loss + (loss * count).item(), num_tokens + count.item()
total_loss, num_tokens = run.reduce((total_loss, num_tokens))

if run.is_main:
    print(f"validation loss {total_loss / num_tokens:.6f} nats a token, over {num_tokens:,} tokens")
    prompt = tokenizer("def read_", add_special_tokens=False, return_tensors="pt").to(run.device)
    written = model.generate(**prompt, max_new_tokens=120, do_sample=True, temperature=0.7)
    print(tokenizer.decode(written[0], skip_special_tokens=True))
    model.save_pretrained(args.save)
    tokenizer.save_pretrained(args.save)
    print(f"saved in {args.save}; transformers.AutoModelForCausalLM.from_pretrained({args.save!r}) loads it")
